"""Networks as they are at home: each in network namespaces, with real daemons and the real model."""

from __future__ import annotations

import time

import pytest

from meshllm.status import PeerStatus, Status
from tests.margins import clear_tokens
from tests.system.mesh import Daemon, Mesh, set_link
from tests.system.networks import FIRST, SECOND, Hosts, hosts, ip
from tests.system.readers import COUNTING, Reader

pytestmark = pytest.mark.usefixtures("need_namespaces")
BACK_S = 40.0  # a device that comes back is used: 8 s to the next dial, a layout, and a busy machine


def _start(mesh: Mesh, at: Hosts, model, *flags: str) -> list[Daemon]:
    return [mesh.start(name, *flags, model=model, host=name) for name in at.names]


def _other(status: Status) -> PeerStatus:
    """The one other device."""
    (peer,) = [peer for peer in status.peers if peer.state != "self"]
    return peer


def _check_golden(daemon: Daemon, greedy) -> None:
    for case in greedy("Q4_1")[:3]:
        assert tuple(daemon.complete(case.prompt, len(case.tokens))["token_ids"]) == case.tokens


def test_same_docker_bridge_on_every_host_leads_nowhere_disc_01(tmp_path, smollm2_path, greedy) -> None:
    """Case DISC-01: 172.17.0.1 is up on both, and neither announced nor dialled."""
    with hosts(2) as at, Mesh(tmp_path) as mesh:
        at.everywhere("link", "add", "docker0", "type", "bridge")
        at.everywhere("link", "add", "veth1a2b", "type", "veth", "peer", "name", "inside")
        for device in ("docker0", "veth1a2b", "inside"):
            at.everywhere("link", "set", device, "up")
        at.everywhere("link", "set", "veth1a2b", "master", "docker0")
        at.everywhere("addr", "add", "172.17.0.1/16", "dev", "docker0")
        daemons = _start(mesh, at, smollm2_path)
        for status in mesh.wait_ranks(2, *daemons):
            assert (_other(status).address or "").startswith(FIRST)
        _check_golden(daemons[1], greedy)
        assert "172.17.0.1" not in "".join(daemon.log for daemon in daemons)


def test_second_interface_takes_over_when_the_one_in_use_goes(tmp_path, smollm2_path) -> None:
    with hosts(2) as at, Mesh(tmp_path) as mesh:
        at.second_cable()
        first, second = _start(mesh, at, smollm2_path)
        (status, _) = mesh.wait_ranks(2, first, second)
        before = (_other(status).address or "").rpartition(".")[0]
        assert before in (FIRST, SECOND)
        want = clear_tokens(first.complete(COUNTING, 24, logprobs=2))
        reader = Reader(first)
        assert reader.began.wait(30)
        ip(at.names[1], "link", "set", "eth0" if before == FIRST else "eth1", "down")
        assert reader.whole()[: len(want)] == want
        after = SECOND if before == FIRST else FIRST
        mesh.wait(
            lambda status: _other(status).state == "connected" and (_other(status).address or "").startswith(after),
            first,
            second,
            within_s=BACK_S,
        )
        mesh.wait_ranks(2, first, second, within_s=BACK_S)


def test_one_way_visibility_is_enough(tmp_path, smollm2_path, greedy) -> None:
    """The second hears no multicast: it is dialled, and knows of nobody till then."""
    with hosts(2) as at, Mesh(tmp_path) as mesh:
        at.no_multicast_to(1)
        daemons = _start(mesh, at, smollm2_path)
        mesh.wait_ranks(2, *daemons)
        _check_golden(daemons[1], greedy)


def test_no_multicast_at_all_and_one_address_given(tmp_path, smollm2_path, greedy) -> None:
    with hosts(3) as at, Mesh(tmp_path) as mesh:
        at.no_multicast_to(0, 1, 2)
        first = mesh.start("first", model=smollm2_path, host=at.names[0])
        given = ("--peer", f"{FIRST}.1:{first.port}")
        others = [mesh.start(name, *given, model=smollm2_path, host=name) for name in at.names[1:]]
        mesh.wait_ranks(3, first, *others)
        _check_golden(others[1], greedy)


@pytest.mark.parametrize("only", ["IPv4", "IPv6"])
def test_one_version_of_ip_is_enough_disc_03(tmp_path, smollm2_path, greedy, only: str) -> None:
    """Case DISC-03: with IPv6 there are link-local addresses and nothing else."""
    with hosts(2, ipv6=only == "IPv6") as at, Mesh(tmp_path) as mesh:
        if only == "IPv6":
            at.everywhere("-4", "addr", "flush", "dev", "eth0")
            time.sleep(2)  # the kernel looks for duplicates of the addresses first
        daemons = _start(mesh, at, smollm2_path)
        for status in mesh.wait_ranks(2, *daemons):
            assert (_other(status).address or "").startswith("[fe80:" if only == "IPv6" else FIRST)
        _check_golden(daemons[1], greedy)


