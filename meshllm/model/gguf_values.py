"""Values in a GGUF file and the cursor that reads them: it cannot leave the file, and believes no length.

Integers are little-endian; a text is its length (u64) and its bytes in UTF-8; an array is the type of its elements,
their number and the elements. Arrays are measured, not decoded. Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from meshllm.errors import ModelFileError

GET_AGAIN: Final = 'the file is damaged or incomplete: get it again, for example with "meshllm pull"'
MAX_MESSAGE_CHARS: Final = 500
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


def refusal(name: str, what: str) -> ModelFileError:
    """The error about a file, in one line: names in it come from the file and may hold anything, at any length."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in what)
    if len(line) > MAX_MESSAGE_CHARS:
        line = f"{line[: MAX_MESSAGE_CHARS // 2]} … {line[-MAX_MESSAGE_CHARS // 2 :]}"
    return ModelFileError(f"{name}: {line}")


class ValueType(IntEnum):
    """Type of a metadata value, as numbered in the file."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


_SCALARS: Final[dict[ValueType, struct.Struct]] = {
    ValueType.U8: struct.Struct("<B"),
    ValueType.I8: struct.Struct("<b"),
    ValueType.U16: struct.Struct("<H"),
    ValueType.I16: struct.Struct("<h"),
    ValueType.U32: _U32,
    ValueType.I32: struct.Struct("<i"),
    ValueType.F32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<?"),
    ValueType.U64: _U64,
    ValueType.I64: struct.Struct("<q"),
    ValueType.F64: struct.Struct("<d"),
}


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata, measured but not decoded. data: from the first element to the last one's end."""

    element: ValueType
    count: int
    data: memoryview

    def byte_strings(self) -> list[bytes]:
        """Elements of an array of strings, as stored."""
        if self.element is not ValueType.STRING:
            raise TypeError(f"an array of {self.element.name}, not of strings")
        data = self.data.tobytes()
        unpack, found, position = _U64.unpack_from, [], 0
        for _ in repeat(None, self.count):
            start = position + 8
            position = start + unpack(data, position)[0]
            found.append(data[start:position])
        return found

    def numbers(self) -> npt.NDArray[np.generic]:
        """Elements of an array of numbers, [count], a view of the file in the file's own type."""
        if self.element is ValueType.STRING:
            raise TypeError("an array of strings, not of numbers")
        return np.frombuffer(self.data, dtype=_SCALARS[self.element].format, count=self.count)


MetadataValue: TypeAlias = int | float | bool | str | GgufArray


class Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data = data.cast("B") if data.format != "B" else data
        self.name = name
        self.position = 0

    def refuse(self, what: str) -> NoReturn:
        raise refusal(self.name, what)

    def need(self, n_bytes: int, what: str) -> None:
        left = len(self.data) - self.position
        if n_bytes > left:
            self.refuse(f"{what} at byte {self.position} needs {n_bytes} bytes, the file has {left} left: {GET_AGAIN}")

    def scalar(self, kind: ValueType, what: str) -> int | float | bool:
        layout = _SCALARS[kind]
        self.need(layout.size, what)
        value: int | float | bool = layout.unpack_from(self.data, self.position)[0]
        self.position += layout.size
        return value

    def u32(self, what: str) -> int:
        return int(self.scalar(ValueType.U32, what))

    def u64(self, what: str) -> int:
        return int(self.scalar(ValueType.U64, what))

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(f"the length of {what}")
        self.need(length, what)
        if limit is not None and length > limit:
            self.refuse(
                f"{what} at byte {self.position} is {length} bytes long, at most {limit} are allowed: {GET_AGAIN}"
            )
        raw = self.data[self.position : self.position + length].tobytes()
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.refuse(f"{what} before byte {self.position} is not UTF-8 ({error.reason}): {GET_AGAIN}")

    def value_type(self, what: str) -> ValueType:
        number = self.u32(f"the type of {what}")
        if number not in ValueType.__members__.values():
            self.refuse(f"{what} before byte {self.position} has unknown type {number}, known are 0..12: {GET_AGAIN}")
        return ValueType(number)

    def array(self, what: str) -> GgufArray:
        element = self.value_type(f"the elements of {what}")
        count = self.u64(f"the length of {what}")
        if element is ValueType.ARRAY:
            self.refuse(f"{what} at byte {self.position} is an array of arrays, which no model has: {GET_AGAIN}")
        size = 8 if element is ValueType.STRING else _SCALARS[element].size
        self.need(count * size, f"{what} ({count} elements)")
        start = self.position
        if element is ValueType.STRING:
            self._skip_strings(count, what)
        else:
            self.position += count * size
        return GgufArray(element, count, self.data[start : self.position])

    def _skip_strings(self, count: int, what: str) -> None:
        data, unpack, position = self.data, _U64.unpack_from, self.position
        try:  # the check of each length is unpack_from's own: a position beyond the end raises
            for _ in repeat(None, count):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):
            position = len(data) + 1
        if position > len(data):
            self.refuse(f"a string of {what} after byte {self.position} reaches beyond the file's end: {GET_AGAIN}")
        self.position = position
