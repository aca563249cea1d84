"""Both kinds of answers, each watched: a client that leaves ends the work at once."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias, TypeVar

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshllm.api.openai import error_object
from meshllm.errors import MeshLLMError

T = TypeVar("T")
Emit: TypeAlias = Callable[[object], Awaitable[None]]  # sends one event

BROKEN: Final = error_object("the daemon failed on this request: see its log", 500, "internal_error", None)


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


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
    return Response(_encode(value), status, media_type="application/json")


def error_response(error: MeshLLMError) -> Response:
    """OpenAI's error object with the error's status."""
    return json_response(_error_object(error), error.http_status)


class EventStream(Response):
    """Server-sent events: `data:` lines with JSON, then [DONE]. An error ends the stream as an error object.

    `produce` is called with what sends one event: a callback, since an async generator that is left in the middle of a
    nursery cannot be closed from outside.
    """

    def __init__(self, produce: Callable[[Emit], Awaitable[None]]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._produce = produce
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what is a fault of ours, after it was told to the client."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        async def emit(event: object) -> None:
            await write(_encode(event))

        async def end(last: bytes) -> None:
            await write(last)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def work() -> None:
            try:
                await self._produce(emit)
            except MeshLLMError as error:
                await end(_encode(_error_object(error)))
            except Exception:
                await end(_encode(BROKEN))
                raise
            else:
                await end(b"[DONE]")

        try:
            await unless_gone(receive, work)
        except ClientGoneError:
            return


def _error_object(error: MeshLLMError) -> dict[str, object]:
    return error_object(str(error), error.http_status, error.code, error.param)


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
