"""What peers are told unasked: heartbeats, where other peers listen, and filler that measures a new link. Pure."""

from __future__ import annotations

import math
from typing import Final

from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.addresses import may_pass_on
from meshllm.mesh.facts import ModelFacts, NodeConfig
from meshllm.mesh.membership import HEARTBEAT_S, Membership, Peer
from meshllm.mesh.messages import (
    FILLER_BYTES,
    FILLERS_SINCE,
    N_FILLERS,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    ControlMessage,
    Epoch,
    Filler,
    Heartbeat,
    Hello,
    PeerAddresses,
)
from meshllm.mesh.outbox import Outbox

PROBES: Final = 3  # of a link's throughput; the best counts: a busy device only makes it seem slower
REMIND_S: Final = 30.0  # addresses are told again: two devices may have given each other up while they were cut off


def make_hello(config: NodeConfig, model: ModelFacts | None, device: Device) -> Hello:
    """What a link begins with, as of now."""
    return Hello(
        PROTOCOL_MAJOR,
        PROTOCOL_MINOR,
        config.build,
        config.node,
        config.incarnation,
        config.name,
        config.port,
        device,
        model.hash if model else None,
        model.name if model else None,
        config.threads,
        config.isa,
        whole=model is None or model.whole,
        held=model.held if model else (),
    )


class Greetings:
    """Tells them, when it is time."""

    def __init__(self, members: Membership, out: Outbox) -> None:
        self._members = members
        self._out = out
        self._remind_at = math.inf
        self.next_at = math.inf  # a heartbeat
        self.free_bytes = 0
        self.epoch: Epoch | None = None  # in force here

    def beat(self, now: float) -> None:
        """A heartbeat to every peer with a link; to each, round trips to the others (0 where unmeasured).

        The first few come with filler.
        """
        alive = self._members.alive()
        rtts = tuple((node, peer.rtt_us or 0.0) for node, peer in alive)
        mbps = tuple((node, peer.mbps) for node, peer in alive if peer.mbps is not None)
        for node, peer in alive:
            echo, held = (peer.echo[0], now - peer.echo[1]) if peer.echo else (None, 0.0)
            others = tuple(entry for entry in rtts if entry[0] != node)
            self._out.send(peer.link, Heartbeat(now, echo, held, self.free_bytes, self.epoch, others, mbps))
            if peer.probes < PROBES and peer.hello.minor >= FILLERS_SINCE:
                peer.probes += 1
                for left in reversed(range(N_FILLERS)):
                    self._out.send(peer.link, Filler(left, bytes(FILLER_BYTES)))
        self.next_at = now + HEARTBEAT_S if alive else math.inf
        if now >= self._remind_at:
            for node, peer in alive:
                self._tell_others_to(node, peer)
            self._remind_at = now + REMIND_S

    def tell_all(self, message: ControlMessage) -> None:
        """The same to every peer with a link."""
        for _, peer in self._members.alive():
            self._out.send(peer.link, message)

    def introduce(self, node: NodeId, peer: Peer, now: float) -> None:
        """Tells a newcomer of the others, and the others of it, as far as an address means something there."""
        self._tell_others_to(node, peer)
        for other, known in self._members.alive():
            if other != node and may_pass_on(peer.address, known.address):
                self._out.send(known.link, PeerAddresses(((node, (peer.address,)),)))
        self._remind_at = min(self._remind_at, now + REMIND_S)

    def _tell_others_to(self, node: NodeId, peer: Peer) -> None:
        others = [(other, known) for other, known in self._members.alive() if other != node]
        places = tuple((n, (p.address,)) for n, p in others if may_pass_on(p.address, peer.address))
        if places:
            self._out.send(peer.link, PeerAddresses(places))
