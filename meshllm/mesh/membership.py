"""Who is there: peers, their heartbeats and round trips; connected, suspected, lost as a transition table. Pure.

Liveness is what a link says, never what mDNS says. All times are this device's own monotonic clock; a peer's clock is
only ever handed back to it (`echo`), so skew, steps and boards without a clock do not matter.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.actions import Address, LinkId
from meshllm.mesh.messages import FILLER_BYTES, N_FILLERS, Epoch, Filler, Heartbeat, Hello, ModelHash, ServedModel
from meshllm.model.slicing import Slice

HEARTBEAT_S: Final = 0.5
SUSPECT_S: Final = 1.2  # without a message
LOST_S: Final = 2.0
FORGET_S: Final = 60.0  # a lost peer stays in `status` so long
PAUSED_S: Final = 1.0  # a gap between our own wakings that means: we did not run
RTT_WINDOW: Final = 16  # heartbeats; the least is the round trip, the rest is what busy devices need to answer


class PeerState(StrEnum):
    """What a peer is to us."""

    NEW = "connecting"
    CONNECTED = "connected"
    SUSPECTED = "suspected"
    LOST = "lost"
    INCOMPATIBLE = "incompatible"


class PeerEvent(StrEnum):
    """What changes that."""

    JOINED = "joined"  # a link was bound to it
    HEARD = "heard"  # any message
    QUIET = "quiet"  # none for SUSPECT_S
    ENDED = "ended"  # its link is gone, or silent for LOST_S
    MISMATCHED = "mismatched"  # it speaks another major version


TRANSITIONS: Final[dict[tuple[PeerState, PeerEvent], PeerState]] = {
    (PeerState.NEW, PeerEvent.JOINED): PeerState.CONNECTED,
    (PeerState.NEW, PeerEvent.MISMATCHED): PeerState.INCOMPATIBLE,
    (PeerState.CONNECTED, PeerEvent.HEARD): PeerState.CONNECTED,
    (PeerState.CONNECTED, PeerEvent.QUIET): PeerState.SUSPECTED,
    (PeerState.CONNECTED, PeerEvent.ENDED): PeerState.LOST,
    (PeerState.SUSPECTED, PeerEvent.HEARD): PeerState.CONNECTED,
    (PeerState.SUSPECTED, PeerEvent.QUIET): PeerState.SUSPECTED,
    (PeerState.SUSPECTED, PeerEvent.ENDED): PeerState.LOST,
    (PeerState.LOST, PeerEvent.JOINED): PeerState.CONNECTED,
    (PeerState.LOST, PeerEvent.MISMATCHED): PeerState.INCOMPATIBLE,
    (PeerState.INCOMPATIBLE, PeerEvent.JOINED): PeerState.CONNECTED,
    (PeerState.INCOMPATIBLE, PeerEvent.MISMATCHED): PeerState.INCOMPATIBLE,
}


@dataclass(slots=True)
class Peer:
    """One other device; `link` is the control link bound to it while it is connected or suspected."""

    hello: Hello
    address: Address  # where it listens, as reached from here
    since: float
    heard_at: float
    state: PeerState = PeerState.NEW
    link: LinkId | None = None
    reason: str | None = None
    model: ModelHash | None = None
    model_name: str | None = None
    whole: bool = True  # it holds all of the model's file
    held: tuple[Slice, ...] = ()  # what it has fetched of it, else, the latest first
    device: Device | None = None
    free_bytes: int | None = None
    epoch: Epoch | None = None
    echo: tuple[float, float] | None = None  # its `sent` of the last heartbeat, and when it came
    rtts_us: deque[float] = field(default_factory=lambda: deque(maxlen=RTT_WINDOW))
    probes: int = 0  # of throughput, sent to it
    filled_at: float | None = None  # when the first Filler of a probe came
    mbps: float | None = None  # 1e6 bits a second from it, the best of its probes; None before one came
    mbps_from: dict[NodeId, float] = field(default_factory=dict)  # as it has measured those that send to it
    linked_to: dict[NodeId, float] = field(default_factory=dict)  # its own peers, round trips in us (0: unmeasured)

    @property
    def rtt_us(self) -> float | None:
        """Round trip; None before the first heartbeat, or the second where the system tells nothing."""
        return min(self.rtts_us) if self.rtts_us else None

    @property
    def is_alive(self) -> bool:
        """Connected, or only suspected."""
        return self.link is not None


class Membership:
    """Peers by node id. `version` grows with every change that a layout could depend on."""

    def __init__(self) -> None:
        self._peers: dict[NodeId, Peer] = {}
        self.version = 0

    def get(self, node: NodeId) -> Peer | None:
        """The peer, also a lost one."""
        return self._peers.get(node)

    def link_of(self, node: NodeId) -> LinkId | None:
        """The control link bound to a peer."""
        peer = self._peers.get(node)
        return peer.link if peer else None

    def incarnation_of(self, node: NodeId) -> int | None:
        """The incarnation that a peer's link is bound to."""
        peer = self._peers.get(node)
        return peer.hello.incarnation if peer is not None and peer.is_alive else None

    def name_of(self, node: NodeId) -> str:
        """Its name as people know it, quoted; the id where it was never met."""
        return f"'{self.plain_name(node)}'" if node in self._peers else node

    def plain_name(self, node: NodeId) -> str:
        """The same without quotes, for fields of a report."""
        peer = self._peers.get(node)
        return peer.hello.name if peer else node

    def all(self) -> list[tuple[NodeId, Peer]]:
        """Everyone known, by id."""
        return sorted(self._peers.items())

    def alive(self) -> list[tuple[NodeId, Peer]]:
        """Those with a link, by id."""
        return [(node, peer) for node, peer in self.all() if peer.is_alive]

    def are_linked(self, a: NodeId, b: NodeId) -> bool:
        """Whether two peers (not us) say that they have a link."""
        one, two = self._peers.get(a), self._peers.get(b)
        if one is None or two is None or not (one.is_alive and two.is_alive):
            return False
        return b in one.linked_to and a in two.linked_to

    def joined(self, hello: Hello, link: LinkId, address: Address, now: float) -> Peer:
        """Binds a link to a peer that has none."""
        before = self._peers.get(hello.node)
        state = _next(before.state if before else PeerState.NEW, PeerEvent.JOINED)
        peer = Peer(hello, address, since=now, heard_at=now, state=state, link=link)
        self._take_model(peer, hello)
        self._peers[hello.node] = peer
        self.version += 1
        return peer

    def mismatched(self, hello: Hello, address: Address, reason: str, now: float) -> None:
        """Notes a peer of another major version, which has no link."""
        before = self._peers.get(hello.node)
        state = _next(before.state if before else PeerState.NEW, PeerEvent.MISMATCHED)
        self._peers[hello.node] = Peer(hello, address, since=now, heard_at=now, state=state, reason=reason)

    def heard(self, node: NodeId, now: float) -> None:
        """A message of its link came."""
        peer = self._peers[node]
        peer.state = _next(peer.state, PeerEvent.HEARD)
        peer.heard_at = now

    def heartbeat(self, node: NodeId, message: Heartbeat, now: float, network_rtt_us: float | None) -> None:
        """Takes over what a heartbeat says. network_rtt_us: what the system knows of its link's round trip."""
        peer = self._peers[node]
        peer.echo = (message.sent, now)
        peer.free_bytes, peer.epoch = message.free_bytes, message.epoch
        if network_rtt_us is not None:
            peer.rtts_us.append(network_rtt_us)
        if message.echo is not None:
            rtt_s = now - message.echo - message.held_s
            if 0.0 <= rtt_s <= 60.0:
                peer.rtts_us.append(rtt_s * 1e6)
        linked = dict(message.rtt_us)
        if linked.keys() != peer.linked_to.keys():
            self.version += 1
        peer.linked_to, peer.mbps_from = linked, dict(message.mbps)

    def filled(self, node: NodeId, message: Filler, now: float) -> None:
        """A Filler came; the last of a probe tells the throughput."""
        peer = self._peers[node]
        if message.left == N_FILLERS - 1:
            peer.filled_at = now
        elif message.left == 0 and peer.filled_at is not None:
            mbps = (N_FILLERS - 1) * FILLER_BYTES * 8e-6 / max(now - peer.filled_at, 1e-6)
            peer.mbps, peer.filled_at = max(mbps, peer.mbps or 0.0), None

    def served(self, node: NodeId, message: ServedModel) -> None:
        """Its model or measurements changed."""
        self._take_model(self._peers[node], message)
        self.version += 1

    def _take_model(self, peer: Peer, message: Hello | ServedModel) -> None:
        if peer.model != message.model or message.held:
            peer.held = message.held
        peer.model, peer.model_name, peer.device = message.model, message.model_name, message.device
        peer.whole = message.whole

    def ended(self, node: NodeId, reason: str, now: float, *, forget: bool = False) -> None:
        """Its link is gone. forget: it said goodbye."""
        peer = self._peers[node]
        peer.state = _next(peer.state, PeerEvent.ENDED)
        peer.link, peer.reason, peer.since = None, reason, now
        peer.linked_to = {}
        peer.rtts_us.clear()
        self.version += 1
        if forget:
            del self._peers[node]

    def excuse(self, gap: float) -> None:
        """We did not run for `gap` seconds: nobody is to blame for silence in it."""
        for peer in self._peers.values():
            peer.heard_at += gap

    def check_silence(self, now: float) -> list[NodeId]:
        """Suspects the quiet, forgets the long lost; those silent for LOST_S are returned, still to be ended."""
        silent: list[NodeId] = []
        for node, peer in self.all():
            quiet = now - peer.heard_at
            if peer.is_alive:
                if quiet >= LOST_S:
                    silent.append(node)
                elif quiet >= SUSPECT_S:
                    peer.state = _next(peer.state, PeerEvent.QUIET)
            elif now - peer.since >= FORGET_S:
                del self._peers[node]
        return silent

    def next_deadline(self) -> float:
        """When `check_silence` has something to do."""
        return min((_deadline(peer) for peer in self._peers.values()), default=math.inf)


def _deadline(peer: Peer) -> float:
    if not peer.is_alive:
        return peer.since + FORGET_S
    return peer.heard_at + (LOST_S if peer.state is PeerState.SUSPECTED else SUSPECT_S)


def _next(state: PeerState, event: PeerEvent) -> PeerState:
    try:
        return TRANSITIONS[(state, event)]
    except KeyError:
        raise LocalProtocolError(f"a peer that is {state.name} cannot be {event.name}") from None
