"""Bytes of a request's body -> a checked value, or an InvalidRequestError that names the field.

Python's own JSON parser reads it, since it tells a NaN or an infinity from bad syntax and knows the field; msgspec
then checks types and ranges strictly: no number in quotes, no boolean for a number.
"""

from __future__ import annotations

import json
import math
import re
from typing import Final, NoReturn, TypeVar

import msgspec

from meshllm.errors import InvalidRequestError

T = TypeVar("T")
_PLACE: Final = re.compile(r"(?P<words>.*?)(?: - at `(?P<path>[^`]*)`)?", re.DOTALL)


def decode_body(body: bytes, kind: type[T]) -> T:
    """The value. Raises InvalidRequestError with `param` where the fault is a field's."""
    try:
        parsed = json.loads(body, parse_constant=float, object_pairs_hook=_finite_object)
    except InvalidRequestError:
        raise
    except RecursionError:
        raise InvalidRequestError("the body is nested too deep: a request needs a few levels") from None
    except ValueError as error:  # syntax, not UTF-8, or a number of thousands of digits
        raise InvalidRequestError(f"the body is not valid JSON: {str(error).splitlines()[0]}") from None
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
    param = path.removeprefix("$").removeprefix(".") or None
    text = match["words"] if match else words
    if param is None and (missing := re.search(r"missing required field `([^`]+)`", text)):
        param = missing[1]
    raise InvalidRequestError(f"{param}: {text}" if param else text, param)


def _json_name(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
