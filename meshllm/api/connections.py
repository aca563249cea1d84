"""HTTP/1.1 connections: hypercorn's trio connection handler, each on a stream that cannot hold the daemon.

hypercorn writes inside a shielded cancel scope, without a deadline: a reader that takes nothing would keep its
connection, and a daemon that is to stop, for ever. So writes here have a deadline and every connection can be aborted.
That is why its `TCPServer` is used directly and not its `serve`, which makes its streams itself. HTTP/2, which it
would take unasked, is refused: its clients can keep an answer's slot with a closed window and a living connection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, cast

import hypercorn.config
import hypercorn.utils
import structlog
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, Framework
from hypercorn.utils import parse_socket_addr
from starlette.types import ASGIApp

from meshllm.api.openai import error_object
from meshllm.api.streams import json_response

if TYPE_CHECKING:
    import h11

MAX_CONNECTIONS: Final = 256  # of a listening socket at a time; one more is told so and closed
WRITE_TIMEOUT_S: Final = 30.0  # for a reader to take what was sent: an event, or a whole answer
HEAD_TIMEOUT_S: Final = 10.0  # for the head of a request, from the connection's start or the head's own
KEEP_ALIVE_S: Final = 75.0  # between requests
TELL_AGAIN_S: Final = 60.0  # between log lines that say the same


_HEAD_FAULTS: Final = {
    400: ("the request is no HTTP/1.1: check its first line and its headers", "bad_request"),
    414: ("the request's head is too long", "uri_too_long"),
    431: ("the request's head is too long: shorten its headers", "headers_too_large"),
    501: ("the request's transfer encoding is not known: send it chunked, or with its length", "not_implemented"),
    505: ("only HTTP/1.1 is spoken here", "http_version_not_supported"),
}


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


class _Http1(H11Protocol):
    """Refuses HTTP/2, and says in words what is wrong with a head."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """An upgrade to h2c is not made: the answer is HTTP/1.1's."""

    async def _create_stream(self, request: h11.Request) -> None:
        if request.http_version.startswith(b"1."):
            await super()._create_stream(request)
        else:  # HTTP/2's preface
            await self._send_error_response(505)
            await self.send(Closed())

    async def _send_error_response(self, status_code: int) -> None:
        words, code = _HEAD_FAULTS.get(status_code, _HEAD_FAULTS[400])
        await self.send(RawData(_closing_response(status_code, words, code)))


class _Handler(TCPServer):
    """Ends with its client: hypercorn's waits for its idle timer first, which keeps connections that are long gone."""

    _left = False
    _limit_s = HEAD_TIMEOUT_S  # of the idle timer that runs, or runs next
    _waiting = True  # for a head

    async def run(self) -> None:
        """As hypercorn's, without TLS and with one protocol."""
        peer = self.stream.socket
        try:
            client, server = (parse_socket_addr(peer.family, name) for name in (peer.getpeername(), peer.getsockname()))
            async with TaskGroup() as self._task_group:
                state = ConnectionState(self.state)
                self._http = _Http1(
                    self.app, self.config, self.context, self._task_group, state, False, client, server,
                    self.protocol_send,
                )  # fmt: skip
                self.protocol = self._http  # type: ignore[assignment]  # a ProtocolWrapper chooses between two of these
                await self.idle_task.restart(self._task_group, self._idle_timeout)
                await self._read_data()
        except OSError:  # left before it was looked at
            pass
        finally:
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated):
            if self._left:
                return
            begun = bool(self._http.connection.trailing_data[0])  # the next head, or a part of it
            self._waiting, self._limit_s = event.idle, HEAD_TIMEOUT_S if begun else KEEP_ALIVE_S
        await super().protocol_send(event)

    async def _read_data(self) -> None:
        with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            while data := await self.stream.receive_some(MAX_RECV):
                if self._waiting and self._limit_s != HEAD_TIMEOUT_S:  # a further head begins
                    self._limit_s = HEAD_TIMEOUT_S
                    await self.idle_task.restart(self._task_group, self._idle_timeout)
                await self.protocol.handle(RawData(bytes(data)))
            await self.protocol.handle(RawData(b""))
        await self.protocol.handle(Closed())
        self._left = True
        await self.idle_task.stop()

    async def _idle_timeout(self) -> None:
        with trio.move_on_after(self._limit_s):
            await self.context.terminated.wait()
        with trio.CancelScope(shield=True):
            await self._initiate_server_close()


class _Door:
    """One listening socket: who is inside."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self.listener = listener
        self.inside: set[Connection] = set()
        self._told_at = -math.inf

    async def refuse(self, stream: trio.SocketStream) -> None:
        """Says that it is full, to the client and from time to time to the log."""
        if trio.current_time() > self._told_at + TELL_AGAIN_S:
            self._told_at = trio.current_time()
            address = self.listener.socket.getsockname()
            structlog.get_logger().warning("connections_full", socket=str(address), limit=MAX_CONNECTIONS)
        words = f"{MAX_CONNECTIONS} connections are open already: close some, or try again later"
        with trio.move_on_after(1), suppress(trio.BrokenResourceError):
            await stream.send_all(_closing_response(503, words, "too_many_connections"))


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
    doors = [_Door(listener) for listener in listeners]

    async def run(door: _Door, stream: trio.SocketStream) -> None:
        if len(door.inside) >= MAX_CONNECTIONS:
            await door.refuse(stream)
            return
        connection = Connection(stream)
        door.inside.add(connection)
        try:
            await _Handler(wrapped, config, context, {}, connection)  # type: ignore[arg-type]  # says SSLStream
        except Exception:  # the connection's border: what goes wrong on one ends that one alone
            structlog.get_logger().exception("connection_failed")
        finally:
            door.inside.discard(connection)

    async def accept(door: _Door, connections: trio.Nursery, *, task_status: trio.TaskStatus[object]) -> None:
        handler = partial(run, door)
        await trio.serve_listeners(handler, [door.listener], handler_nursery=connections, task_status=task_status)

    async def abort_after_grace() -> None:
        try:
            await stopping.wait()
            await trio.sleep(grace_s)
        finally:  # also when all is cancelled at once: see the head of this file
            for connection in [connection for door in doors for connection in door.inside]:
                connection.abort()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort_after_grace)
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                for door in doors:
                    await accepting.start(accept, door, connections)
                task_status.started()
                await stopping.wait()
                accepting.cancel_scope.cancel()
            await context.terminated.set()  # closes idle connections
        nursery.cancel_scope.cancel()


def _config() -> hypercorn.config.Config:
    config = hypercorn.config.Config()
    config.accesslog = config.errorlog = None
    config.include_server_header = False
    return config


def _closing_response(status: int, words: str, code: str) -> bytes:
    """A whole answer that is the connection's last."""
    content = bytes(json_response(error_object(words, status, code, None), status).body)
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
