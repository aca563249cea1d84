"""The only file that sees the C library. It checks types, lengths and states, keeps what C points at alive, and turns
a status into an error; above it there are numpy arrays and exceptions only.

A `Kernels` (an instruction set and its threads) runs one thing at a time: one caller at once may be inside `run`,
`matmul` or `measure_bandwidth` of all programs that share it. Packing, on none of its threads, may go on beside them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from meshllm._native import ffi, lib
from meshllm.errors import ConfigError, KernelError
from meshllm.kernels.memory import ALIGNMENT, Bytes

BLOCK: Final[int] = lib.MESHLLM_BLOCK
NONE: Final[int] = lib.MESHLLM_NONE

Float32: TypeAlias = npt.NDArray[np.float32]
BufferLike: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
Best: TypeAlias = tuple[int, float]  # an index and its value


class Precision(IntEnum):
    """enum meshllm_precision: how partial sums travel."""

    F32 = 0
    F16 = 1
    Q8_0 = 2


class RunStatus(IntEnum):
    """Where a program stands after `run`."""

    FINISHED = 0
    EXCHANGE = 1
    STOPPED = 2


class NativeWeight:
    """A weight as the interpreter takes it. data is kept alive; its bytes must not change. kind, format: the header's
    numbers.
    """

    __slots__ = ("data", "format", "kind", "n_cols", "n_rows")

    def __init__(self, kind: int, format_: int, n_rows: int, n_cols: int, data: BufferLike) -> None:
        self.kind = kind
        self.format = format_
        self.n_rows = n_rows
        self.n_cols = n_cols
        self.data = data

    def write_to(self, struct: Any) -> Any:
        """Fills a struct meshllm_weight; returns the cdata that holds the bytes."""
        held = ffi.from_buffer(self.data)
        struct.kind, struct.format, struct.n_rows, struct.n_cols = self.kind, self.format, self.n_rows, self.n_cols
        struct.size, struct.data = len(held), held
        return held


def list_isas() -> list[tuple[str, bool]]:
    """Instruction sets compiled in, best first, and whether each runs here."""
    isas: list[tuple[str, bool]] = []
    while (name := lib.meshllm_isa_name(len(isas))) != ffi.NULL:
        isas.append((ffi.string(name).decode(), bool(lib.meshllm_isa_runs(len(isas)))))
    return isas


def guard_map(owner: object, mapped: BufferLike) -> None:
    """Reads of this map that fail, since its file was cut short or its disk is broken, give zeros and are counted by
    `lost_maps` from now on, for as long as `owner` lives; without it they end the process. Raises KernelError.
    """
    view = ffi.from_buffer(mapped)
    _check(lib.meshllm_guard_map(view, len(view)), "guarding the map of a file")
    weakref.finalize(owner, lib.meshllm_unguard_map, ffi.cast("void *", view))


def lost_maps() -> int:
    """How often a guarded map has lost pages in this process."""
    return int(lib.meshllm_lost_maps())


class Kernels:
    """Kernels of one instruction set with their threads. isa: "" for the best that runs here.

    n_threads counts the calling thread. Raises ConfigError where that instruction set is unknown or cannot run here.
    """

    def __init__(self, isa: str = "", n_threads: int = 1) -> None:
        if n_threads < 1:
            raise KernelError(f"{n_threads} threads asked for: at least one is needed")
        out = ffi.new("struct meshllm_engine **")
        status = lib.meshllm_engine_new(out, isa.encode(), n_threads)
        if status == lib.MESHLLM_NO_ISA:
            running = ", ".join(name for name, runs in list_isas() if runs)
            raise ConfigError(f"--isa: instruction set {isa!r} cannot run here; these can: {running}")
        _check(status, f"making {n_threads} threads")
        self._engine = ffi.gc(out[0], lib.meshllm_engine_free)

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""
        return str(ffi.string(lib.meshllm_engine_isa(self._engine)).decode())

    @property
    def n_threads(self) -> int:
        """Threads that kernels use, the caller's included."""
        return int(lib.meshllm_engine_threads(self._engine))

    def packed_size(self, format_: int, n_rows: int, n_cols: int) -> int:
        """Bytes of a packed matrix. Raises KernelError for a format without kernels or columns that cut a block."""
        size = int(lib.meshllm_packed_size(self._engine, format_, n_rows, n_cols))
        if not size:
            raise KernelError(f"a matrix of {n_rows} x {n_cols} in format {format_} cannot be packed")
        return size

    def pack(
        self, out: Bytes, format_: int, rows: tuple[int, int], cols: tuple[int, int], file_cols: int, tensor: BufferLike
    ) -> None:
        """Packs rows and columns (half-open ranges) of a file's tensor into out, of packed_size bytes, 64-byte
        aligned.
        """
        n_rows, n_cols = rows[1] - rows[0], cols[1] - cols[0]
        if len(out) != self.packed_size(format_, n_rows, n_cols) or out.ctypes.data % ALIGNMENT:
            raise KernelError(f"{len(out)} bytes at {out.ctypes.data:#x} are no place for a packed matrix")
        source = ffi.from_buffer(tensor)
        target = ffi.from_buffer(out, require_writable=True)
        status = lib.meshllm_pack(
            self._engine, target, format_, rows[0], n_rows, cols[0], n_cols, file_cols, len(source), source
        )
        _check(status, f"packing rows {rows} and columns {cols} of a tensor of {len(source)} bytes")

    def matmul(self, weight: NativeWeight, x: Float32) -> Float32:
        """[n_tokens, n_rows] = x [n_tokens, n_cols] times a packed weight; for tests and measurements."""
        if x.ndim != 2 or x.shape[1] != weight.n_cols:
            raise KernelError(f"input of shape {x.shape} for a weight of {weight.n_cols} columns")
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((len(x), weight.n_rows), np.float32)
        struct = ffi.new("struct meshllm_weight *")
        held = weight.write_to(struct)
        _check(lib.meshllm_matmul(self._engine, _f32(out), struct, len(x), _f32(x)), "a product")
        del held
        return out

    def measure_bandwidth(self, data: Bytes, min_seconds: float) -> float:
        """Bytes a second that all threads read from data (a multiple of 64 bytes), as the kernels read weights."""
        view = ffi.from_buffer(data)
        return float(lib.meshllm_measure_bandwidth(self._engine, len(view) & ~63, view, min_seconds))


