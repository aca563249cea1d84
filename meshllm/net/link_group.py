"""The data links of one epoch: send to some, take what comes from all, wait for any. Decides nothing.

Waiting is where the time between devices goes. It has four stages, by how long one has waited: look again at once (a
frame that is on its way arrives in some 10 µs); look again, but offer the core to whoever wants it, for as long as
ranks are usually apart; then sleep in the system for a moment (20 µs to wake up, 200 on a virtual machine); then park
in trio (70 µs more, but other tasks run). One task waits for a group; `wake` ends the wait from outside.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import trio

from meshllm.errors import LinkLostError, RemoteProtocolError
from meshllm.layout.layout import NodeId
from meshllm.net.data_link import DataLink

SPIN_S: Final = 50e-6
YIELD_S: Final = 1e-3
SLEEP_S: Final = 2e-3


class LinkFaultError(LinkLostError):
    """A link of a group is lost, or its peer broke the rules of frames. `node`: whose."""

    def __init__(self, node: NodeId, message: str) -> None:
        super().__init__(message)
        self.node = node


class LinkGroup:
    """See the head of this file. Owns its links."""

    def __init__(self) -> None:
        self._links: dict[NodeId, DataLink] = {}
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Whose links are here."""
        return tuple(self._links)

    @property
    def bytes_sent(self) -> int:
        """By all links so far."""
        return sum(link.bytes_sent for link in self._links.values())

    @property
    def bytes_received(self) -> int:
        """By all links so far."""
        return sum(link.bytes_received for link in self._links.values())

    @property
    def has_unsent(self) -> bool:
        """Whether some link could not yet send all."""
        return any(link.unsent for link in self._links.values())

    @property
    def unsent_nodes(self) -> list[NodeId]:
        """Whose sockets have not taken all."""
        return [node for node, link in self._links.items() if link.unsent]

    def admit(self, frame_limit: int) -> None:
        """Members may send bodies of this size from now on."""
        for link in self._links.values():
            link.admit(frame_limit)

    def add(self, node: NodeId, link: DataLink) -> None:
        """Takes a link over."""
        self._links[node] = link
        self._selector.register(link, selectors.EVENT_READ)

    def send(self, nodes: Sequence[NodeId], body: bytes) -> None:
        """Sends a body to some members, as far as their sockets take it at once. Raises LinkFaultError."""
        for node in nodes:
            try:
                self._links[node].send(body)
            except LinkLostError as error:
                raise LinkFaultError(node, str(error)) from error

    def pump(self) -> list[tuple[NodeId, bytes]]:
        """Sends what is left over; returns the bodies that have come, by whom. Raises LinkFaultError."""
        arrived: list[tuple[NodeId, bytes]] = []
        for node, link in self._links.items():
            try:
                if link.unsent:
                    link.flush()
                body = link.receive()
                while body is not None:
                    arrived.append((node, body))
                    body = link.buffered() if link.has_unread else None
            except (LinkLostError, RemoteProtocolError) as error:
                raise LinkFaultError(node, str(error)) from error
        return arrived

    async def wait(self, since: float, deadline: float, *, may_sleep: bool) -> None:
        """Returns when there may be something to pump, after `wake`, or at the deadline; perhaps for no reason.

        since, deadline: time.perf_counter() when this wait began, and when it must end (math.inf: never). may_sleep:
        the whole loop may stand still for SLEEP_S, since nothing else has work.
        """
        waited = time.perf_counter() - since
        if waited < SPIN_S:
            return
        if waited < YIELD_S and may_sleep:
            os.sched_yield()
            return
        self._watch_writes(True)
        try:
            if may_sleep and waited < SLEEP_S:
                ready = self._selector.select(SLEEP_S - waited)
                if ready:
                    self._forget_wakes()
                    return
            with trio.move_on_after(max(deadline - time.perf_counter(), 0.0)):
                # The selector's own descriptor is readable when one of its sockets is ready (epoll and kqueue nest).
                await trio.lowlevel.wait_readable(self._selector.fileno())
                self._forget_wakes()
        finally:
            self._watch_writes(False)

    def wake(self) -> None:
        """Ends the wait that is under way, or the next one. From the loop's own thread."""
        with suppress(BlockingIOError):  # then it is awake already
            self._waker.send(b"w")

    def close(self) -> None:
        """Closes all links. May be called again."""
        self._selector.close()
        for link in self._links.values():
            link.close()
        self._waker.close()
        self._woken.close()

    def _forget_wakes(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _watch_writes(self, wanted: bool) -> None:
        for link in self._links.values():
            if link.unsent:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
                self._selector.modify(link, events)
