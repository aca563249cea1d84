"""What peers are told unasked: heartbeats, and where other peers listen. Pure."""

from __future__ import annotations

from meshllm.layout.layout import NodeId
from meshllm.mesh.addresses import may_pass_on
from meshllm.mesh.membership import Membership, Peer
from meshllm.mesh.messages import Epoch, Heartbeat, PeerAddresses
from meshllm.mesh.outbox import Outbox


def send_heartbeats(members: Membership, out: Outbox, free_bytes: int, epoch: Epoch | None, now: float) -> None:
    """A heartbeat to every peer with a link; to each, round trips to the others (0 where unmeasured)."""
    alive = members.alive()
    rtts = tuple((node, peer.rtt_us or 0.0) for node, peer in alive)
    for node, peer in alive:
        echo, held = (peer.echo[0], now - peer.echo[1]) if peer.echo else (None, 0.0)
        others = tuple(entry for entry in rtts if entry[0] != node)
        out.send(peer.link, Heartbeat(now, echo, held, free_bytes, epoch, others))


def introduce(members: Membership, out: Outbox, node: NodeId, peer: Peer) -> None:
    """Tells a newcomer of the others, and the others of it, as far as an address means something there."""
    others = [(other, known) for other, known in members.alive() if other != node]
    places = tuple((n, (p.address,)) for n, p in others if may_pass_on(p.address, peer.address))
    if places:
        out.send(peer.link, PeerAddresses(places))
    for _, other in others:
        if may_pass_on(peer.address, other.address):
            out.send(other.link, PeerAddresses(((node, (peer.address,)),)))
