"""Requests at their root, whose reader waits here; admissions.py has the driver's side. Pure.

A root keeps the prompt and the tokens received. Where the epoch or its driver is lost, it submits both again, in the
next epoch, and the answer goes on. Tokens carry their index in the whole answer: what was delivered is always a prefix,
nothing twice, no gap. A root hears of a loss from the driver, or by losing it; a driver's answers name their epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import NodeId
from meshllm.mesh.actions import Deliver, Resuming
from meshllm.mesh.messages import Failed, Finished, ModelHash, RequestId, Submit, Tokens
from meshllm.mesh.outbox import Outbox

UNAVAILABLE: Final = "unavailable"  # errors.UnavailableError
MOVED: Final = "moved"  # between daemons only: not the driver (any more); the root looks for another
LOST: Final = "lost"  # between daemons only: its epoch is over; the root submits it again, with what it has
MAX_REPLAYS: Final = 6  # without a token between them: then it may be the request that breaks epochs
LONGEST_WAIT_S: Final = 120.0  # for a layout that is being prepared
LOOK_AGAIN_S: Final = 1.0


class RootState(StrEnum):
    """Where a request is, on its root."""

    WAITING = "waiting"  # for a layout, the first or the next
    RUNNING = "running"  # at the driver of its epoch
    ENDED = "ended"


class RootEvent(StrEnum):
    """What happens to it."""

    DISPATCHED = "dispatched"
    DREW = "drew"  # tokens came
    MOVED = "moved"  # the driver does not drive
    LOST = "lost"  # its epoch or its driver is no more
    ENDED = "ended"  # finished, failed, cancelled, waited too long, lost too often


TRANSITIONS: Final[dict[tuple[RootState, RootEvent], RootState]] = {
    (RootState.WAITING, RootEvent.DISPATCHED): RootState.RUNNING,
    (RootState.WAITING, RootEvent.ENDED): RootState.ENDED,
    (RootState.RUNNING, RootEvent.DREW): RootState.RUNNING,
    (RootState.RUNNING, RootEvent.MOVED): RootState.WAITING,
    (RootState.RUNNING, RootEvent.LOST): RootState.WAITING,
    (RootState.RUNNING, RootEvent.ENDED): RootState.ENDED,
}


@dataclass(slots=True)
class RootRequest:
    """A request of a local reader. received: ids of the answer so far, which a replay brings along."""

    submit: Submit
    since: float  # that it waits for a layout
    deadline: float  # to be dispatched by
    state: RootState = RootState.WAITING
    driver: NodeId | None = None  # that runs it
    received: list[int] = field(default_factory=list)
    retry_at: float = 0.0
    replays: int = 0  # since the last token

    def step(self, event: RootEvent) -> None:
        """Applies an event."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise LocalProtocolError(f"request {self.submit.request}: {event} while {self.state}")
        self.state = state

    def ended_with(self) -> str | None:
        """Why nothing can follow what has come, though nobody said that it was all; None if more must come."""
        tokens = [*self.submit.generated, *self.received]
        if tokens and tokens[-1] in self.submit.end_tokens:
            return "stop"
        return "length" if len(tokens) >= self.submit.max_tokens else None

    def is_late(self, now: float) -> bool:
        """Whether it has waited too long."""
        return self.state is RootState.WAITING and now >= self.deadline


