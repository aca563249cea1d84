"""mDNS: adverts as strangers may send them, and two daemons that see each other over real multicast."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import trio
import zeroconf
from hypothesis import given, settings
from hypothesis import strategies as st

from meshllm.layout.layout import NodeId
from meshllm.net.adverts import SERVICE_TYPE, Announcement, Ignored, Sighting, read_advert, service_info
from meshllm.net.discovery import Discovery
from meshllm.net.interfaces import Interface, read_interfaces

TAG = "0123456789abcdef"
OWN = Announcement(NodeId("a" * 16), TAG, "1.0", 4000)
LAN = (Interface("eth0", 2, True, False, ("192.0.2.1", "fe80::1")),)
GOOD = {b"id": b"b" * 16, b"v": b"1.0", b"tag": TAG.encode()}


def loopback() -> tuple[Interface, ...]:
    return tuple(one for one in read_interfaces() if one.is_loopback)


def test_a_good_advert_gives_node_and_addresses() -> None:
    assert read_advert(4001, GOOD, ["fe80::7%2", "192.0.2.7"], OWN, LAN) == Sighting(
        NodeId("b" * 16), (("192.0.2.7", 4001), ("fe80::7%2", 4001))
    )


@pytest.mark.parametrize(
    ("port", "changed", "addresses"),
    [
        (0, {}, ["192.0.2.7"]),
        (None, {}, ["192.0.2.7"]),
        (4001, {b"id": b"../../x"}, ["192.0.2.7"]),
        (4001, {b"id": None}, ["192.0.2.7"]),
        (4001, {b"id": b"a" * 16}, ["192.0.2.7"]),
        (4001, {b"v": b"\x1b[31m"}, ["192.0.2.7"]),
        (4001, {b"tag": b"f" * 16}, ["192.0.2.7"]),
        (4001, {b"tag": b"\xff\xfe"}, ["192.0.2.7"]),
        (4001, {}, []),
        (4001, {}, ["127.0.0.1", "::1", "Lamp 7\r\n"]),
    ],
)
def test_odd_adverts_are_ignored_disc_11(
    port: int | None, changed: dict[bytes, bytes | None], addresses: list[str]
) -> None:
    ignored = read_advert(port, {**GOOD, **changed}, addresses, OWN, LAN)
    assert isinstance(ignored, Ignored)
    assert ignored.reason.isprintable()


@settings(max_examples=50, deadline=None)
@given(
    st.none() | st.integers(-1, 1 << 17),
    st.dictionaries(st.sampled_from([b"id", b"v", b"tag"]) | st.binary(max_size=9), st.none() | st.binary(max_size=20)),
    st.lists(st.text(max_size=20), max_size=40),
)
def test_no_advert_raises_disc_11(port: int | None, fields: dict[bytes, bytes | None], addresses: list[str]) -> None:
    assert isinstance(read_advert(port, {**GOOD, **fields}, addresses, OWN, LAN), (Sighting, Ignored))


def test_announcement_holds_no_name_and_fits_its_labels_disc_09() -> None:
    info = service_info(OWN, ["192.0.2.1"])
    assert len(SERVICE_TYPE.split(".")[0]) <= 16  # with the underscore
    assert max(len(label) for label in info.name.split(".")) <= 63
    assert set(info.properties) == {b"id", b"v", b"tag"}
    assert len(info.text) < 255


async def watch(own: Announcement, sightings: list[Sighting | Ignored], reports: list[tuple[str, str]]) -> None:
    def report(event: str, detail: str) -> None:
        reports.append((event, detail))

    await Discovery(own, (), sightings.append, report, loopback).run()


async def until(found: list[Sighting | Ignored], node: str, *, gone: bool = False) -> None:
    while not any(isinstance(one, Sighting) and one.node == node and (not one.addresses) == gone for one in found):  # noqa: ASYNC110
        await trio.sleep(0.02)


async def until_reported(reports: list[tuple[str, str]], n: int) -> None:
    while len(reports) < n:  # noqa: ASYNC110  # another thread's doing
        await trio.sleep(0.02)


async def test_two_daemons_see_each_other_on_loopback_and_say_goodbye() -> None:
    one, two = Announcement(NodeId("1" * 16), TAG, "1.0", 4001), Announcement(NodeId("2" * 16), TAG, "1.0", 4002)
    seen_by_one: list[Sighting | Ignored] = []
    seen_by_two: list[Sighting | Ignored] = []
    reports: list[tuple[str, str]] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, one, seen_by_one, reports)
            async with trio.open_nursery() as second:
                second.start_soon(watch, two, seen_by_two, reports)
                await until(seen_by_one, two.node)
                await until(seen_by_two, one.node)
                await until_reported(reports, 2)
                second.cancel_scope.cancel()
            await until(seen_by_one, two.node, gone=True)
            nursery.cancel_scope.cancel()
    assert reports == [("interfaces_chosen", "lo")] * 2
    assert ("127.0.0.1", 4002) in next(s for s in seen_by_one if isinstance(s, Sighting) and s.addresses).addresses


@pytest.fixture
def stranger() -> Iterator[zeroconf.Zeroconf]:
    zc = zeroconf.Zeroconf(interfaces=["127.0.0.1"])
    yield zc
    zc.close()


async def test_strange_records_do_not_disturb_discovery_disc_11(stranger: zeroconf.Zeroconf) -> None:
    own, peer = Announcement(NodeId("3" * 16), TAG, "1.0", 4003), Announcement(NodeId("4" * 16), TAG, "1.0", 4004)
    found: list[Sighting | Ignored] = []

    def publish() -> None:
        odd = [
            zeroconf.ServiceInfo(SERVICE_TYPE, f"Lamp 7.{SERVICE_TYPE}", port=80, parsed_addresses=["127.0.0.1"]),
            zeroconf.ServiceInfo(SERVICE_TYPE, f"zero.{SERVICE_TYPE}", port=0, parsed_addresses=["127.0.0.1"]),
            zeroconf.ServiceInfo(
                SERVICE_TYPE,
                f"path.{SERVICE_TYPE}",
                port=81,
                properties={"id": "../../x", "v": "1.0", "tag": TAG},
                parsed_addresses=["127.0.0.1"],
            ),
        ]
        for info in odd:
            info.set_server_if_missing()
            stranger.send(_broadcast(stranger, info))
        stranger.register_service(service_info(peer, ["127.0.0.1"]))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, own, found, [])
            await trio.to_thread.run_sync(publish)
            await until(found, peer.node)
            nursery.cancel_scope.cancel()
    assert [one for one in found if isinstance(one, Sighting) and one.addresses and one.node != peer.node] == []


def _broadcast(zc: zeroconf.Zeroconf, info: zeroconf.ServiceInfo) -> zeroconf.DNSOutgoing:
    return zc.generate_service_broadcast(info, None)


async def test_a_name_conflict_does_not_stop_a_cloned_device() -> None:
    clone = Announcement(NodeId("5" * 16), TAG, "1.0", 4005)
    reports: list[tuple[str, str]] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(watch, clone, [], reports)
            await until_reported(reports, 2)
            nursery.cancel_scope.cancel()
    assert {event for event, _ in reports} == {"interfaces_chosen"}


async def test_what_is_still_announced_at_the_end_is_closed_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    registered, ended, left = threading.Event(), threading.Event(), threading.Event()
    closes: list[int] = []
    register, close = zeroconf.Zeroconf.register_service, zeroconf.Zeroconf.close

    def slow_register(zc: zeroconf.Zeroconf, info: zeroconf.ServiceInfo, *, allow_name_change: bool) -> None:
        register(zc, info, allow_name_change=allow_name_change)
        registered.set()
        ended.wait(10)

    def count_close(zc: zeroconf.Zeroconf) -> None:
        closes.append(threading.get_ident())
        close(zc)
        left.set()

    monkeypatch.setattr(zeroconf.Zeroconf, "register_service", slow_register)
    monkeypatch.setattr(zeroconf.Zeroconf, "close", count_close)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, OWN, [], [])
            await trio.to_thread.run_sync(registered.wait)
            nursery.cancel_scope.cancel()
        ended.set()
        await trio.to_thread.run_sync(left.wait)
        await trio.sleep(0.3)  # for a second close to be seen
    assert len(closes) == 1


async def test_no_network_at_all_is_a_normal_state() -> None:
    reports: list[tuple[str, str]] = []
    with trio.move_on_after(0.3):
        await Discovery(OWN, (), lambda _: None, lambda *report: reports.append(report), lambda: ()).run()
    assert reports == []


async def test_an_interface_that_comes_later_is_used_and_a_flapping_one_is_damped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshllm.net.discovery.POLL_S", 0.05)
    own = Announcement(NodeId("6" * 16), TAG, "1.0", 4006)
    reports: list[tuple[str, str]] = []
    flaps = iter([(), loopback(), (), loopback(), ()])

    def read() -> tuple[Interface, ...]:
        return next(flaps, loopback())

    def report(event: str, detail: str) -> None:
        reports.append((event, detail))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Discovery(own, (), lambda _: None, report, read).run)
            await until_reported(reports, 1)
            nursery.cancel_scope.cancel()
    assert reports == [("interfaces_chosen", "lo")]
    assert next(flaps, None) is None  # not before it stood still


async def test_a_changed_address_is_announced_again_disc_07(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshllm.net.discovery.POLL_S", 0.05)
    own, other = Announcement(NodeId("7" * 16), TAG, "1.0", 4007), Announcement(NodeId("8" * 16), TAG, "1.0", 4008)
    (lo,) = loopback()
    lease = {"address": "127.0.0.1"}
    found: list[Sighting | Ignored] = []
    reports: list[tuple[str, str]] = []

    def read() -> tuple[Interface, ...]:
        return (Interface(lo.name, lo.index, True, True, (lease["address"],)),)

    def report(event: str, detail: str) -> None:
        reports.append((event, detail))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Discovery(own, (), lambda _: None, report, read).run)
            nursery.start_soon(watch, other, found, [])
            await until(found, own.node)
            await until_reported(reports, 1)
            lease["address"] = "127.0.0.2"  # any of 127/8 is ours on Linux
            while not any(isinstance(one, Sighting) and ("127.0.0.2", 4007) in one.addresses for one in found):  # noqa: ASYNC110
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
