"""Which interfaces and addresses are used: facts of the kernel, and the choice as a pure function."""

from __future__ import annotations

import pytest

from meshllm.net.interfaces import (
    Interface,
    announced_addresses,
    choose_interfaces,
    dialable_addresses,
    read_interfaces,
)

LO = Interface("lo", 1, True, True, ("127.0.0.1", "::1"))
LAN = Interface("eth0", 2, True, False, ("192.0.2.1", "2001:db8::1", "fe80::1"))
WLAN = Interface("wlan0", 7, True, False, ("198.51.100.9", "fe80::9"))
DOCKER = Interface("docker0", 3, True, False, ("172.17.0.1",))
BRIDGE_DOWN = Interface("br-test", 4, False, False, ("172.17.0.1",))
VETH = Interface("veth12ab", 5, True, False, ("fe80::2",))
TUN = Interface("tun0", 6, True, False, ("10.8.0.1",))
EVERY = (LO, LAN, DOCKER, BRIDGE_DOWN, VETH, TUN)


def test_down_and_virtual_interfaces_are_left_out_by_default_disc_01() -> None:
    assert choose_interfaces(EVERY, ()) == (LAN,)
    assert announced_addresses((LAN,)) == ("192.0.2.1", "2001:db8::1", "fe80::1")


def test_patterns_change_the_choice_disc_01() -> None:
    assert choose_interfaces(EVERY, ("tun*", "eth0")) == (LAN, TUN)
    assert choose_interfaces((*EVERY, WLAN), ("!wlan*",)) == (LAN,)
    assert choose_interfaces(EVERY, ("br-*",)) == ()  # a link that is down stays out


def test_loopback_serves_where_there_is_nothing_else() -> None:
    assert choose_interfaces((LO, DOCKER, BRIDGE_DOWN), ()) == (LO,)
    assert announced_addresses((LO,)) == ("127.0.0.1", "::1")


def test_loopback_is_never_announced_beside_a_lan_disc_07() -> None:
    chosen = choose_interfaces((LO, LAN), ("*",))
    assert chosen == (LO, LAN)
    assert all(not text.startswith("127.") and text != "::1" for text in announced_addresses(chosen))


def test_addresses_come_from_interfaces_not_from_the_host_name_disc_07(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("asked a resolver"))
    assert "127.0.1.1" not in announced_addresses(choose_interfaces(read_interfaces(), ()))


def test_link_local_gets_the_scope_it_came_in_on_disc_03() -> None:
    far = "fe80::1234:56ff:fe78:9abc"
    assert dialable_addresses([f"{far}%2"], (LAN, WLAN)) == (f"{far}%2",)
    assert dialable_addresses([f"{far}%wlan0"], (LAN, WLAN)) == (f"{far}%7",)


@pytest.mark.parametrize("text", ["fe80::1234:56ff:fe78:9abc%0", "fe80::1234:56ff:fe78:9abc"])
def test_link_local_without_a_scope_is_tried_on_each_link_disc_03(text: str) -> None:
    assert dialable_addresses([text], (LAN, WLAN)) == (
        "fe80::1234:56ff:fe78:9abc%2",
        "fe80::1234:56ff:fe78:9abc%7",
    )
    assert dialable_addresses([text], (DOCKER,)) == ()  # no IPv6 there: skipped


def test_global_addresses_come_before_link_local_disc_03() -> None:
    announced = ["fe80::5%2", "2001:db8::5", "192.0.2.5", "169.254.3.4"]
    assert dialable_addresses(announced, (LAN,)) == ("192.0.2.5", "2001:db8::5", "169.254.3.4", "fe80::5%2")


def test_a_scope_of_an_unused_interface_is_skipped() -> None:
    assert dialable_addresses(["fe80::5%99"], (LAN,)) == ()


def test_useless_addresses_of_a_peer_are_dropped_disc_11() -> None:
    announced = ["127.0.0.1", "::1", "0.0.0.0", "::", "224.0.0.251", "ff02::fb", "not an address", "192.0.2.7"]
    assert dialable_addresses(announced, (LAN,)) == ("192.0.2.7",)
    assert dialable_addresses(["127.0.0.1"], (LO,)) == ("127.0.0.1",)


def test_two_hundred_addresses_are_cut_disc_11() -> None:
    assert len(dialable_addresses([f"192.0.2.{i}" for i in range(200)], (LAN,))) == 16


def test_this_machine_has_a_loopback() -> None:
    assert any(one.is_loopback and one.is_up and "127.0.0.1" in one.addresses for one in read_interfaces())
