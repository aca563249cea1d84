"""An epoch as its driver knows it: offered, committed, finishing; as a transition table. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import Layout, NodeId
from meshllm.layout.split import reserved_bytes
from meshllm.mesh.facts import ModelFacts
from meshllm.mesh.messages import Epoch
from meshllm.mesh.situation import Situation


class OfferState(StrEnum):
    """Where an epoch is, on its driver."""

    OFFERED = "offered"
    COMMITTED = "committed"
    FINISHING = "finishing"  # a newer one is in force; it runs its answers to their ends
    ENDED = "ended"


class OfferEvent(StrEnum):
    """What happens to it."""

    ALL_PREPARED = "all prepared"
    SUPERSEDED = "superseded"
    ENDED = "ended"  # refused, member lost, broken, idle after it was superseded, no longer the driver


TRANSITIONS: Final[dict[tuple[OfferState, OfferEvent], OfferState]] = {
    (OfferState.OFFERED, OfferEvent.ALL_PREPARED): OfferState.COMMITTED,
    (OfferState.OFFERED, OfferEvent.ENDED): OfferState.ENDED,
    (OfferState.COMMITTED, OfferEvent.SUPERSEDED): OfferState.FINISHING,
    (OfferState.COMMITTED, OfferEvent.ENDED): OfferState.ENDED,
    (OfferState.FINISHING, OfferEvent.ENDED): OfferState.ENDED,
}


@dataclass(slots=True)
class Offer:
    """An epoch of ours. waiting: members that have not prepared it."""

    epoch: Epoch
    model: ModelFacts
    layout: Layout
    waiting: dict[NodeId, None]
    deadline: float
    state: OfferState = OfferState.OFFERED

    def step(self, event: OfferEvent) -> None:
        """Applies an event."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise LocalProtocolError(f"offer {self.epoch.counter}: {event} while {self.state}")
        self.state = state

    def has(self, node: NodeId) -> bool:
        """Whether a node is one of its members."""
        return node == self.epoch.driver or self.layout.rank_of(node) is not None


def fits_beside(offers: Iterable[Offer], layout: Layout, situation: Situation) -> bool:
    """Whether every rank can hold its part of a layout beside what it holds of these epochs."""
    buffers = reserved_bytes(situation.model.shape)
    usable = {device.node: device.usable_bytes for _, device in situation.devices}
    held = [share for offer in offers for share in offer.layout.shares]
    for share in layout.shares:
        parts = [share, *(other for other in held if other.node == share.node)]
        if sum(part.slice_bytes + part.cache_bytes + buffers for part in parts) > usable[share.node]:
            return False
    return True
