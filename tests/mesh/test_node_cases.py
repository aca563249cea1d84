"""Cases from the field that the protocol decides, each played on simulated devices; and the face of a Node."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulation"))

from cluster import MODEL, SHAPE, Cluster, Options, Process
from invariants import Reader

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.actions import CloseLink, Deliver, Dial, LinkId, Report, Send
from meshllm.mesh.facts import LayoutMode, ModelFacts, NodeConfig, NodeView
from meshllm.mesh.messages import (
    Commit,
    Epoch,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    ModelHash,
    RequestId,
    Submit,
    Tokens,
)
from meshllm.mesh.node import Node
from meshllm.parameters import SamplingParameters

OTHER_FILE = ModelFacts(hash=ModelHash("cd" * 32), name="simulated", shape=SHAPE)


def serving(n: int = 3, seed: int = 1, layout: LayoutMode = "all") -> Cluster:
    """Some devices that serve one layout."""
    cluster = Cluster(seed, Options(n=n, layout=layout))
    cluster.run(12.0)
    assert all(view(process).state == "serving" for process in cluster.processes)
    return cluster


def view(process: Process) -> NodeView:
    assert process.node is not None
    return process.node.view(process.now)


def driver_of(cluster: Cluster) -> Process:
    found = cluster.find(view(cluster.processes[0]).driver or "")
    assert found is not None
    return found


def others(cluster: Cluster, *but: Process) -> list[Process]:
    return [process for process in cluster.processes if process not in but]


def ask(cluster: Cluster, process: Process, max_tokens: int = 200) -> Reader:
    return _reader(cluster, cluster.submit(process.index, max_tokens))


def ask_for_long(cluster: Cluster, process: Process) -> Reader:
    """For a minute or so: no end token ends it. It has begun."""
    reader = _reader(cluster, cluster.submit(process.index, 2000, ()))
    cluster.run(0.5)
    assert reader.tokens
    return reader


def _reader(cluster: Cluster, request: RequestId | None) -> Reader:
    assert request is not None
    return cluster.invariants.readers[request]


def goes_on(cluster: Cluster, reader: Reader) -> float:
    """Seconds until the next token of an answer."""
    began = cluster.scheduler.now
    cluster.run(0.05)  # of what was under way
    known = len(reader.tokens)
    while len(reader.tokens) == known and reader.ended is None and cluster.scheduler.now < began + 30:
        cluster.run(0.1)
    assert reader.ended is None, reader.ended
    return cluster.scheduler.now - began


def ask_well(cluster: Cluster, process: Process) -> None:
    reader = ask(cluster, process, max_tokens=20)
    cluster.run(10.0)
    assert isinstance(reader.ended, Finished), reader.ended


@pytest.mark.parametrize("silent", [False, True], ids=["killed", "power lost"])
def test_answer_goes_on_when_a_rank_dies_peer_01(silent: bool) -> None:
    cluster = serving(3)
    driver = driver_of(cluster)
    victim, root = others(cluster, driver)
    running = ask_for_long(cluster, root)
    victim.kill(silent=silent)
    assert goes_on(cluster, running) < 5.0
    layout = view(root).layout
    assert layout is not None
    assert {share.node for share in layout.shares} == {driver.node_id, root.node_id}
    ask_well(cluster, root)
    victim.start()
    cluster.run(12.0)
    layout = view(root).layout
    assert layout is not None
    assert len(layout.shares) == 3, "the returning worker is not used"
    ask_well(cluster, victim)
    assert running.ended is None, "joining ended an answer"


@pytest.mark.parametrize("silent", [False, True], ids=["killed", "power lost"])
def test_answer_goes_on_when_the_driver_dies_peer_01(silent: bool) -> None:
    cluster = serving(3)
    driver = driver_of(cluster)
    root, third = others(cluster, driver)
    running = ask_for_long(cluster, root)
    driver.kill(silent=silent)
    assert goes_on(cluster, running) < 5.0
    cluster.run(6.0)
    assert view(third).state == "serving"
    ask_well(cluster, third)


def test_answer_goes_on_when_a_rank_hangs() -> None:
    cluster = serving(3)
    driver = driver_of(cluster)
    victim, root = others(cluster, driver)
    running = ask_for_long(cluster, root)
    victim.paused = True
    assert goes_on(cluster, running) < 8.0  # 2 until it is noticed, as long again until it is certain, then a layout
    victim.resume()
    cluster.run(12.0)
    assert running.ended is None


def test_answer_survives_one_loss_after_the_other() -> None:
    cluster = serving(4)
    driver = driver_of(cluster)
    root = max(others(cluster, driver), key=lambda process: process.node_id)
    running = ask_for_long(cluster, root)
    for lost in sorted(others(cluster, root), key=lambda process: process.node_id):
        cluster.run(0.5)
        assert running.tokens
        lost.kill(silent=False)
        assert goes_on(cluster, running) < 5.0
    layout = view(root).layout
    assert layout is not None
    assert [share.node for share in layout.shares] == [root.node_id]


def test_answer_that_no_layout_can_go_on_with_ends_with_the_reason() -> None:
    cluster = serving(2, layout=2)
    driver = driver_of(cluster)
    (root,) = others(cluster, driver)
    running = ask_for_long(cluster, root)
    driver.kill(silent=False)
    cluster.run(15.0)
    assert isinstance(running.ended, Failed)
    assert "no layout came into force" in running.ended.reason


def test_hung_device_is_noticed_within_two_seconds() -> None:
    cluster = serving(3)
    driver = driver_of(cluster)
    victim, root = others(cluster, driver)
    victim.paused = True
    cluster.run(2.2)
    states = {peer.node: peer.state for peer in view(root).peers}
    assert states[victim.node_id] == "lost"


def test_workers_outlive_their_roots_peer_03() -> None:
    """A root dies again and again; the others free what it used and serve the next at once."""
    cluster = serving(3)
    for round_number in range(8):
        root = cluster.processes[round_number % 2]
        ask(cluster, root, 10_000)
        cluster.run(0.4)
        root.kill(silent=False)
        survivor = cluster.processes[2]
        cluster.run(6.0)
        assert survivor.data is not None
        assert len(survivor.data.epochs) == 1
        assert not any(data.requests for data in survivor.data.epochs.values())
        ask_well(cluster, survivor)
        root.start()
        cluster.run(10.0)


def test_different_files_are_never_combined_peer_07() -> None:
    cluster = serving(2)
    one, two = cluster.processes
    two.call(lambda node, now: node.set_model(OTHER_FILE, device_of(two), now))
    cluster.run(6.0)
    for process, other in ((one, two), (two, one)):
        seen = view(process)
        assert seen.layout is not None
        assert [share.node for share in seen.layout.shares] == [process.node_id]
        (peer,) = seen.peers
        assert peer.node == other.node_id
        assert peer.reason is not None
        assert "another file (sha256" in peer.reason
        assert "abababab" in peer.reason
        assert "cdcdcdcd" in peer.reason


def test_same_file_under_another_name_is_combined_peer_07() -> None:
    cluster = serving(2)
    renamed = ModelFacts(hash=MODEL.hash, name="copy", shape=SHAPE)
    two = cluster.processes[1]
    two.call(lambda node, now: node.set_model(renamed, device_of(two), now))
    cluster.run(6.0)
    layout = view(two).layout
    assert layout is not None
    assert len(layout.shares) == 2


def test_everyone_asks_at_once_peer_09() -> None:
    cluster = serving(3)
    readers = [ask(cluster, process, 30) for _ in range(20) for process in cluster.processes]
    cluster.run(30.0)
    assert all(isinstance(reader.ended, Finished) for reader in readers)


def test_clocks_do_not_matter_peer_11() -> None:
    """Clocks are far apart from the start; during an answer one jumps an hour ahead."""
    cluster = serving(3)
    root = others(cluster, driver_of(cluster))[0]
    running = ask(cluster, root, 300)
    cluster.run(0.5)
    for process in cluster.processes:
        process.offset += 3600.0
        cluster.run(0.3)
    cluster.run(20.0)
    assert isinstance(running.ended, Finished)
    assert cluster.invariants.commits <= 3 * 3, "the jump made the mesh plan anew"


def test_lost_peer_is_out_at_once_and_back_soon_disc_05() -> None:
    """No goodbye, no mDNS: the heartbeat decides. A clean stop is known at once. The return needs no help."""
    cluster = serving(2)
    one, two = cluster.processes
    two.kill(silent=True)
    cluster.run(3.0)
    assert {peer.node: peer.state for peer in view(one).peers}[two.node_id] == "lost"
    cluster.run(8.0)
    two.start()
    cluster.run(15.0)
    assert {peer.node: peer.state for peer in view(one).peers}[two.node_id] == "connected"
    two.stop()
    cluster.run(2.0)
    assert all(peer.state not in ("connected", "suspected") for peer in view(one).peers)
    assert view(one).state in ("preparing", "serving")


def test_reader_that_leaves_frees_the_slot_everywhere_conc_03() -> None:
    cluster = serving(3)
    root = others(cluster, driver_of(cluster))[0]
    running = ask(cluster, root, 100_000)
    cluster.run(0.5)
    cluster.cancel(running.submit.request)
    cluster.run(1.0)
    assert view(root).active_requests == 0
    for process in cluster.processes:
        assert process.data is not None
        assert not any(data.requests for data in process.data.epochs.values())


def test_join_never_breaks_a_running_answer() -> None:
    cluster = Cluster(5, Options(n=3))
    cluster.run(10.0)
    late = others(cluster, driver_of(cluster))[0]
    late.stop()
    cluster.run(8.0)
    root = others(cluster, late)[0]
    running = ask(cluster, root, 2000)
    cluster.run(1.0)
    late.start()
    cluster.run(12.0)
    layout = view(root).layout
    assert layout is not None
    assert len(layout.shares) == 3, "the newcomer is not used while an answer runs"
    assert running.ended is None or isinstance(running.ended, Finished)
    cluster.run(120.0)
    assert isinstance(running.ended, Finished)
    assert all(process.data is not None and len(process.data.epochs) == 1 for process in cluster.processes)


def test_join_waits_for_idle_where_memory_holds_one_layout_only() -> None:
    whole = SHAPE.slice_bytes(SHAPE.whole()) + 512 * SHAPE.position_bytes(SHAPE.whole())
    cluster = Cluster(5, Options(n=2, memory=int(whole * 1.3) + 5_000_000))
    cluster.run(15.0)
    layout = view(cluster.processes[0]).layout
    assert layout is not None
    assert len(layout.shares) == 2
    ask_well(cluster, cluster.processes[1])


def test_flapping_device_does_not_make_the_others_plan_all_the_time() -> None:
    cluster = serving(3)
    victim = others(cluster, driver_of(cluster))[0]
    before = cluster.invariants.commits
    for _ in range(10):
        cluster.network.cut(victim.index, (victim.index + 1) % 3)
        cluster.run(0.4)
        cluster.network.heal()
        cluster.run(1.0)
    assert cluster.invariants.commits == before, "short stalls moved the mesh"


# --- one Node alone, by hand


def device_of(process: Process) -> Device:
    return Device(node=NodeId(process.node_id), read_gbps=8.0, matmul_gops=80.0, usable_bytes=10**8)


OWN, LOW, HIGH = NodeId("5" * 16), NodeId("1" * 16), NodeId("9" * 16)


def config(node: NodeId = OWN, incarnation: int = 1) -> NodeConfig:
    return NodeConfig(node=node, incarnation=incarnation, name=f"n-{node[0]}", port=7007, build="t", threads=1, isa="x")


def device(node: NodeId) -> Device:
    return Device(node=node, read_gbps=8.0, matmul_gops=80.0, usable_bytes=10**8)


def hello(node: NodeId, incarnation: int = 1, major: int = 1) -> Hello:
    return Hello(major, 0, "t", node, incarnation, f"n-{node[0]}", 7008, device(node), None, None, 1, "x")


def fresh_node() -> Node:
    node = Node(config(), device(OWN), None, 0.0)
    node.take_actions()
    return node


def joined(node: Node, link: int, peer: NodeId, incarnation: int = 1, now: float = 0.1) -> list[object]:
    node.link_opened(LinkId(link), ("192.0.2.9", 4000 + link), None, now)
    node.receive(LinkId(link), hello(peer, incarnation), now)
    return list(node.take_actions())


def closed(actions: list[object]) -> list[CloseLink]:
    return [action for action in actions if isinstance(action, CloseLink)]


def test_no_model_and_no_peers_is_a_normal_state() -> None:
    node = fresh_node()
    seen = node.view(1.0)
    assert seen.state == "no-model"
    assert seen.detail is not None
    assert "pull" in seen.detail
    assert node.next_deadline() == float("inf"), "an idle node wakes up"


def test_dialled_oneself_is_closed_quietly_and_never_dialled_again_disc_01() -> None:
    node = fresh_node()
    node.addresses_found("static", None, (("192.0.2.1", 7007),), 0.0)
    (dial,) = (action for action in node.take_actions() if isinstance(action, Dial))
    node.link_opened(LinkId(1), ("192.0.2.1", 7007), dial.key, 0.1)
    node.receive(LinkId(1), hello(OWN), 0.1)
    (close,) = closed(node.take_actions())
    assert not close.at_fault
    node.addresses_found("static", None, (("192.0.2.1", 7007),), 1.0)
    node.wake(100.0)
    assert not [action for action in node.take_actions() if isinstance(action, Dial)]
    assert node.view(100.0).peers == ()


def test_own_id_on_another_device_is_named() -> None:
    node = fresh_node()
    node.link_opened(LinkId(1), ("192.0.2.9", 5000), None, 0.1)
    node.receive(LinkId(1), hello(OWN, incarnation=2), 0.1)
    actions = node.take_actions()
    assert "node_id_cloned" in [action.event for action in actions if isinstance(action, Report)]
    assert node.view(0.2).own_reason is not None


def test_cloned_peers_do_not_take_turns() -> None:
    node = fresh_node()
    joined(node, 1, HIGH, incarnation=1)
    actions = joined(node, 2, HIGH, incarnation=2, now=0.2)
    assert [close.link for close in closed(actions)] == [1], "a restarted peer takes the place of its old self"
    for i in range(3, 6):
        actions = joined(node, i, HIGH, incarnation=1, now=0.3)
        assert [close.link for close in closed(actions)] == [i]
    (peer,) = node.view(0.4).peers
    assert peer.state == "connected"
    assert peer.reason is not None
    assert "same node id" in peer.reason


def test_second_link_is_closed_by_the_lower_id_only() -> None:
    node = fresh_node()
    assert not closed(joined(node, 1, HIGH))
    assert [close.link for close in closed(joined(node, 2, HIGH))] == [2]
    assert not closed(joined(node, 3, LOW))
    assert not closed(joined(node, 4, LOW)), "the lower id decides, not we"


def test_other_major_version_is_listed_with_the_reason_and_not_used() -> None:
    node = fresh_node()
    node.link_opened(LinkId(1), ("192.0.2.9", 5000), None, 0.1)
    node.receive(LinkId(1), hello(HIGH, major=2), 0.1)
    assert len(closed(node.take_actions())) == 1
    (peer,) = node.view(0.2).peers
    assert peer.state == "incompatible"
    assert peer.reason is not None
    assert "protocol 2" in peer.reason


@pytest.mark.parametrize(
    "message",
    [Commit(Epoch(9, HIGH)), Tokens(RequestId("0" * 32), 0, ()), Finished(RequestId("0" * 32), "stop", 3)],
    ids=lambda m: type(m).__name__,
)
def test_late_messages_of_what_is_over_are_harmless(message: Commit) -> None:
    node = fresh_node()
    joined(node, 1, HIGH)
    node.receive(LinkId(1), message, 0.2)
    assert not closed(node.take_actions())


def test_peer_that_breaks_the_protocol_loses_its_link_and_nothing_else() -> None:
    node = fresh_node()
    joined(node, 1, HIGH)
    other = NodeId("8" * 16)
    joined(node, 2, other)
    node.receive(LinkId(1), hello(HIGH), 0.2)
    (close,) = closed(node.take_actions())
    assert (close.link, close.at_fault) == (1, True)
    assert {peer.node: peer.state for peer in node.view(0.3).peers} == {HIGH: "lost", other: "connected"}


def test_message_before_hello_is_a_fault() -> None:
    node = fresh_node()
    node.link_opened(LinkId(1), ("192.0.2.9", 5000), None, 0.1)
    node.receive(LinkId(1), Goodbye("x"), 0.1)
    (close,) = closed(node.take_actions())
    assert close.at_fault


def test_silent_stranger_is_closed_in_time() -> None:
    node = fresh_node()
    node.link_opened(LinkId(1), ("192.0.2.9", 5000), None, 0.0)
    node.wake(node.next_deadline())
    assert [close.link for close in closed(node.take_actions())] == [1]


def test_many_strangers_take_no_more_than_so_many_links() -> None:
    node = fresh_node()
    for i in range(200):
        node.link_opened(LinkId(i), ("192.0.2.9", 5000 + i), None, 0.0)
    assert len(closed(node.take_actions())) == 200 - 64


def test_peers_learn_of_each_other() -> None:
    node = fresh_node()
    joined(node, 1, HIGH)
    sent = [action for action in joined(node, 2, NodeId("8" * 16)) if isinstance(action, Send)]
    told = [send.link for send in sent if type(send.message).__name__ == "PeerAddresses"]
    assert sorted(told) == [1, 2]


def test_five_thousand_adverts_do_not_fill_the_memory_disc_11() -> None:
    node = fresh_node()
    for i in range(5000):
        node.addresses_found("mdns", NodeId(f"{i:016x}"), (("192.0.2.9", 7000),), 0.0)
    node.wake(10.0)
    assert len([action for action in node.take_actions() if isinstance(action, Dial)]) <= 256
    assert len(node.view(10.0).peers) <= 256


def test_request_without_a_layout_fails_with_what_is_missing() -> None:
    cluster = Cluster(3, Options(n=1, layout=2))
    cluster.run(3.0)
    reader = ask(cluster, cluster.processes[0])
    cluster.run(9.0)
    assert reader.ended is None
    cluster.run(2.0)
    assert isinstance(reader.ended, Failed)
    assert "wants 2 devices" in reader.ended.reason


def test_request_id_in_use_is_our_own_fault() -> None:
    cluster = Cluster(3, Options(n=1, layout=2))
    cluster.run(3.0)
    reader = ask(cluster, cluster.processes[0])
    node = cluster.processes[0].node
    assert node is not None
    with pytest.raises(LocalProtocolError):
        node.submit(reader.submit, cluster.processes[0].now)


def test_clean_stop_tells_everyone_and_is_final() -> None:
    cluster = serving(2)
    one, two = cluster.processes
    running = ask(cluster, one, 10_000)
    cluster.run(0.3)
    one.call(lambda node, now: node.shutdown("told to stop", now))
    assert isinstance(running.ended, Failed)
    assert "this daemon is stopping" in running.ended.reason
    assert one.node is not None
    assert one.data is not None
    assert not one.data.epochs
    assert one.node.next_deadline() == float("inf")
    cluster.run(0.5)
    assert view(two).peers == () or view(two).peers[0].state == "connecting"


@pytest.mark.parametrize(("peer", "state"), [(LOW, "incompatible"), (HIGH, "lost")])
def test_a_device_that_is_refused_learns_why(peer: NodeId, state: str) -> None:
    """Before the link was chosen (by the lower id), and after."""
    node = fresh_node()
    joined(node, 1, peer)
    node.receive(LinkId(1), Goodbye("another device uses the same node id", refused=True), 0.2)
    (seen,) = node.view(0.3).peers
    assert (seen.state, seen.reason) == (state, "refuses this device: another device uses the same node id")


def test_a_refusing_device_says_why_before_it_closes() -> None:
    node = fresh_node()
    link = LinkId(2)
    node.link_opened(link, ("192.0.2.9", 4000), None, 0.3)
    node.take_actions()
    node.receive(link, hello(HIGH, major=2), 0.4)
    actions = [a for a in node.take_actions() if isinstance(a, Send | CloseLink) and a.link == link]
    assert isinstance(actions[0], Send)
    assert isinstance(actions[0].message, Goodbye)
    assert actions[0].message.refused
    assert "protocol 2" in actions[0].message.reason
    assert isinstance(actions[1], CloseLink)


def test_a_request_that_no_driver_would_take_fails_at_its_root() -> None:
    node = fresh_node()
    wrong = Submit(RequestId("0" * 32), ModelHash("ab" * 32), (1,), (), 1, (), SamplingParameters(top_k=2**40))
    node.submit(wrong, 0.1)
    (delivered,) = [action for action in node.take_actions() if isinstance(action, Deliver)]
    assert isinstance(delivered.message, Failed)
    assert "top_k" in delivered.message.reason


def test_the_round_trip_is_the_network_s_where_the_system_tells_it() -> None:
    node = fresh_node()
    joined(node, 1, HIGH)
    beat = Heartbeat(sent=1.0, echo=None, held_s=0.0, free_bytes=0, epoch=None, rtt_us=())
    node.receive(LinkId(1), beat, 1.0)
    (peer,) = node.view(1.0).peers
    assert peer.rtt_us is None
    for network_rtt_us, known in ((300.0, 300.0), (200.0, 200.0), (900.0, 200.0)):  # waking up only adds to it
        node.receive(LinkId(1), msgspec.structs.replace(beat, echo=0.9), 1.1, network_rtt_us)
        (peer,) = node.view(1.1).peers
        assert peer.rtt_us == known
