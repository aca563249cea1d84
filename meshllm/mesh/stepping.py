"""The order of one epoch's steps, as one member sees it: what was awaited, what is missing, what is dropped or refused.

Steps count from 0. The driver sends step n + 1 when every rank has sent its Candidates of step n, so nobody is more
than one step ahead. The rules for what comes in (the partials of a running step are the communicator's affair):

    Step         from the driver alone, the next number, within the limits, on top of what the slots hold; else a fault
    a partial    waits on its link for its exchange; before a step, only one of that step may, of a rank that adds there
    Candidates   on the driver, of this step: kept, once; of an older one: dropped
    a fault      MemberFaultError names the member: its link is closed and the epoch is over

Whether a *frame* is late or doubled is no question on a sealed link; the rules also hold on one that is not. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from meshllm.errors import LocalProtocolError, RemoteProtocolError
from meshllm.layout.layout import NodeId
from meshllm.mesh.exchange import Schedule
from meshllm.mesh.messages import Candidates, DataMessage, Leave, Ready, Step, StepEntry


class MemberFaultError(RemoteProtocolError):
    """A member broke the rules of stepping. `node`: which one."""

    def __init__(self, node: NodeId, message: str) -> None:
        super().__init__(message)
        self.node = node


class MemberLeftError(RemoteProtocolError):
    """A member said that it runs no more steps. `node`: who is to blame, as it sees it; None if nobody."""

    def __init__(self, node: NodeId | None, message: str) -> None:
        super().__init__(message)
        self.node = node


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may hold."""

    slots: int
    context: int  # positions a slot
    vocab_size: int
    max_tokens: int  # rows a step


