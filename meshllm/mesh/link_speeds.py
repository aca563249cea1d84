"""What is known of the links between devices: our own measures, and what peers say of theirs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshllm.layout.layout import LinkSpeed, NodeId
from meshllm.mesh.membership import Membership

FAST_MBPS: Final = 300.0  # from here on a probe tells more of the devices than of the link: the round trip says enough


def known_links(own: NodeId, members: Membership, nodes: Sequence[NodeId]) -> list[LinkSpeed]:
    """Links between any two of `nodes` whose round trip is known."""
    pairs = ((a, b) for i, a in enumerate(nodes) for b in nodes[:i])
    return [
        LinkSpeed(a=a, b=b, rtt_us=rtt_us, mbps=mbps_between(own, members, a, b))
        for a, b in pairs
        if (rtt_us := _rtt_us(own, members, a, b))
    ]


def _rtt_us(own: NodeId, members: Membership, a: NodeId, b: NodeId) -> float | None:
    if own in (a, b):
        peer = members.get(b if a == own else a)
        return peer.rtt_us if peer else None
    said = [p.linked_to.get(other, 0.0) for n, other in ((a, b), (b, a)) if (p := members.get(n))]
    return min((rtt for rtt in said if rtt > 0), default=None)


def mbps_between(own: NodeId, members: Membership, a: NodeId, b: NodeId) -> float | None:
    """Of the slower way; None where it is unknown or FAST_MBPS."""
    seen = [_one_way_mbps(own, members, sender, receiver) for sender, receiver in ((a, b), (b, a))]
    return min((mbps for mbps in seen if mbps is not None and mbps < FAST_MBPS), default=None)


def _one_way_mbps(own: NodeId, members: Membership, sender: NodeId, receiver: NodeId) -> float | None:
    """As the receiver has measured it; None where it has not."""
    if receiver == own:
        peer = members.get(sender)
        return peer.mbps if peer else None
    peer = members.get(receiver)
    return peer.mbps_from.get(sender) if peer else None
