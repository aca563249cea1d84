"""GGUF files: header, metadata and the index of tensors, read from a memory map.

Rule: nothing in the file is trusted. Every length, count and offset is compared with what is left of the file before it
is used, nothing is allocated in proportion to a number that the file merely claims, and arrays (a vocabulary has some
100,000 strings) are only measured here and decoded when asked for. What is refused is refused in one line that names
the file, the place, what was found and what to do. Pure.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise, repeat
from types import MappingProxyType
from typing import Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from meshllm.errors import ModelFileError
from meshllm.model.formats import Format

VERSIONS: Final = (2, 3)  # they differ in nothing that a little-endian file shows
DEFAULT_ALIGNMENT: Final = 32
ALIGNMENT_BOUNDS: Final = (8, 65536)
# One dict entry takes some 300 bytes where the file needs 14; with these the index of any file stays under 64 MiB.
MAX_KEYS: Final = 65536
MAX_TENSORS: Final = 65536
MAX_KEY_BYTES: Final = 65535
MAX_TENSOR_NAME_BYTES: Final = 255
MAX_DIMENSIONS: Final = 4
MAX_TENSOR_VALUES: Final = 2**48

_GET_AGAIN: Final = 'the file is damaged or incomplete: get it again, for example with "meshllm pull"'
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


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


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor: `rows` rows of `cols` values, whole blocks of `format`; offset in bytes from the file's start."""

    name: str
    format: Format
    shape: tuple[int, int]  # rows, cols; further dimensions are folded into rows, a vector has one row
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a file says about itself. The find_* methods return None where a key is absent and refuse a wrong type."""

    name: str
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorInfo]

    def refuse(self, what: str) -> NoReturn:
        """Raises ModelFileError about this file."""
        raise ModelFileError(f"{self.name}: {what}")

    def find_str(self, key: str) -> str | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            self._wrong_type(key, value, "a string")
        return value

    def find_int(self, key: str) -> int | None:
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            self._wrong_type(key, value, "an integer")
        return value

    def find_float(self, key: str) -> float | None:
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            self._wrong_type(key, value, "a number")
        return value

    def find_bool(self, key: str) -> bool | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, bool):
            self._wrong_type(key, value, "true or false")
        return value

    def find_strings(self, key: str) -> list[str] | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, GgufArray) or value.element is not ValueType.STRING:
            self._wrong_type(key, value, "an array of strings")
        try:
            return [element.decode() for element in value.byte_strings()]
        except UnicodeDecodeError as error:
            self.refuse(f"{key} holds bytes that are not UTF-8 ({error.reason}): {_GET_AGAIN}")

    def find_numbers(self, key: str) -> npt.NDArray[np.generic] | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, GgufArray) or value.element is ValueType.STRING:
            self._wrong_type(key, value, "an array of numbers")
        return value.numbers()

    def _wrong_type(self, key: str, value: MetadataValue, wanted: str) -> NoReturn:
        found = f"an array of {value.element.name}" if isinstance(value, GgufArray) else type(value).__name__
        self.refuse(f"{key} is {found}, expected {wanted}: the file was written wrongly, convert the model again")


def open_gguf(data: memoryview, name: str) -> GgufFile:
    """Reads header, metadata and tensor index of a whole file in `data` (bytes); `name` is for error messages.

    The result keeps views of `data`. Raises ModelFileError. 128k tokens with 280k merges take some 40 ms.
    """
    reader = _Reader(data, name)
    n_tensors, n_keys = _read_header(reader)
    metadata = _read_metadata(reader, n_keys)
    if (metadata.get("split.count") or 1) != 1:  # before its tensors are looked for: they may be in another shard
        reader.refuse(f"shard of a split model: {_describe_split(metadata)}; merge the shards into one file first")
    alignment = _alignment(reader, metadata)
    unplaced = [_read_tensor(reader, i) for i in range(n_tensors)]
    start = -(-reader.position // alignment) * alignment
    tensors = _place_tensors(reader, unplaced, start, alignment)
    return GgufFile(name, MappingProxyType(metadata), MappingProxyType(tensors))


class _Reader:
    """A position in the file that cannot leave it."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data = data.cast("B") if data.format != "B" else data
        self.name = name
        self.position = 0

    def refuse(self, what: str) -> NoReturn:
        raise ModelFileError(f"{self.name}: {what}")

    def need(self, n_bytes: int, what: str) -> None:
        left = len(self.data) - self.position
        if n_bytes > left:
            self.refuse(f"{what} at byte {self.position} needs {n_bytes} bytes, the file has {left} left: {_GET_AGAIN}")

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
                f"{what} at byte {self.position} is {length} bytes long, at most {limit} are allowed: {_GET_AGAIN}"
            )
        raw = self.data[self.position : self.position + length].tobytes()
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.refuse(f"{what} before byte {self.position} is not UTF-8 ({error.reason}): {_GET_AGAIN}")

    def value_type(self, what: str) -> ValueType:
        number = self.u32(f"the type of {what}")
        if number not in ValueType.__members__.values():
            self.refuse(f"{what} before byte {self.position} has unknown type {number}, known are 0..12: {_GET_AGAIN}")
        return ValueType(number)

    def array(self, what: str) -> GgufArray:
        element = self.value_type(f"the elements of {what}")
        count = self.u64(f"the length of {what}")
        if element is ValueType.ARRAY:
            self.refuse(f"{what} at byte {self.position} is an array of arrays, which no model has: {_GET_AGAIN}")
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
            self.refuse(f"a string of {what} after byte {self.position} reaches beyond the file's end: {_GET_AGAIN}")
        self.position = position


