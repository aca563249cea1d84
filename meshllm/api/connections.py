"""HTTP connections: hypercorn's trio connection handler, each on a stream that cannot hold the daemon.

hypercorn writes inside a shielded cancel scope, without a deadline: a reader that takes nothing would keep its
connection, and a daemon that is to stop, for ever. So writes here have a deadline and every connection can be aborted.
That is why its `TCPServer` is used directly and not its `serve`, which makes its streams itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import hypercorn.config
import hypercorn.utils
import structlog
import trio
from hypercorn.events import Event, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import Framework
from starlette.types import ASGIApp

MAX_CONNECTIONS: Final = 256  # at a time; one more is closed at once
WRITE_TIMEOUT_S: Final = 30.0  # for a reader to take what was sent: an event, or a whole answer
KEEP_ALIVE_S: Final = 75.0  # also for the head of a request to arrive


class Connection(trio.abc.HalfCloseableStream):
    """A stream whose writes end: by a deadline, or by `abort`."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._writing = trio.CancelScope()

    @property
    def socket(self) -> trio.socket.SocketType:
        """For hypercorn, which asks it for addresses."""
        return self._stream.socket

    def abort(self) -> None:
        """Closes it at once, whoever reads or writes."""
        self._writing.cancel()
        self._stream.socket.close()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Raises BrokenResourceError if the reader does not take it in time."""
        with trio.CancelScope(deadline=trio.current_time() + WRITE_TIMEOUT_S) as self._writing:
            try:
                await self._stream.send_all(data)
            except trio.BusyResourceError:  # hypercorn answers a broken request while it closes its connection
                raise trio.BrokenResourceError("the connection is being closed") from None
        if self._writing.cancelled_caught:
            raise trio.BrokenResourceError(f"the reader took nothing for {WRITE_TIMEOUT_S:g} s")

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Handler(TCPServer):
    """Ends with its client: hypercorn's waits for its idle timer first, which keeps connections that are long gone."""

    _left = False

    async def _read_data(self) -> None:
        await super()._read_data()
        self._left = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if not (self._left and isinstance(event, Updated)):
            await super().protocol_send(event)


async def serve_connections(
    app: ASGIApp,
    listeners: Sequence[trio.SocketListener],
    stopping: trio.Event,
    grace_s: float,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until `stopping` is set and open requests have ended, at most grace_s after it."""
    config = _config()
    context = WorkerContext(None)
    wrapped = hypercorn.utils.wrap_app(cast("Framework", app), config.wsgi_max_body_size, "asgi")
    open_ones: set[Connection] = set()

    async def run(stream: trio.SocketStream) -> None:
        if len(open_ones) >= MAX_CONNECTIONS:
            return  # and it is closed
        connection = Connection(stream)
        open_ones.add(connection)
        try:
            await _Handler(wrapped, config, context, {}, connection)  # type: ignore[arg-type]  # says SSLStream
        except Exception:  # the connection's border: what goes wrong on one ends that one alone
            structlog.get_logger().exception("connection_failed")
        finally:
            open_ones.discard(connection)

    async def accept(connections: trio.Nursery, *, task_status: trio.TaskStatus[object]) -> None:
        await trio.serve_listeners(run, list(listeners), handler_nursery=connections, task_status=task_status)

    async def abort_after_grace() -> None:
        try:
            await stopping.wait()
            await trio.sleep(grace_s)
        finally:  # also when all is cancelled at once: see the head of this file
            for connection in list(open_ones):
                connection.abort()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort_after_grace)
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                await accepting.start(accept, connections)
                task_status.started()
                await stopping.wait()
                accepting.cancel_scope.cancel()
            await context.terminated.set()  # closes idle connections
        nursery.cancel_scope.cancel()


def _config() -> hypercorn.config.Config:
    config = hypercorn.config.Config()
    config.accesslog = config.errorlog = None
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE_S
    return config