def dequantize_row(format_: int, row: BufferLike, n_cols: int) -> Float32:
    """The f32 values of one stored row. Raises KernelError for a format without kernels."""
    out = np.empty(n_cols, np.float32)
    _check(lib.meshllm_dequantize_row(format_, _f32(out), n_cols, ffi.from_buffer(row)), f"a row of format {format_}")
    return out


class NativeProgram:
    """A validated program with its buffers and cache. Raises KernelError that names the op if the interpreter refuses
    it.

    ops: encoded by model.opcodes.encode_ops; buffers: (kind, width); cache: the six numbers of struct
    meshllm_cache_shape. Arrays handed out keep the memory alive after close.
    """

    def __init__(
        self,
        kernels: Kernels,
        ops: bytes,
        buffers: Sequence[tuple[int, int]],
        weights: Sequence[NativeWeight],
        cache: tuple[int, int, int, int, int, int],
        *,
        max_tokens: int,
        precision: Precision,
    ) -> None:
        structs = ffi.new("struct meshllm_weight[]", len(weights))
        self._held = [weight.write_to(struct) for weight, struct in zip(weights, structs, strict=True)]
        self._kernels = kernels
        self._max_tokens = max_tokens
        self._widths = [width for _, width in buffers]
        n_ops, rest = divmod(len(ops), ffi.sizeof("struct meshllm_op"))
        if rest:
            raise KernelError(f"{len(ops)} bytes are no whole number of ops")
        out, fault = ffi.new("struct meshllm_program **"), ffi.new("struct meshllm_fault *")
        status = lib.meshllm_program_new(
            out, kernels._engine, n_ops, ffi.from_buffer("struct meshllm_op[]", ops),
            len(buffers), ffi.new("struct meshllm_buffer[]", list(buffers)), len(weights), structs,
            ffi.new("struct meshllm_cache_shape *", cache), max_tokens, precision, fault,
        )  # fmt: skip
        if status == lib.MESHLLM_BAD_PROGRAM:
            where = "program" if fault.op == NONE else f"op {fault.op}"
            raise KernelError(f"{where} refused: {ffi.string(fault.reason).decode()}")
        _check(status, f"making a program for {max_tokens} tokens a step and a cache of {cache}")
        self._program = ffi.gc(out[0], lib.meshllm_program_free)
        self._size = ffi.new("size_t *")
        self._pointers = ffi.new("void *[]", 0)
        self._wire = self._view_wire().data
        self._partial = self._nothing = self._wire[:0]

    def begin(self, tokens: BufferLike, positions: BufferLike, slots: BufferLike, outputs: BufferLike) -> None:
        """Starts a batch; int32 each. outputs: rows wanted, growing. Raises KernelError for one that does not fit."""
        rows = [ffi.from_buffer("int32_t[]", part) for part in (tokens, positions, slots, outputs)]
        if not len(rows[0]) == len(rows[1]) == len(rows[2]):
            raise KernelError("tokens, positions and slots of different length")
        status = lib.meshllm_program_begin(self._program, len(rows[0]), *rows[:3], len(rows[3]), rows[3])
        _check(status, f"a batch of {len(rows[0])} tokens (at most {self._max_tokens}) with {len(rows[3])} outputs")

    def run(self) -> RunStatus:
        """To the next EXCHANGE, the end, or until stopped; without the GIL."""
        status = lib.meshllm_program_run(self._program)
        if status < 0:
            _check(status, "running a program that waits for partials or has no batch")
        return _RUN_STATUS[status]

    def partial(self) -> memoryview:
        """This rank's encoded partial at an EXCHANGE; empty if it adds nothing. Valid until supply."""
        lib.meshllm_program_partial(self._program, self._size)
        size = self._size[0]
        if size and len(self._partial) != size:
            self._partial = self._wire[:size]
        return self._partial if size else self._nothing

    def partial_size(self) -> int:
        """Bytes of each partial of this exchange."""
        return int(lib.meshllm_program_partial_size(self._program))

    def supply(self, partials: Sequence[BufferLike]) -> None:
        """Adds the partials, each of partial_size bytes, in the order given."""
        held = [ffi.from_buffer(partial) for partial in partials]
        size = lib.meshllm_program_partial_size(self._program)
        for i, part in enumerate(held):
            if len(part) != size:
                raise KernelError(f"partial {i} has {len(part)} bytes, expected {size}")
        if len(self._pointers) != len(held):
            self._pointers = ffi.new("void *[]", len(held))
        self._pointers[0 : len(held)] = held
        _check(lib.meshllm_program_supply(self._program, len(held), self._pointers), "supplying partials unasked")

    def buffer(self, index: int) -> Float32:
        """A view [max_tokens, width] of an f32 buffer."""
        pointer = lib.meshllm_program_buffer(self._program, index)
        if pointer == ffi.NULL:
            raise KernelError(f"buffer {index} is no f32 buffer")
        shape = (self._max_tokens, self._widths[index])
        return np.asarray(_NativeView(self, int(ffi.cast("uintptr_t", pointer)), shape, "<f4"))

    def stop(self) -> None:
        """Makes a running `run` return within one op; from any thread."""
        lib.meshllm_program_stop(self._program)

    def copy_slot(self, to: int, from_: int, n: int) -> None:
        """Copies cache positions [0, n) of a slot to another."""
        _check(lib.meshllm_program_copy_slot(self._program, to, from_, n), f"copying slot {from_} to {to}")

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole KV cache; pages are taken as positions are used."""
        return int(lib.meshllm_program_cache_size(self._program))

    def _view_wire(self) -> Bytes:
        widest = max(self._widths, default=0)
        pointer = lib.meshllm_program_partial(self._program, self._size)
        address = int(ffi.cast("uintptr_t", pointer))
        return np.asarray(_NativeView(self, address, (self._max_tokens * widest * 4,), "|u1"))


class _NativeView:
    """Memory of a program as numpy sees it; the array's base keeps the program alive."""

    def __init__(self, owner: NativeProgram, address: int, shape: tuple[int, ...], type_: str) -> None:
        self._owner = (owner._program, owner._held, owner._kernels)
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": shape, "typestr": type_}