class StepSequencer:
    """One member's view of one epoch. The driver calls `begin`, another rank `take_step`; both `finish` each step."""

    def __init__(
        self, *, driver: NodeId, ranks: tuple[NodeId, ...], own: NodeId, schedule: Schedule, limits: StepLimits
    ) -> None:
        """ranks[i] is the node of rank i. own: this member."""
        self._driver = driver
        self._ranks = ranks
        self._own = own
        self._limits = limits
        self._lengths = [0] * limits.slots  # positions that each slot's cache holds
        self._contributors = tuple(tuple(ranks[rank] for rank in adding) for adding in schedule)
        self._number = 0  # of the running step, or of the next one
        self._running: Step | None = None
        self._waiting: Step | None = None
        self._candidates: dict[NodeId, tuple[bytes, ...]] = {}

    @property
    def has_step(self) -> bool:
        """Whether take_step would give one."""
        return self._waiting is not None

    # --- steps

    def begin(self, step: Step) -> None:
        """On the driver: the step that it has formed runs now. Raises LocalProtocolError if it breaks the rules."""
        self._check_step(step, _local_fault)
        self._start(step)

    def take_step(self) -> Step | None:
        """On another rank: the driver's next step, if it has come; it runs now."""
        step, self._waiting = self._waiting, None
        if step is not None:
            self._start(step)
        return step

    def finish(self) -> None:
        """The running step is over; what is left of it is forgotten."""
        if self._running is None:
            raise LocalProtocolError("no step runs")
        self._candidates.clear()
        self._running = None
        self._number += 1

    # --- what comes in

    def receive(self, sender: NodeId, message: DataMessage) -> None:
        """A message of a member's link. Raises MemberFaultError or MemberLeftError."""
        match message:
            case Candidates():
                self._receive_candidates(sender, message)
            case Step():
                self._receive_step(sender, message)
            case Leave(node=node, reason=reason):
                raise MemberLeftError(sender if node == self._own else node, reason)
            case Ready():
                raise MemberFaultError(sender, "sent Ready on a data link in use")
            case _:
                assert_never(message)

    def check_early(self, sender: NodeId, step: int, exchange: int) -> None:
        """A partial of a step that has not begun here waits on its link. Raises MemberFaultError."""
        if self._running is not None or step != self._number or exchange >= len(self._contributors):
            raise MemberFaultError(
                sender, f"sent a partial of exchange {exchange} of step {step} in step {self._number}"
            )
        if sender not in self._contributors[exchange]:
            raise MemberFaultError(sender, f"sent a partial of exchange {exchange}, to which it adds nothing")

    # --- candidates of the running step, on the driver

    def missing_candidates(self) -> list[NodeId]:
        """Ranks, but for this one, that have not ended the step."""
        return [node for node in self._ranks if node != self._own and node not in self._candidates]

    def candidates_of(self, node: NodeId) -> tuple[bytes, ...]:
        """What a rank sent for the entries with sampling, in order; () if it has no vocabulary."""
        return self._candidates[node]

    # --- rules

    def _start(self, step: Step) -> None:
        if self._running is not None:
            raise LocalProtocolError(f"step {self._number} has not finished")
        self._running = step
        for to, source, n_positions in step.copies:
            self._lengths[to] = min(n_positions, self._lengths[source])
        for entry in step.entries:
            self._lengths[entry.slot] = entry.position + len(entry.tokens)

    def _n_outputs(self) -> int:
        return 0 if self._running is None else sum(entry.sampling is not None for entry in self._running.entries)

    def _receive_step(self, sender: NodeId, step: Step) -> None:
        if sender != self._driver:
            raise MemberFaultError(sender, "sent a step, and is not the driver")
        if self._waiting is not None or self._running is not None:
            raise MemberFaultError(sender, f"sent step {step.step} before step {self._number} was over")
        self._check_step(step, lambda text: MemberFaultError(sender, text))
        self._waiting = step

    def _receive_candidates(self, sender: NodeId, candidates: Candidates) -> None:
        if candidates.step < self._number:
            return
        if self._own != self._driver or sender not in self._ranks or candidates.step > self._number:
            raise MemberFaultError(sender, f"sent candidates of step {candidates.step} in step {self._number}")
        if self._running is None or len(candidates.data) not in (0, self._n_outputs()):
            raise MemberFaultError(sender, f"sent candidates of {len(candidates.data)} rows for {self._n_outputs()}")
        self._candidates.setdefault(sender, candidates.data)

    def _check_step(self, step: Step, fault: Callable[[str], Exception]) -> None:
        if step.step != self._number:
            raise fault(f"sent step {step.step} where step {self._number} is due")
        n_tokens = sum(len(entry.tokens) for entry in step.entries)
        if not 0 < n_tokens <= self._limits.max_tokens:
            raise fault(f"sent a step of {n_tokens} tokens, at most {self._limits.max_tokens} are allowed")
        lengths = self._copied_lengths(step, fault)
        for entry in step.entries:
            self._check_entry(entry, lengths, fault)

    def _copied_lengths(self, step: Step, fault: Callable[[str], Exception]) -> dict[int, int]:
        """What each slot of the step holds after its copies."""
        lengths = dict(enumerate(self._lengths))
        for to, source, n_positions in step.copies:
            if to == source or to not in lengths or source not in lengths or n_positions > lengths[source]:
                raise fault(f"sent a step that copies {n_positions} positions of slot {source} to slot {to}")
            lengths[to] = n_positions
        return lengths

    def _check_entry(self, entry: StepEntry, lengths: dict[int, int], fault: Callable[[str], Exception]) -> None:
        held = lengths.pop(entry.slot, None)
        if held is None:
            raise fault(f"sent a step that names slot {entry.slot} twice or has no such slot")
        if entry.position > held or entry.position + len(entry.tokens) > self._limits.context:
            raise fault(f"sent positions from {entry.position} on for slot {entry.slot}, which holds {held}")
        if not all(0 <= token < self._limits.vocab_size for token in entry.tokens):
            raise fault("sent a token that the vocabulary does not have")


def _local_fault(text: str) -> LocalProtocolError:
    return LocalProtocolError(f"the driver {text}")
