"""Reading a body with limits, and both kinds of answers, each watched: a client that leaves ends the work at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshllm.api.openai import error_object
from meshllm.errors import MeshLLMError

MAX_BODY_BYTES: Final = 16 << 20  # a prompt of a million token ids is 8 MB
BODY_TIMEOUT_S: Final = 20.0  # for the whole body

T = TypeVar("T")


class BodyTooLargeError(MeshLLMError):
    """The body is over the limit (HTTP 413)."""

    http_status = 413
    code = "request_too_large"


class SlowBodyError(MeshLLMError):
    """The body did not come in time (HTTP 408)."""

    http_status = 408
    code = "request_timeout"


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


async def read_body(request: Request) -> bytes:
    """The whole body. Raises BodyTooLargeError, SlowBodyError or ClientGoneError."""
    too_large = BodyTooLargeError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB, which no request needs")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    with trio.move_on_after(BODY_TIMEOUT_S):
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
        except ClientDisconnect:
            raise ClientGoneError from None
        return bytes(body)
    raise SlowBodyError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s: send it at once")


async def unless_gone(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """The work's result; ClientGoneError, and the work cancelled, if the client leaves first."""
    result: list[T] = []
    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            try:
                result.append(await work())
            except Exception as error:  # a task's border: raised below, outside the nursery's group
                errors.append(error)
            nursery.cancel_scope.cancel()

        nursery.start_soon(run)
        while (await receive())["type"] != "http.disconnect":
            continue
        nursery.cancel_scope.cancel()
    if errors:
        raise errors[0]
    if not result:
        raise ClientGoneError
    return result[0]


def json_response(value: object, status: int = 200) -> Response:
    """JSON as UTF-8; refuses NaN, which is no JSON."""
    content = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(content, status, media_type="application/json")


def error_response(error: MeshLLMError) -> Response:
    """OpenAI's error object with the error's status."""
    return json_response(error_object(str(error), error.http_status, error.code, error.param), error.http_status)


class EventStream(Response):
    """Server-sent events: `data:` lines with JSON, then [DONE]. An error ends the stream as an error object."""

    def __init__(self, events: Callable[[], AsyncIterator[object]]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events = events
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        async def work() -> None:
            last = b"[DONE]"
            try:
                async for event in self._events():
                    await write(_encode(event))
            except MeshLLMError as error:
                last = _encode(error_object(str(error), error.http_status, error.code, error.param))
            await write(last)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_gone(receive, work)
        except ClientGoneError:
            return


def _encode(event: object) -> bytes:
    return json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