_RUN_STATUS: Final = {
    lib.MESHLLM_OK: RunStatus.FINISHED,
    lib.MESHLLM_EXCHANGE: RunStatus.EXCHANGE,
    lib.MESHLLM_STOPPED: RunStatus.STOPPED,
}


def log_sum_exp(logits: Float32) -> float:
    """log(sum(exp(logits))) of a contiguous vector."""
    return float(lib.meshllm_log_sum_exp(len(logits), _f32(logits)))


def top_k(logits: Float32, k: int) -> tuple[npt.NDArray[np.uint32], Float32]:
    """Indices and values of the k largest, largest first, ties by lower index; fewer if there are not as many."""
    k = min(k, len(logits))
    indices, values = np.empty(k, np.uint32), np.empty(k, np.float32)
    n = lib.meshllm_top_k(k, ffi.from_buffer("uint32_t[]", indices), _f32(values), len(logits), _f32(logits))
    return indices[:n], values[:n]


def gumbel(seed: int, position: int, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Gumbel(0, 1) noise of each (seed, position, id); seed in [0, 2^64)."""
    noise = np.empty(len(ids), np.float64)
    ids = np.ascontiguousarray(ids, np.uint32)
    pointers = ffi.from_buffer("uint32_t[]", ids), ffi.from_buffer("double[]", noise)
    lib.meshllm_gumbel(seed, position, len(ids), *pointers)
    return noise


def gumbel_argmax(seed: int, position: int, first_id: int, temperature: float, logits: Float32) -> Best | None:
    """Index of the largest logits[i] / temperature + noise of (seed, position, first_id + i), and that sum."""
    value = ffi.new("double *")
    index = lib.meshllm_gumbel_argmax(seed, position, first_id, temperature, len(logits), _f32(logits), value)
    return None if index == NONE else (index, value[0])


def _f32(array: Float32) -> Any:
    if array.dtype != np.float32:
        raise KernelError(f"an array of {array.dtype}, expected float32")
    return ffi.from_buffer("float[]", array)


def _check(status: int, what: str) -> None:
    if status == lib.MESHLLM_OK:
        return
    if status == lib.MESHLLM_NO_MEMORY:
        raise KernelError(f"out of memory: {what}; use a smaller context, fewer slots or more devices")
    raise KernelError(f"refused by the kernels: {what}")