class RootRequests:
    """The requests of local readers that have not ended."""

    def __init__(self, out: Outbox, wait_s: float) -> None:
        """wait_s: for a layout, each time that one is needed."""
        self._out = out
        self._wait_s = wait_s
        self._requests: dict[RequestId, RootRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, submit: Submit, now: float) -> None:
        """A new one, waiting."""
        if submit.request in self._requests:
            raise LocalProtocolError(f"request {submit.request} is running already")
        self._requests[submit.request] = RootRequest(submit, now, now + self._wait_s)

    def waiting(self, now: float) -> list[RootRequest]:
        """Those to dispatch, first come first."""
        due = [r for r in self._requests.values() if r.state is RootState.WAITING and r.retry_at <= now]
        for request in due:
            request.retry_at = 0.0  # no deadline any more: from now on a commit is what it waits for
        return due

    def dispatched(self, request: RootRequest, driver: NodeId) -> Submit:
        """It goes to this driver: what to tell it."""
        request.step(RootEvent.DISPATCHED)
        request.driver = driver
        return msgspec.structs.replace(request.submit, generated=(*request.submit.generated, *request.received))

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
            request.received.extend(token.token for token in fresh)
            request.replays = 0
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

    def failed(self, message: Failed, driver: NodeId, now: float, retry_at: float) -> None:
        """The driver gave up, or its epoch is over, or says that it does not drive."""
        request = self._running(message.request, driver)
        if request is None:
            return
        if message.code == LOST:
            self._replay(request, message.reason, now, retry_at)
        elif message.code == MOVED:
            request.step(RootEvent.MOVED)
            request.driver, request.retry_at = None, retry_at
        else:
            self._end(request, message)

    def cancel(self, request_id: RequestId) -> NodeId | None:
        """The reader left. Returns the driver that runs it, if one does."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.step(RootEvent.ENDED)
        return request.driver

    def driver_lost(self, driver: NodeId, reason: str, now: float) -> None:
        """The answers that it gave wait for the next."""
        for request in [r for r in self._requests.values() if r.driver == driver]:
            self._replay(request, reason, now, now)

    def fail_all(self, reason: str, code: str, *, but: ModelHash | None = None) -> None:
        """Every answer ends, but those of a model. code: as of errors.py."""
        self._fail([r for r in self._requests.values() if r.submit.model != but], reason, code)

    def has_late(self, now: float) -> bool:
        """Whether one has waited too long."""
        return any(r.is_late(now) for r in self._requests.values())

    def expire(self, now: float, reason: str, *, preparing: bool) -> None:
        """Ends those that waited too long. preparing: a layout is under way, which may take longer than that."""
        late = [r for r in self._requests.values() if r.is_late(now)]
        for request in late:
            request.deadline = now + LOOK_AGAIN_S
        self._fail([r for r in late if not preparing or now >= r.since + LONGEST_WAIT_S], reason)

    def next_deadline(self) -> float:
        """When one has waited too long, or is to be tried again."""
        waiting = [r for r in self._requests.values() if r.state is RootState.WAITING]
        return min((min(r.deadline, r.retry_at or math.inf) for r in waiting), default=math.inf)

    def _running(self, request_id: RequestId, driver: NodeId) -> RootRequest | None:
        request = self._requests.get(request_id)
        if request is None or request.driver != driver:
            return None  # cancelled, ended, or run by another: late or foreign, either way not to be delivered
        return request

    def _replay(self, request: RootRequest, reason: str, now: float, retry_at: float) -> None:
        if (why := request.ended_with()) is not None:
            n_tokens = len(request.submit.generated) + len(request.received)
            self._end(request, Finished(request.submit.request, why, n_tokens))
            return
        request.replays += 1
        if request.replays > MAX_REPLAYS:
            self._fail([request], f"{reason}; no token came in {MAX_REPLAYS} attempts: ask again")
            return
        request.step(RootEvent.LOST)
        request.driver, request.retry_at = None, retry_at
        request.since, request.deadline = now, now + self._wait_s
        self._out.add(Deliver(request.submit.request, Resuming(reason)))

    def _end(self, request: RootRequest, message: Finished | Failed) -> None:
        request.step(RootEvent.ENDED)
        del self._requests[request.submit.request]
        self._out.add(Deliver(request.submit.request, message))

    def _fail(self, requests: list[RootRequest], reason: str, code: str = UNAVAILABLE) -> None:
        for request in requests:
            self._end(request, Failed(request.submit.request, code, reason))