def _read_header(reader: _Reader) -> tuple[int, int]:
    """Number of tensors and of metadata keys."""
    magic = reader.data[:4].tobytes()
    if magic != b"GGUF":
        reader.refuse(_describe_foreign(reader.data[:64].tobytes()))
    reader.position = 4
    version = reader.u32("the version")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            reader.refuse(
                "big-endian GGUF: this program reads little-endian files; convert the model again for this machine"
            )
        reader.refuse(f"GGUF version {version}, expected 2 or 3: convert the model again with a current converter")
    n_tensors = reader.u64("the number of tensors")
    n_keys = reader.u64("the number of metadata keys")
    for count, limit, what in ((n_tensors, MAX_TENSORS, "tensors"), (n_keys, MAX_KEYS, "metadata keys")):
        if count > limit:
            reader.refuse(f"the header claims {count} {what}, at most {limit} are allowed: {_GET_AGAIN}")
    return n_tensors, n_keys


def _describe_foreign(head: bytes) -> str:
    if not head:
        return 'the file is empty: get it again, for example with "meshllm pull"'
    if head.lstrip()[:1] == b"<":
        return "an HTML or XML page, not a model: the download address leads to a web page; get the .gguf file itself"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "a GGML file of before GGUF: convert the model to GGUF with a current converter"
    if b'{"' in head[8:12]:
        return "a safetensors file, not GGUF: convert the model to GGUF first"
    return f"not a GGUF file: it starts with {head[:4].hex(' ')}, expected 47 47 55 46 (GGUF)"


