"""Bytes of a request's body -> a checked value, or an error that names the field.

The body is read with a limit of size and time. Python's own JSON parser reads it, since it tells a NaN or an infinity
from bad syntax and knows the field; msgspec then checks types and ranges strictly: no number in quotes, no boolean for
a number.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Final, NoReturn, TypeVar

import msgspec
import trio
from starlette.requests import ClientDisconnect, Request

from meshllm.api.streams import ClientGoneError
from meshllm.errors import InvalidRequestError, MeshLLMError, UnavailableError

MAX_BODY_BYTES: Final = 16 << 20  # a prompt of a million token ids is 8 MB
MAX_DRAINED_BYTES: Final = 64 << 20  # of a body that is refused for its size
MAX_ALL_BYTES: Final = 64 << 20  # of all bodies that are arriving
BODY_TIMEOUT_S: Final = 20.0  # for the whole body

T = TypeVar("T")
_PLACE: Final = re.compile(r"(?P<words>.*?)(?: - at `(?P<path>[^`]*)`)?", re.DOTALL)


class BodyTooLargeError(MeshLLMError):
    """The body is over the limit (HTTP 413)."""

    http_status = 413
    code = "request_too_large"


class SlowBodyError(MeshLLMError):
    """The body did not come in time (HTTP 408)."""

    http_status = 408
    code = "request_timeout"


class EncodedBodyError(MeshLLMError):
    """The body is compressed (HTTP 415): a few bytes could unpack to gigabytes, and no client sends such."""

    http_status = 415
    code = "unsupported_encoding"


async def read_request(request: Request, kind: type[T]) -> T:
    """The checked body. Raises InvalidRequestError, one of the errors above, or ClientGoneError."""
    return decode_body(await read_body(request), kind)


class _Arriving:
    """Bytes that all requests together have sent of bodies which are not whole."""

    def __init__(self) -> None:
        self.n_bytes = 0


_ARRIVING: Final = _Arriving()


async def read_body(request: Request) -> bytes:
    """The whole body. Raises one of the errors above, UnavailableError where too much arrives at once, or
    ClientGoneError.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise EncodedBodyError(f'Content-Encoding "{encoding}" is not taken: send the body as it is')
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        raise InvalidRequestError("the request has both Content-Length and Transfer-Encoding: send one of them")
    too_large = BodyTooLargeError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB, which no request needs")
    announced = _announced_bytes(request)
    if announced > MAX_DRAINED_BYTES or (announced > MAX_BODY_BYTES and "expect" in request.headers):
        raise too_large
    body, n_bytes = bytearray(), 0
    with trio.move_on_after(BODY_TIMEOUT_S):
        try:
            async for chunk in request.stream():
                n_bytes += len(chunk)
                if n_bytes > MAX_DRAINED_BYTES:
                    break
                if n_bytes > MAX_BODY_BYTES:
                    continue
                body += chunk
                _ARRIVING.n_bytes += len(chunk)
                if _ARRIVING.n_bytes > MAX_ALL_BYTES:
                    raise UnavailableError("too many large requests arrive at once: send this one again")
        except ClientDisconnect:
            raise ClientGoneError from None
        finally:
            _ARRIVING.n_bytes -= len(body)
        if n_bytes > MAX_BODY_BYTES:  # told when all of it was read: most clients read no answer before
            raise too_large
        return bytes(body)
    if max(announced, n_bytes) > MAX_BODY_BYTES:
        raise too_large
    raise SlowBodyError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s: send it at once")


def _announced_bytes(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length[:20]) if length.isdecimal() else 0


def decode_body(body: bytes, kind: type[T]) -> T:
    """The value. Raises InvalidRequestError with `param` where the fault is a field's."""
    try:
        parsed = json.loads(body, parse_constant=float, object_pairs_hook=_finite_object)
    except InvalidRequestError:
        raise
    except RecursionError:
        raise InvalidRequestError("the body is nested too deep: a request needs a few levels") from None
    except ValueError as error:  # syntax, not UTF-8, or a number of thousands of digits
        words = str(error).splitlines()[0]
        if "integer string conversion" in words:
            words = f"a number has more than {sys.get_int_max_str_digits()} digits"
        raise InvalidRequestError(f"the body is not valid JSON: {words}") from None
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"the body is a JSON {_json_name(parsed)}, expected an object")
    try:
        return msgspec.convert(parsed, kind, strict=True)
    except msgspec.ValidationError as error:
        _refuse(str(error))
    except RecursionError:
        raise InvalidRequestError("the body is nested too deep: a request needs a few levels") from None


def _finite_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    for key, value in pairs:
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequestError(f"{key} is {value}, expected a finite number", key)
    return dict(pairs)


def _refuse(words: str) -> NoReturn:
    match = _PLACE.fullmatch(words)
    path = (match["path"] if match else None) or ""
    place = path.removeprefix("$").removeprefix(".")
    text = match["words"] if match else words
    if missing := re.search(r"missing required field `([^`]+)`", text):
        place = f"{place}.{missing[1]}" if place else missing[1]
    param = re.sub(r"(\[[^]]*\])+$", "", place)  # of a list, the list: `stop`, not `stop[1]`
    raise InvalidRequestError(f"{place}: {text}" if place else text, param or None)


def _json_name(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
