"""One direction between two trio loops in two threads: a bounded queue, many may post, one task receives.

The control loop never waits to post (a full queue is a bug or a flood, and raises); the data loop may wait for room,
which slows it down to what the control loop can take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import trio

from meshllm.errors import LocalProtocolError

T = TypeVar("T")


class Crossing(Generic[T]):
    """One direction between two loops: many may post, one task of one loop receives."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[T] = deque()  # append and popleft are atomic
        self._receiver = _Wakeup()
        self._sender = _Wakeup()

    def post(self, item: T) -> None:
        """From any thread, at once. Raises LocalProtocolError if the queue is full."""
        if len(self._items) >= self._limit:
            raise LocalProtocolError(f"{self._limit} items wait between the loops and nobody takes them")
        self._items.append(item)
        self._receiver.wake()

    async def send(self, item: T) -> None:
        """From the sending loop: waits for room; no checkpoint where there is. If cancelled, the item is not sent."""
        while len(self._items) >= self._limit:
            await self._sender.wait(lambda: len(self._items) < self._limit)
        self._items.append(item)
        self._receiver.wake()

    def take(self) -> T | None:
        """In the receiving loop: the next item, or None."""
        try:
            item = self._items.popleft()
        except IndexError:
            return None
        self._sender.wake()
        return item

    async def receive(self) -> T:
        """In the receiving loop: the next item, when there is one. Cancellable; nothing is lost."""
        while True:
            item = self.take()
            if item is not None:
                return item
            await self._receiver.wait(lambda: bool(self._items))


class _Wakeup:
    """Wakes one waiting task of a trio loop from any thread; a wake that nobody waits for costs a comparison."""

    def __init__(self) -> None:
        self._waiting: tuple[trio.lowlevel.TrioToken, trio.Event] | None = None

    def wake(self) -> None:
        waiting = self._waiting
        if waiting is None:
            return
        token, event = waiting
        with suppress(trio.RunFinishedError):  # the loop that waited is over
            token.run_sync_soon(event.set, idempotent=True)

    async def wait(self, ready: Callable[[], bool]) -> None:
        """Until woken, or at once if ready() says so: it is asked after a wake would be heard."""
        event = trio.Event()
        self._waiting = (trio.lowlevel.current_trio_token(), event)
        try:
            if not ready():
                await event.wait()
        finally:
            self._waiting = None  # only here: a late wake must not take away what the next wait has put up
