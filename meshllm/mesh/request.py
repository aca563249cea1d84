"""Requests at both ends: the root's side, whose reader waits here, and the driver's, which runs them in an epoch. Pure.

A root keeps prompt and tokens received, so that a later version can replay an answer in a new epoch; now a lost epoch
ends it. Tokens carry their index in the whole answer: what was delivered is always a prefix, nothing twice, no gap. A
root hears of the end of a request from its driver, or by losing the driver; nothing else ends one that runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import NodeId
from meshllm.mesh.actions import Admit, CancelAdmitted, Deliver
from meshllm.mesh.messages import Epoch, Failed, Finished, RequestId, Submit, Tokens
from meshllm.mesh.outbox import Outbox
from meshllm.parameters import SampledToken

MAX_ADMITTED: Final = 1024  # requests that one driver takes, running and queued
UNAVAILABLE: Final = "unavailable"  # errors.UnavailableError
AGAIN: Final = "ask again, the others go on"
MOVED: Final = "moved"  # between daemons only: not the driver (any more); the root looks for another


class RootState(StrEnum):
    """Where a request is, on its root."""

    WAITING = "waiting"  # for a layout
    RUNNING = "running"  # at the driver of its epoch
    ENDED = "ended"


class RootEvent(StrEnum):
    """What happens to it."""

    DISPATCHED = "dispatched"
    DREW = "drew"  # tokens came
    MOVED = "moved"  # the driver does not drive; nothing was drawn
    ENDED = "ended"  # finished, failed, cancelled, driver lost, waited too long


TRANSITIONS: Final[dict[tuple[RootState, RootEvent], RootState]] = {
    (RootState.WAITING, RootEvent.DISPATCHED): RootState.RUNNING,
    (RootState.WAITING, RootEvent.ENDED): RootState.ENDED,
    (RootState.RUNNING, RootEvent.DREW): RootState.RUNNING,
    (RootState.RUNNING, RootEvent.MOVED): RootState.WAITING,
    (RootState.RUNNING, RootEvent.ENDED): RootState.ENDED,
}


@dataclass(slots=True)
class RootRequest:
    """A request of a local reader. received: the whole answer so far, what the submit already held included."""

    submit: Submit
    deadline: float  # to be dispatched by
    state: RootState = RootState.WAITING
    driver: NodeId | None = None  # that runs it
    received: list[SampledToken] = field(default_factory=list)
    retry_at: float = 0.0

    def step(self, event: RootEvent) -> None:
        """Applies an event."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise LocalProtocolError(f"request {self.submit.request}: {event} while {self.state}")
        self.state = state