def test_device_with_a_new_address_is_the_same_device_disc_07(tmp_path, smollm2_path) -> None:
    """Case DISC-07: the lease of a running daemon's device changes, while an answer runs."""
    with hosts(2) as at, Mesh(tmp_path) as mesh:
        first, second = _start(mesh, at, smollm2_path)
        (before, _) = mesh.wait_ranks(2, first, second)
        reader = Reader(first)
        assert reader.began.wait(30)
        ip(at.names[1], "addr", "del", f"{FIRST}.2/24", "dev", "eth0")
        ip(at.names[1], "addr", "add", f"{FIRST}.99/24", "dev", "eth0")
        reader.whole()
        mesh.wait(lambda s: _other(s).state == "connected" and f"{FIRST}.99" in str(_other(s).address), first)
        (after, _) = mesh.wait_ranks(2, first, second, within_s=BACK_S)
        assert _other(after).id == _other(before).id


def test_flapping_interface_costs_no_answer(tmp_path, smollm2_path) -> None:
    with hosts(2) as at, Mesh(tmp_path) as mesh:
        first, second = _start(mesh, at, smollm2_path)
        mesh.wait_ranks(2, first, second)
        readers = [Reader(first), Reader(second)]
        assert all(reader.began.wait(30) for reader in readers)
        for _ in range(4):
            set_link(at.names[1], "down")
            time.sleep(0.4)
            set_link(at.names[1], "up")
            time.sleep(0.4)
        for reader in readers:
            reader.whole()
        mesh.wait_ranks(2, first, second, within_s=BACK_S)


def test_cloned_node_ids_are_named_and_the_others_go_on(tmp_path, smollm2_path) -> None:
    """A copied disk: the third has the node id of the second. One of them is used, the other learns why it is not, and
    does not ask again all the time.
    """
    with hosts(3) as at, Mesh(tmp_path) as mesh:
        first, second = (mesh.start(name, model=smollm2_path, host=name) for name in at.names[:2])
        mesh.wait_ranks(2, first, second)
        clone = mesh.start("clone", model=smollm2_path, host=at.names[2], wait=False)
        clone.kill()
        (clone.folder / "node-id").write_bytes((second.folder / "node-id").read_bytes())
        clone.run()
        for daemon in (first, second):
            mesh.wait(lambda status: any("same node id" in (peer.reason or "") for peer in status.peers), daemon)
        time.sleep(3)
        assert second.log.count("link_refused") < 8, "it asks all the time"
        for daemon in mesh.daemons.values():
            assert len(daemon.complete(COUNTING, 8)["token_ids"]) == 8


def test_stale_record_of_a_killed_daemon_harms_nobody_disc_05(tmp_path, smollm2_path) -> None:
    """Case DISC-05: no goodbye, so its record lives on. It is out by heartbeat, and back with another port."""
    with hosts(2) as at, Mesh(tmp_path) as mesh:
        first, second = _start(mesh, at, smollm2_path)
        mesh.wait_ranks(2, first, second)
        second.kill()
        mesh.wait(lambda status: _other(status).state == "lost", first, within_s=10)
        mesh.wait_ranks(1, first)
        where = second.words.index("--port") + 1
        second.words[where] = str(second.port + 1 if second.port < 65535 else second.port - 1)
        second.run()
        mesh.wait_ranks(2, first, second, within_s=BACK_S)


def test_device_that_is_seen_and_not_reached_says_where_it_was_tried(tmp_path, smollm2_path) -> None:
    with hosts(2) as at, Mesh(tmp_path) as mesh:
        for name, other in zip(at.names, ("2", "1"), strict=True):
            ip(name, "route", "add", "unreachable", f"{FIRST}.{other}/32")
        first, second = _start(mesh, at, smollm2_path)
        for status in mesh.wait(lambda s: any(p.state == "connecting" and p.reason for p in s.peers), first, second):
            assert f"{FIRST}." in (_other(status).reason or "")
            assert "route" in (_other(status).reason or "")


def test_halves_of_a_split_lan_serve_and_become_one_again(tmp_path, smollm2_path) -> None:
    """Answers of both halves go on when the switch is cut in two, and one that runs when they meet again is whole."""
    with hosts(4) as at, Mesh(tmp_path) as mesh:
        daemons = _start(mesh, at, smollm2_path)
        mesh.wait_ranks(4, *daemons)
        readers = [Reader(daemons[0]), Reader(daemons[2])]
        assert all(reader.began.wait(30) for reader in readers)
        at.split(2, 3)
        for half in (daemons[:2], daemons[2:]):
            mesh.wait_ranks(2, *half, within_s=BACK_S)
        for reader in readers:
            reader.whole()
        readers = [Reader(daemons[0]), Reader(daemons[2])]
        assert all(reader.began.wait(30) for reader in readers)
        at.join(2, 3)
        mesh.wait_ranks(4, *daemons, within_s=2 * BACK_S)
        for reader in readers:
            reader.whole()
