"""One connection: HTTP/1.1 by h11 on one side, an ASGI application on the other.

All is pulled, nothing is queued: the application's own `receive` reads the socket, first the request's body, then on
until the client leaves. So whoever waits for that sees it whatever else the client sent, and a body that nobody takes
waits nowhere. Each wait for the client has a deadline: one that takes nothing for WRITE_TIMEOUT_S is held to have left.

No upgrade is made (WebSocket, HTTP/2): the answer is HTTP/1.1's. HTTP/2 alone is refused.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

import h11
import trio
from starlette.types import ASGIApp, Message, Scope

from meshllm.api.openai import error_object
from meshllm.api.streams import json_response

HEAD_TIMEOUT_S: Final = 10.0  # for a request's head, from its first byte; and for that, on a new connection
KEEP_ALIVE_S: Final = 75.0  # between requests
WRITE_TIMEOUT_S: Final = 30.0  # for a reader to take what was sent: an event, or a whole answer
LINGER_S: Final = 2.0  # for a client to read a last answer, and to stop sending
MAX_HEAD_BYTES: Final = 16 << 10
MAX_AHEAD_BYTES: Final = 64 << 10  # of further requests while one is answered; with more, none of them is
MAX_RECEIVE_BYTES: Final = 64 << 10

_ABSOLUTE: Final = re.compile(rb"(?i)^https?://[^/?]*")  # the form that proxies are sent: RFC 9112, 3.2.2
_FAULTS: Final = {  # h11's hint -> the words
    400: ("the request is no HTTP/1.1: check its first line, its headers and how it frames its body", "bad_request"),
    414: ("the request's head is too long", "uri_too_long"),
    431: ("the request's head is too long: shorten its headers", "headers_too_large"),
    501: ("the request's transfer encoding is not known: send it chunked, or with its length", "not_implemented"),
}


class RefusedError(Exception):
    """What a client is told in place of an answer; it is the connection's last."""

    def __init__(self, status: int, words: str, code: str) -> None:
        super().__init__(words)
        content = bytes(json_response(error_object(words, status, code, None), status).body)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        self.data = head.encode() + content


