"""GGUF files: header, metadata and the index of tensors, read from a memory map.

Rule: nothing in the file is trusted. Every length, count and offset is compared with what is left of the file before it
is used, nothing is allocated in proportion to a number that the file merely claims, and arrays (a vocabulary has some
100,000 strings) are only measured here and decoded when asked for. What is refused is refused in one line that names
the file, the place, what was found and what to do. Pure. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from meshllm.model.formats import Format
from meshllm.model.gguf_values import GET_AGAIN, Cursor, GgufArray, MetadataValue, ValueType, refusal

VERSIONS: Final = (2, 3)  # they differ in nothing that a little-endian file shows
DEFAULT_ALIGNMENT: Final = 32
ALIGNMENT_BOUNDS: Final = (8, 65536)
# One dict entry takes some 300 bytes where the file needs 14; with these the index of any file stays under 64 MiB.
MAX_KEYS: Final = 65536
MAX_TENSORS: Final = 65536
MAX_KEY_BYTES, MAX_TENSOR_NAME_BYTES = 65535, 255
MAX_DIMENSIONS: Final = 4
MAX_TENSOR_VALUES: Final = 2**48


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
        raise refusal(self.name, what)

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
            self.refuse(f"{key} holds bytes that are not UTF-8 ({error.reason}): {GET_AGAIN}")

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
    cursor = Cursor(data, name)
    n_tensors, n_keys = _read_header(cursor)
    metadata = _read_metadata(cursor, n_keys)
    if (metadata.get("split.count") or 1) != 1:  # before its tensors are looked for: they may be in another shard
        cursor.refuse(f"shard of a split model: {_describe_split(metadata)}; merge the shards into one file first")
    alignment = _alignment(cursor, metadata)
    unplaced = [_read_tensor(cursor, i) for i in range(n_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors = _place_tensors(cursor, unplaced, start, alignment)
    return GgufFile(name, MappingProxyType(metadata), MappingProxyType(tensors))


def _read_header(cursor: Cursor) -> tuple[int, int]:
    """Number of tensors and of metadata keys."""
    magic = cursor.data[:4].tobytes()
    if magic != b"GGUF":
        cursor.refuse(_describe_foreign(cursor.data[:64].tobytes()))
    cursor.position = 4
    version = cursor.u32("the version")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            cursor.refuse(
                "big-endian GGUF: this program reads little-endian files; convert the model again for this machine"
            )
        cursor.refuse(f"GGUF version {version}, expected 2 or 3: convert the model again with a current converter")
    n_tensors = cursor.u64("the number of tensors")
    n_keys = cursor.u64("the number of metadata keys")
    for count, limit, what in ((n_tensors, MAX_TENSORS, "tensors"), (n_keys, MAX_KEYS, "metadata keys")):
        if count > limit:
            cursor.refuse(f"the header claims {count} {what}, at most {limit} are allowed: {GET_AGAIN}")
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


def _read_metadata(cursor: Cursor, n_keys: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for i in range(n_keys):
        place = cursor.position
        key = cursor.string(f"metadata key {i}", MAX_KEY_BYTES)
        if not key:
            cursor.refuse(f"metadata key {i} at byte {place} is empty: {GET_AGAIN}")
        if key in metadata:
            cursor.refuse(
                f"metadata key {key} at byte {place} is there twice: the file was written wrongly, convert it again"
            )
        what = f"the value of {key}"
        kind = cursor.value_type(what)
        if kind is ValueType.STRING:
            metadata[key] = cursor.string(what)
        elif kind is ValueType.ARRAY:
            metadata[key] = cursor.array(what)
        else:
            if key == "general.alignment" and kind is not ValueType.U32:
                cursor.refuse(f"general.alignment is of type {kind.name}, expected U32: convert the model again")
            metadata[key] = cursor.scalar(kind, what)
    if isinstance(metadata.get("general.alignment"), str | GgufArray):
        cursor.refuse("general.alignment is no number, expected a U32: convert the model again")
    return metadata


def _describe_split(metadata: Mapping[str, MetadataValue]) -> str:
    number, count = metadata.get("split.no"), metadata.get("split.count")
    if not isinstance(number, int) or not isinstance(count, int):
        return "split.no or split.count is no integer"
    return f"shard {number + 1} of {count}"


def _alignment(cursor: Cursor, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    low, high = ALIGNMENT_BOUNDS
    if not isinstance(alignment, int) or not low <= alignment <= high or alignment & (alignment - 1):
        cursor.refuse(
            f"general.alignment is {alignment}, expected a power of two from {low} to {high}: convert it again"
        )
    return alignment


def _read_tensor(cursor: Cursor, i: int) -> TensorInfo:
    """An index entry; its offset is still relative to the start of the data."""
    name = cursor.string(f"the name of tensor {i}", MAX_TENSOR_NAME_BYTES)
    if not name:
        cursor.refuse(f"tensor {i} before byte {cursor.position} has no name: {GET_AGAIN}")
    n_dimensions = cursor.u32(f"the number of dimensions of tensor {name}")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        cursor.refuse(f"tensor {name} has {n_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}: {GET_AGAIN}")
    dimensions = [cursor.u64(f"the dimensions of tensor {name}") for _ in range(n_dimensions)]
    number = cursor.u32(f"the format of tensor {name}")
    offset = cursor.u64(f"the offset of tensor {name}")
    if min(dimensions) < 1 or max(dimensions) > MAX_TENSOR_VALUES or math.prod(dimensions) > MAX_TENSOR_VALUES:
        cursor.refuse(
            f"tensor {name} has dimensions {dimensions}, expected each at least 1, 2^48 values in all: {GET_AGAIN}"
        )
    if number not in Format.__members__.values():
        cursor.refuse(
            f"tensor {name} has format {number}, which this version does not know: convert it to another format"
        )
    block = Format(number)
    cols, rows = dimensions[0], math.prod(dimensions[1:])
    if cols % block.block_values:
        cursor.refuse(
            f"tensor {name} has rows of {cols} values, no multiple of {block.name}'s {block.block_values}: {GET_AGAIN}"
        )
    return TensorInfo(name, block, (rows, cols), offset, rows * block.row_bytes(cols))


def _place_tensors(cursor: Cursor, unplaced: list[TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
    """Absolute offsets, checked: aligned, inside the file, no two over one another."""
    tensors: dict[str, TensorInfo] = {}
    for tensor in unplaced:
        if tensor.name in tensors:
            cursor.refuse(f"tensor {tensor.name} is there twice: the file was written wrongly, convert the model again")
        if tensor.offset % alignment:
            cursor.refuse(f"tensor {tensor.name} is at offset {tensor.offset}, no multiple of {alignment}: {GET_AGAIN}")
        tensors[tensor.name] = TensorInfo(tensor.name, tensor.format, tensor.shape, start + tensor.offset, tensor.size)
    by_place = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    needed = max((tensor.offset + tensor.size for tensor in by_place), default=0)
    if needed > len(cursor.data):
        first = next(tensor for tensor in by_place if tensor.offset + tensor.size > len(cursor.data))
        end, missing = first.offset + first.size, needed - len(cursor.data)
        cursor.refuse(
            f"tensor {first.name} ends at byte {end}; the file needs {needed} bytes, file has {len(cursor.data)}"
            f" ({missing} are missing): {GET_AGAIN}"
        )
    for before, after in pairwise(by_place):
        if before.offset + before.size > after.offset:
            cursor.refuse(f"tensors {before.name} and {after.name} overlap at byte {after.offset}: {GET_AGAIN}")
    return tensors