class RootRequests:
    """The requests of local readers that have not ended."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._requests: dict[RequestId, RootRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, submit: Submit, deadline: float) -> None:
        """A new one, waiting."""
        if submit.request in self._requests:
            raise LocalProtocolError(f"request {submit.request} is running already")
        self._requests[submit.request] = RootRequest(submit, deadline)

    def waiting(self, now: float) -> list[RootRequest]:
        """Those to dispatch, first come first."""
        due = [r for r in self._requests.values() if r.state is RootState.WAITING and r.retry_at <= now]
        for request in due:
            request.retry_at = 0.0  # no deadline any more: from now on a commit is what it waits for
        return due

    def dispatched(self, request: RootRequest, driver: NodeId) -> None:
        """It went to this driver."""
        request.step(RootEvent.DISPATCHED)
        request.driver = driver

    def tokens(self, message: Tokens, driver: NodeId) -> str | None:
        """Tokens from a driver; delivers what is new. Returns what is wrong with them, if anything."""
        request = self._running(message.request, driver)
        if request is None:
            return None
        known = len(request.submit.generated) + len(request.received)
        if message.start > known:
            return f"tokens of an answer start at {message.start}, expected {known}"
        fresh = message.tokens[known - message.start :]
        if fresh:
            request.step(RootEvent.DREW)
            request.received.extend(fresh)
            self._out.add(Deliver(message.request, Tokens(message.request, known, fresh)))
        return None

    def finished(self, message: Finished, driver: NodeId) -> str | None:
        """The driver is done; the same answer as `tokens`."""
        request = self._running(message.request, driver)
        if request is None:
            return None
        known = len(request.submit.generated) + len(request.received)
        if message.n_tokens != known:
            return f"an answer finished with {message.n_tokens} tokens, {known} came"
        self._end(request, message)
        return None

    def failed(self, message: Failed, driver: NodeId, retry_at: float) -> None:
        """The driver gave up, or says that it does not drive."""
        request = self._running(message.request, driver)
        if request is None:
            return
        if message.code == MOVED and not request.received:
            request.step(RootEvent.MOVED)
            request.driver, request.retry_at = None, retry_at
        else:
            code = UNAVAILABLE if message.code == MOVED else message.code
            self._end(request, Failed(message.request, code, message.reason))

    def cancel(self, request_id: RequestId) -> NodeId | None:
        """The reader left. Returns the driver that runs it, if one does."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.step(RootEvent.ENDED)
        return request.driver

    def fail_driver(self, driver: NodeId, reason: str) -> None:
        """The driver is lost: the answers that it gave end."""
        self._fail([r for r in self._requests.values() if r.driver == driver], f"{reason}; {AGAIN}")

    def fail_all(self, reason: str) -> None:
        """Every answer ends."""
        self._fail(list(self._requests.values()), reason)

    def has_late(self, now: float) -> bool:
        """Whether one has waited too long."""
        return any(r.state is RootState.WAITING and now >= r.deadline for r in self._requests.values())

    def expire(self, now: float, reason: str) -> None:
        """Ends those that waited too long."""
        late = [r for r in self._requests.values() if r.state is RootState.WAITING and now >= r.deadline]
        self._fail(late, reason)

    def next_deadline(self) -> float:
        """When one has waited too long, or is to be tried again."""
        waiting = [r for r in self._requests.values() if r.state is RootState.WAITING]
        return min((min(r.deadline, r.retry_at or math.inf) for r in waiting), default=math.inf)

    def _running(self, request_id: RequestId, driver: NodeId) -> RootRequest | None:
        request = self._requests.get(request_id)
        if request is None or request.driver != driver:
            return None  # cancelled, ended, or run by another: late or foreign, either way not to be delivered
        return request

    def _end(self, request: RootRequest, message: Finished | Failed) -> None:
        request.step(RootEvent.ENDED)
        del self._requests[request.submit.request]
        self._out.add(Deliver(request.submit.request, message))

    def _fail(self, requests: list[RootRequest], reason: str) -> None:
        for request in requests:
            self._end(request, Failed(request.submit.request, UNAVAILABLE, reason))


@dataclass(slots=True)
class Admission:
    """A request that runs at the driver."""

    root: NodeId
    epoch: Epoch


class Admissions:
    """The driver's requests, of all roots. `answer(root, message)` takes messages to a root, this node included."""

    def __init__(self, out: Outbox, answer: Callable[[NodeId, Tokens | Finished | Failed], None]) -> None:
        self._out = out
        self._answer = answer
        self._requests: dict[RequestId, Admission] = {}

    def take(self, root: NodeId, submit: Submit, epoch: Epoch) -> None:
        """Runs a request in an epoch. One too many, or with an id in use, fails at once."""
        if submit.request in self._requests:
            self._answer(root, Failed(submit.request, "invalid_request_error", "the request id is in use"))
        elif len(self._requests) >= MAX_ADMITTED:
            self._answer(root, Failed(submit.request, UNAVAILABLE, f"busy: {MAX_ADMITTED} requests are running"))
        else:
            self._requests[submit.request] = Admission(root, epoch)
            self._out.add(Admit(epoch, submit))

    def count(self, epoch: Epoch) -> int:
        """Requests that run in an epoch."""
        return sum(admission.epoch == epoch for admission in self._requests.values())

    def tokens(self, request: RequestId, start: int, tokens: tuple[SampledToken, ...]) -> None:
        """The data loop drew tokens."""
        admission = self._requests.get(request)
        if admission is not None:
            self._answer(admission.root, Tokens(request, start, tokens))

    def ended(self, request: RequestId, message: Finished | Failed) -> None:
        """The data loop is done with it."""
        admission = self._requests.pop(request, None)
        if admission is not None:
            self._answer(admission.root, message)

    def cancel(self, request: RequestId, root: NodeId) -> None:
        """Its root wants no more."""
        admission = self._requests.get(request)
        if admission is not None and admission.root == root:
            self._drop(request)

    def root_lost(self, root: NodeId) -> None:
        """Nobody reads the answers of this root."""
        for request in [r for r, admission in self._requests.items() if admission.root == root]:
            self._drop(request)

    def fail_epoch(self, epoch: Epoch, reason: str) -> None:
        """Ends the requests of an epoch that is no more."""
        for request in [r for r, admission in self._requests.items() if admission.epoch == epoch]:
            self._answer(self._requests.pop(request).root, Failed(request, UNAVAILABLE, f"{reason}; {AGAIN}"))

    def _drop(self, request: RequestId) -> None:
        del self._requests[request]
        self._out.add(CancelAdmitted(request))
