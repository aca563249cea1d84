"""The data links of one epoch: send to some, take what comes from all, wait for any. Decides nothing.

Waiting is where the time between devices goes. It has four stages, by how long one has waited: look again at once (a
frame that is on its way arrives in some 10 µs); look again, but offer the core to whoever wants it, for as long as
ranks are usually apart; then sleep in the system for a moment (20 µs to wake up, 200 on a virtual machine); then park
in trio (70 µs more, but other tasks run). One task waits for a group; `wake` ends the wait from outside.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import trio

from meshllm.errors import LinkLostError, RemoteProtocolError
from meshllm.kernels.links import PartialHead
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
        self._poll = select.epoll()
        self._watched: dict[NodeId, int] = {}
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._poll.register(self._woken, select.EPOLLIN)

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
        self._poll.register(link, select.EPOLLIN)
        self._watched[node] = select.EPOLLIN

    def send(self, nodes: Sequence[NodeId], body: bytes) -> None:
        """Sends a body to some members, as far as their sockets take it at once. Raises LinkFaultError."""
        for node in nodes:
            try:
                self._links[node].send(body)
            except LinkLostError as error:
                raise LinkFaultError(node, str(error)) from error

    def pump(self) -> list[tuple[NodeId, bytes | PartialHead]]:
        """Sends what is left over; returns the bodies that have come, by whom. A link whose next frame is a partial
        gives its head, each time, and nothing more before a communicator has taken it. Raises LinkFaultError.
        """
        arrived: list[tuple[NodeId, bytes | PartialHead]] = []
        for node, link in self._links.items():
            try:
                if link.unsent:
                    link.flush()
            except LinkLostError as error:
                raise LinkFaultError(node, str(error)) from error
            while (body := self.receive(node)) is not None:
                arrived.append((node, body))
                if isinstance(body, PartialHead):
                    break
        return arrived

    def receive(self, node: NodeId) -> bytes | PartialHead | None:
        """As DataLink.receive. Raises LinkFaultError."""
        try:
            return self._links[node].receive()
        except (LinkLostError, RemoteProtocolError) as error:
            raise LinkFaultError(node, str(error)) from error

    def of_ranks(self, ranks: Sequence[NodeId]) -> list[DataLink | None]:
        """Their links, None for a node that has none here."""
        return [self._links.get(node) for node in ranks]

    async def wait(self, since: float, deadline: float, *, may_sleep: bool, unread: Sequence[NodeId] = ()) -> None:
        """Returns when there may be something to pump, after `wake`, or at the deadline; perhaps for no reason.

        since, deadline: time.perf_counter() when this wait began, and when it must end (math.inf: never). may_sleep:
        the whole loop may stand still for SLEEP_S, since nothing else has work. unread: whose bytes are no reason.
        """
        waited = time.perf_counter() - since
        if waited < SPIN_S:
            return
        if waited < YIELD_S and may_sleep:
            os.sched_yield()
            return
        self._watch(unread)
        if may_sleep and waited < SLEEP_S and self._poll.poll(SLEEP_S - waited):
            self._forget_wakes()
            return
        with trio.move_on_after(max(deadline - time.perf_counter(), 0.0)):
            # The poll's own descriptor is readable when one of its sockets is ready: epolls nest.
            await trio.lowlevel.wait_readable(self._poll.fileno())
            self._forget_wakes()

    def wake(self) -> None:
        """Ends the wait that is under way, or the next one. From the loop's own thread."""
        with suppress(BlockingIOError):  # then it is awake already
            self._waker.send(b"w")

    def close(self) -> None:
        """Closes all links. May be called again."""
        self._poll.close()
        for link in self._links.values():
            link.close()
        self._waker.close()
        self._woken.close()

    def _forget_wakes(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _watch(self, unread: Sequence[NodeId]) -> None:
        for node, link in self._links.items():
            events = (0 if node in unread else select.EPOLLIN) | (select.EPOLLOUT if link.unsent else 0)
            if events != self._watched[node]:
                self._poll.modify(link, events)
                self._watched[node] = events
