"""Epochs as a member knows them: prepare -> prepared -> committed, and the end at any time: a transition table. Pure.

Rules. An epoch is taken only from the driver that this node elects itself, and only if it is larger than every epoch
taken before. Commit comes only after we said Prepared. Several may be alive: a new one is prepared and committed beside
the old, which goes on with what it runs until its driver ends it. In force is the largest committed one. A node that is
neither rank nor driver listens: it holds nothing, but knows the layout and where to send requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import Layout, NodeId
from meshllm.mesh.actions import Address, CommitEpoch, PrepareEpoch, RetireEpoch
from meshllm.mesh.messages import Epoch, ModelHash
from meshllm.mesh.outbox import Outbox

MAX_EPOCHS: Final = 8  # alive at once: one in force, one prepared, a few that finish answers


class EpochState(StrEnum):
    """Where an epoch is, on one member."""

    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ENDED = "ended"


class EpochEvent(StrEnum):
    """What happens to it."""

    READY = "ready"  # slice packed, data links up; at once where nothing is held
    COMMIT = "commit"
    END = "end"  # aborted, refused, broken, driver lost


TRANSITIONS: Final[dict[tuple[EpochState, EpochEvent], EpochState]] = {
    (EpochState.PREPARING, EpochEvent.READY): EpochState.PREPARED,
    (EpochState.PREPARING, EpochEvent.END): EpochState.ENDED,
    (EpochState.PREPARED, EpochEvent.COMMIT): EpochState.COMMITTED,
    (EpochState.PREPARED, EpochEvent.END): EpochState.ENDED,
    (EpochState.COMMITTED, EpochEvent.COMMIT): EpochState.COMMITTED,  # said again to a listener
    (EpochState.COMMITTED, EpochEvent.END): EpochState.ENDED,
}


@dataclass(slots=True)
class MemberEpoch:
    """One epoch here."""

    epoch: Epoch
    model: ModelHash
    layout: Layout
    holds: bool  # rank or driver: the data loop knows it
    state: EpochState = EpochState.PREPARING


class EpochBook:
    """The epochs alive on this node. seen: the largest heard of anywhere; taken: the largest that we took part in."""

    def __init__(self, own: NodeId, out: Outbox) -> None:
        self._own = own
        self._out = out
        self._epochs: dict[Epoch, MemberEpoch] = {}
        self.seen: Epoch | None = None
        self.taken: Epoch | None = None
        self._committed: Epoch | None = None

    def saw(self, epoch: Epoch | None) -> None:
        """Notes an epoch that exists somewhere."""
        if epoch is not None and (self.seen is None or epoch > self.seen):
            self.seen = epoch

    def next_counter(self) -> int:
        """A counter larger than any seen."""
        return self.seen.counter + 1 if self.seen else 1

    def get(self, epoch: Epoch) -> MemberEpoch | None:
        """The epoch, if it is alive here."""
        return self._epochs.get(epoch)

    def all(self) -> list[MemberEpoch]:
        """Alive epochs, smallest first."""
        return sorted(self._epochs.values(), key=lambda entry: entry.epoch)

    def is_preparing(self) -> bool:
        """Whether one is under way here."""
        return any(entry.state is not EpochState.COMMITTED for entry in self._epochs.values())

    def in_force(self) -> MemberEpoch | None:
        """The largest epoch ever committed here, while it lives: after its end there is no way back to an older one."""
        return self._epochs.get(self._committed) if self._committed is not None else None

    def comes_late(self, entry: MemberEpoch) -> bool:
        """Whether a larger one, of another driver, came into force while this one was prepared: it never may."""
        behind = self._committed is not None and entry.epoch < self._committed
        return behind and entry.holds and entry.state is EpochState.PREPARED

    def why_not(self, epoch: Epoch, *, holds: bool) -> str | None:
        """Why an offer cannot be taken, or None. A listener may hear of the same epoch again after a lost link."""
        if self.taken is not None and (epoch < self.taken or (holds and epoch == self.taken)):
            return f"epoch {epoch.counter} is not larger than {self.taken.counter}, taken before"
        if len(self._epochs) >= MAX_EPOCHS:
            return f"{MAX_EPOCHS} epochs are alive here already"
        return None

    def begin(self, epoch: Epoch, model: ModelHash, layout: Layout, addresses: dict[NodeId, Address]) -> MemberEpoch:
        """Starts to prepare; addresses: of all other members, where this node is one."""
        self.saw(epoch)
        self.taken = epoch
        rank = layout.rank_of(self._own)
        holds = rank is not None or epoch.driver == self._own
        entry = self._epochs[epoch] = MemberEpoch(epoch, model, layout, holds)
        if holds:
            members = members_of(epoch, layout, self._own)
            dial = tuple((node, addresses[node]) for node in members if node > self._own)
            driver = epoch.driver == self._own
            self._out.add(PrepareEpoch(epoch, model, layout, rank, driver, members, dial))
        else:
            self.step(entry, EpochEvent.READY)
        return entry

    def step(self, entry: MemberEpoch, event: EpochEvent, reason: str = "") -> None:
        """Applies an event; raises LocalProtocolError if it cannot be (check `allows` where a peer caused it)."""
        state = TRANSITIONS.get((entry.state, event))
        if state is None:
            raise LocalProtocolError(f"epoch {entry.epoch.counter}: {event} while {entry.state}")
        entered = state is not entry.state
        entry.state = state
        if state is EpochState.ENDED:
            del self._epochs[entry.epoch]
            if entry.holds:
                self._out.add(RetireEpoch(entry.epoch, reason))
        elif state is EpochState.COMMITTED and entered:
            self._committed = max(entry.epoch, self._committed or entry.epoch)
            if entry.holds:
                self._out.add(CommitEpoch(entry.epoch))
            self._out.report("epoch_committed", epoch=entry.epoch.counter, ranks=len(entry.layout.shares))


def allows(entry: MemberEpoch, event: EpochEvent) -> bool:
    """Whether an event can happen to an epoch now."""
    return (entry.state, event) in TRANSITIONS


def members_of(epoch: Epoch, layout: Layout, own: NodeId) -> tuple[NodeId, ...]:
    """The other nodes that take part in the steps: ranks in rank order, then a driver without a slice."""
    nodes = [share.node for share in layout.shares]
    if epoch.driver not in nodes:
        nodes.append(epoch.driver)
    return tuple(node for node in nodes if node != own)
