"""Listening sockets: whom they let in, and how they end. What is said on a connection is http1.py's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import structlog
import trio
from starlette.types import ASGIApp

from meshllm.api.http1 import Http1, RefusedError, linger
from meshllm.log import TELL_AGAIN_S

MAX_CONNECTIONS: Final = 256  # of a listening socket at a time
REFUSING_S: Final = 1.0  # for one more to hear that it is refused


class _Door:
    """One listening socket: who is inside."""

    def __init__(self, app: ASGIApp, listener: trio.SocketListener) -> None:
        self.listener = listener
        self.inside: set[Http1] = set()
        self._app = app
        self._told_at = -math.inf

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection, from its start to its end."""
        if not self._has_room():
            await self._refuse(stream)
            return
        connection = Http1(self._app, stream)
        self.inside.add(connection)
        try:
            await connection.run()
        except Exception:  # the connection's border: what goes wrong on one ends that one alone
            structlog.get_logger().exception("connection_failed")
        finally:
            self.inside.discard(connection)

    def _has_room(self) -> bool:
        """Makes it, where it can: the longest idle connection leaves."""
        if len(self.inside) < MAX_CONNECTIONS:
            return True
        longest = min(self.inside, key=lambda connection: connection.idle_since)
        if longest.idle_since == math.inf:
            return False
        self.inside.remove(longest)
        longest.leave()
        return True

    async def _refuse(self, stream: trio.SocketStream) -> None:
        """Says that it is full, to the client and from time to time to the log."""
        if trio.current_time() > self._told_at + TELL_AGAIN_S:
            self._told_at = trio.current_time()
            address = self.listener.socket.getsockname()
            structlog.get_logger().warning("connections_full", socket=str(address), limit=MAX_CONNECTIONS)
        words = f"{MAX_CONNECTIONS} connections are open already: close some, or try again later"
        with trio.move_on_after(REFUSING_S):
            try:
                await stream.send_all(RefusedError(503, words, "too_many_connections").data)
            except trio.BrokenResourceError:
                return
            await linger(stream)


async def serve_connections(
    app: ASGIApp,
    listeners: Sequence[trio.SocketListener],
    stopping: trio.Event,
    grace_s: float,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until `stopping` is set and open requests have ended, at most grace_s after it."""
    doors = [_Door(app, listener) for listener in listeners]

    async def accept(door: _Door, *, task_status: trio.TaskStatus[object]) -> None:
        await trio.serve_listeners(door.serve, [door.listener], handler_nursery=connections, task_status=task_status)

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            for door in doors:
                await accepting.start(accept, door)
            task_status.started()
            await stopping.wait()
            accepting.cancel_scope.cancel()
        connections.cancel_scope.deadline = trio.current_time() + grace_s
        for connection in [connection for door in doors for connection in door.inside]:
            connection.leave()