def _read_metadata(reader: _Reader, n_keys: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for i in range(n_keys):
        place = reader.position
        key = reader.string(f"metadata key {i}", MAX_KEY_BYTES)
        if not key:
            reader.refuse(f"metadata key {i} at byte {place} is empty: {_GET_AGAIN}")
        if key in metadata:
            reader.refuse(
                f"metadata key {key} at byte {place} is there twice: the file was written wrongly, convert it again"
            )
        what = f"the value of {key}"
        kind = reader.value_type(what)
        if kind is ValueType.STRING:
            metadata[key] = reader.string(what)
        elif kind is ValueType.ARRAY:
            metadata[key] = reader.array(what)
        else:
            if key == "general.alignment" and kind is not ValueType.U32:
                reader.refuse(f"general.alignment is of type {kind.name}, expected U32: convert the model again")
            metadata[key] = reader.scalar(kind, what)
    if isinstance(metadata.get("general.alignment"), str | GgufArray):
        reader.refuse("general.alignment is no number, expected a U32: convert the model again")
    return metadata


def _describe_split(metadata: Mapping[str, MetadataValue]) -> str:
    number, count = metadata.get("split.no"), metadata.get("split.count")
    if not isinstance(number, int) or not isinstance(count, int):
        return "split.no or split.count is no integer"
    return f"shard {number + 1} of {count}"


def _alignment(reader: _Reader, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    low, high = ALIGNMENT_BOUNDS
    if not isinstance(alignment, int) or not low <= alignment <= high or alignment & (alignment - 1):
        reader.refuse(
            f"general.alignment is {alignment}, expected a power of two from {low} to {high}: convert it again"
        )
    return alignment


def _read_tensor(reader: _Reader, i: int) -> TensorInfo:
    """An index entry; its offset is still relative to the start of the data."""
    name = reader.string(f"the name of tensor {i}", MAX_TENSOR_NAME_BYTES)
    if not name:
        reader.refuse(f"tensor {i} before byte {reader.position} has no name: {_GET_AGAIN}")
    n_dimensions = reader.u32(f"the number of dimensions of tensor {name}")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        reader.refuse(f"tensor {name} has {n_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}: {_GET_AGAIN}")
    dimensions = [reader.u64(f"the dimensions of tensor {name}") for _ in range(n_dimensions)]
    number = reader.u32(f"the format of tensor {name}")
    offset = reader.u64(f"the offset of tensor {name}")
    if min(dimensions) < 1 or max(dimensions) > MAX_TENSOR_VALUES or math.prod(dimensions) > MAX_TENSOR_VALUES:
        reader.refuse(
            f"tensor {name} has dimensions {dimensions}, expected each at least 1, 2^48 values in all: {_GET_AGAIN}"
        )
    if number not in Format.__members__.values():
        reader.refuse(
            f"tensor {name} has format {number}, which this version does not know: convert it to another format"
        )
    block = Format(number)
    cols, rows = dimensions[0], math.prod(dimensions[1:])
    if cols % block.block_values:
        reader.refuse(
            f"tensor {name} has rows of {cols} values, no multiple of {block.name}'s {block.block_values}: {_GET_AGAIN}"
        )
    return TensorInfo(name, block, (rows, cols), offset, rows * block.row_bytes(cols))


def _place_tensors(reader: _Reader, unplaced: list[TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
    """Absolute offsets, checked: aligned, inside the file, no two over one another."""
    tensors: dict[str, TensorInfo] = {}
    for tensor in unplaced:
        if tensor.name in tensors:
            reader.refuse(f"tensor {tensor.name} is there twice: the file was written wrongly, convert the model again")
        if tensor.offset % alignment:
            reader.refuse(
                f"tensor {tensor.name} is at offset {tensor.offset}, no multiple of {alignment}: {_GET_AGAIN}"
            )
        tensors[tensor.name] = TensorInfo(tensor.name, tensor.format, tensor.shape, start + tensor.offset, tensor.size)
    by_place = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    needed = max((tensor.offset + tensor.size for tensor in by_place), default=0)
    if needed > len(reader.data):
        first = next(tensor for tensor in by_place if tensor.offset + tensor.size > len(reader.data))
        end, missing = first.offset + first.size, needed - len(reader.data)
        reader.refuse(
            f"tensor {first.name} ends at byte {end}; the file needs {needed} bytes, file has {len(reader.data)}"
            f" ({missing} are missing): {_GET_AGAIN}"
        )
    for before, after in pairwise(by_place):
        if before.offset + before.size > after.offset:
            reader.refuse(f"tensors {before.name} and {after.name} overlap at byte {after.offset}: {_GET_AGAIN}")
    return tensors