class Http1:
    """Serves one client, a request after the other."""

    def __init__(self, app: ASGIApp, stream: trio.SocketStream) -> None:
        self.idle_since = math.inf  # on the clock: kept alive, with nothing of a further request
        self._app = app
        self._stream = stream
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._is_new = True
        self._is_last = False  # no further request is taken
        self._left = False  # the client, or its sending half
        self._refusal: RefusedError | None = None  # of the request that is being answered
        self._is_bodiless = False  # its answer
        self._waiting = trio.CancelScope()  # for a head

    async def run(self) -> None:
        """Until the client leaves, falls silent or is refused, or `leave`. The caller closes the stream."""
        try:
            while (request := await self._next_request()) is not None:
                await self._answer(request)
                if not self._begin_next():
                    await linger(self._stream)
                    return
        except RefusedError as refusal:
            await self._write(refusal.data)
            await linger(self._stream)

    def leave(self) -> None:
        """Ends the connection after the answer that runs, at once if none does."""
        self._is_last = True
        self._waiting.cancel()

    async def _next_request(self) -> h11.Request | None:
        """None: there is no further one. Raises RefusedError."""
        if self._is_last:
            return None
        begun = bool(self._http.trailing_data[0])
        now = trio.current_time()
        self.idle_since = math.inf if begun or self._is_new else now
        limit_s = HEAD_TIMEOUT_S if begun or self._is_new else KEEP_ALIVE_S
        with trio.CancelScope(deadline=now + limit_s) as self._waiting:
            while (event := self._next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._read())
                if not begun:
                    begun, self.idle_since = True, math.inf
                    self._waiting.deadline = trio.current_time() + HEAD_TIMEOUT_S
            self._is_new = False
            if isinstance(event, h11.Request) and not event.http_version.startswith(b"1."):  # HTTP/2's preface
                raise RefusedError(505, "only HTTP/1.1 is spoken here", "http_version_not_supported")
            if not isinstance(event, h11.Request):
                return None
            self._is_last |= {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}
            return event
        self.idle_since = math.inf
        if begun and not self._is_last:
            words = f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s: send it at once"
            raise RefusedError(408, words, "request_timeout")
        return None

    async def _answer(self, request: h11.Request) -> None:
        """Raises RefusedError if nothing was sent."""
        self._refusal, self._is_bodiless = None, request.method == b"HEAD"
        await self._app(self._scope(request), self._receive, self._send)
        if self._http.our_state is h11.SEND_RESPONSE:
            raise self._refusal or RefusedError(500, "the daemon failed on this request: see its log", "internal_error")

    def _begin_next(self) -> bool:
        if self._left or self._is_last or not self._http.our_state is self._http.their_state is h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def _scope(self, request: h11.Request) -> Scope:
        path, _, query = _ABSOLUTE.sub(b"", request.target).partition(b"?")
        server = self._stream.socket.getsockname()
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": request.http_version.decode(),
            "method": request.method.decode(), "scheme": "http", "path": unquote(path.decode()), "raw_path": path,
            "query_string": query, "root_path": "", "headers": list(request.headers), "client": None,
            "server": server[:2] if isinstance(server, tuple) else None,
        }  # fmt: skip

    async def _receive(self) -> Message:
        """ASGI's: a part of the body; after it nothing, until the client leaves."""
        try:
            while self._http.their_state is h11.SEND_BODY:
                event = self._next_event()
                if isinstance(event, h11.Data):
                    return {"type": "http.request", "body": bytes(event.data), "more_body": True}
                if isinstance(event, h11.EndOfMessage):
                    return {"type": "http.request", "body": b"", "more_body": False}
                if self._http.they_are_waiting_for_100_continue:
                    await self._send_event(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
                self._http.receive_data(await self._read())
        except RefusedError as refusal:
            self._refusal = refusal
        while not (self._left or self._refusal):
            data = await self._read()
            if len(self._http.trailing_data[0]) + len(data) > MAX_AHEAD_BYTES:
                self._is_last = True
            elif data:
                self._http.receive_data(data)
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """ASGI's; nothing in answer to a body that is refused."""
        if self._refusal is not None and self._http.our_state is h11.SEND_RESPONSE:
            return
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"date", formatdate(usegmt=True).encode())]
            if self._is_body_left() or self._is_last:
                headers.append((b"connection", b"close"))
            await self._send_event(h11.Response(status_code=message["status"], headers=headers))
            return
        if message["body"] and not self._is_bodiless:
            await self._send_event(h11.Data(data=message["body"]))
        if not message.get("more_body", False):
            await self._send_event(h11.EndOfMessage())

    def _is_body_left(self) -> bool:
        """Whether a part of the body has not come yet; what came is let go, since the answer begins without it."""
        with suppress(RefusedError):
            while self._http.their_state is h11.SEND_BODY and self._next_event() is not h11.NEED_DATA:
                continue
        return self._http.their_state in (h11.SEND_BODY, h11.ERROR)

    def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """h11's. Raises RefusedError."""
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            if self._left:
                raise RefusedError(400, "the request ended early: send all of it", "incomplete_request") from None
            status = error.error_status_hint if error.error_status_hint in _FAULTS else 400
            raise RefusedError(status, *_FAULTS[status]) from None

    async def _read(self) -> bytes:
        """Nothing: the client has left, or has said that it sends no more, which is taken for the same."""
        data = b""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            data = bytes(await self._stream.receive_some(MAX_RECEIVE_BYTES))
        self._left = not data
        return data

    async def _send_event(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            await self._write(data)

    async def _write(self, data: bytes) -> None:
        with trio.move_on_after(WRITE_TIMEOUT_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._stream.send_all(data)
            return
        self._left = True
        await trio.aclose_forcefully(self._stream)  # ends a read that waits


async def linger(stream: trio.SocketStream) -> None:
    """Closes the sending half, and lets the client read and close: at once, what it still sends would reset both."""
    with trio.move_on_after(LINGER_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_eof()
        while await stream.receive_some(MAX_RECEIVE_BYTES):
            continue
