"""How fast a link is: filler when it is new, measured by who gets it, told to the others."""

from __future__ import annotations

import pytest

from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.actions import LinkId, Send
from meshllm.mesh.facts import NodeConfig
from meshllm.mesh.greetings import PROBES
from meshllm.mesh.link_speeds import FAST_MBPS, known_links
from meshllm.mesh.membership import Membership
from meshllm.mesh.messages import FILLER_BYTES, FILLERS_SINCE, N_FILLERS, Filler, Heartbeat, Hello
from meshllm.mesh.node import Node

OWN, ONE, OTHER = (NodeId(letter * 16) for letter in "abc")
BEAT = Heartbeat(sent=1.0, echo=0.9, held_s=0.0, free_bytes=0, epoch=None, rtt_us=())


def device(node: NodeId) -> Device:
    return Device(node=node, read_gbps=8.0, matmul_gops=80.0, usable_bytes=10**8)


def hello(node: NodeId, minor: int = FILLERS_SINCE) -> Hello:
    return Hello(1, minor, "t", node, 1, f"n-{node[0]}", 7008, device(node), None, None, 1, "x")


def probe(members: Membership, node: NodeId, at: float, mbps: float) -> None:
    """One comes from a peer at so many megabits a second."""
    for left in reversed(range(N_FILLERS)):
        members.filled(node, Filler(left, bytes(FILLER_BYTES)), at)
        at += FILLER_BYTES * 8e-6 / mbps


def meshed() -> Membership:
    """We, one and another, all linked."""
    members = Membership()
    for i, node in enumerate((ONE, OTHER)):
        members.joined(hello(node), LinkId(i), ("192.0.2.9", 4000), 0.0)
    return members


def test_the_best_probe_counts_and_the_slower_way() -> None:
    members = meshed()
    for mbps in (12.0, 20.0, 3.0):
        probe(members, ONE, 1.0, mbps)
    beat = Heartbeat(1.0, 0.9, 0.0, 0, None, ((OTHER, 400.0),), ((OWN, 90.0), (OTHER, 7.0)))
    members.heartbeat(ONE, beat, 1.1, 300.0)
    (ours,) = known_links(OWN, members, [OWN, ONE])
    assert ours.mbps == pytest.approx(20.0)
    members.heartbeat(OTHER, Heartbeat(1.0, 0.9, 0.0, 0, None, ((ONE, 400.0),), ()), 1.1, 300.0)
    (theirs,) = known_links(OWN, members, [ONE, OTHER])
    assert theirs.mbps == 7.0


def test_a_link_too_fast_to_be_told_apart_has_no_number() -> None:
    members = meshed()
    members.heartbeat(ONE, BEAT, 1.1, 300.0)
    probe(members, ONE, 1.0, 2 * FAST_MBPS)
    for left in (N_FILLERS - 1, 0):  # both read in one go
        members.filled(ONE, Filler(left, b""), 2.0)
    (link,) = known_links(OWN, members, [OWN, ONE])
    assert link.mbps is None


def test_half_a_probe_measures_nothing() -> None:
    members = meshed()
    members.heartbeat(ONE, BEAT, 1.1, 300.0)
    members.filled(ONE, Filler(0, b""), 1.0)
    (link,) = known_links(OWN, members, [OWN, ONE])
    assert link.mbps is None


@pytest.mark.parametrize("minor", [FILLERS_SINCE - 1, FILLERS_SINCE, FILLERS_SINCE + 1])
def test_probes_come_with_the_first_heartbeats_to_who_knows_them(minor: int) -> None:
    config = NodeConfig(node=OWN, incarnation=1, name="own", port=7007, build="t", threads=1, isa="x")
    node = Node(config, device(OWN), None, 0.0)
    node.link_opened(LinkId(1), ("192.0.2.9", 4000), None, 0.1)
    node.receive(LinkId(1), hello(ONE, minor), 0.1)
    for i in range(10 * PROBES):
        node.receive(LinkId(1), BEAT, 0.2 + 0.5 * i)
    sent = [action.message for action in node.take_actions() if isinstance(action, Send)]
    fillers = [message.left for message in sent if isinstance(message, Filler)]
    wanted = PROBES if minor >= FILLERS_SINCE else 0
    assert fillers == wanted * list(reversed(range(N_FILLERS)))
