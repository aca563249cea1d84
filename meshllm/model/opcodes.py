"""What a program is: ops on buffers, weights and a cache; printed as text and encoded as the C array that the
interpreter runs.

A program belongs to one slice of one model. It names the weights it needs (tensor and cut) without holding them, so it
can be made, printed and compared where no weights are. What each op computes stands beside `enum meshllm_opcode` in
native/meshllm.h, whose numbers these are (a test compares them). Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Literal, TypeAlias

from meshllm.model.formats import Format
from meshllm.model.slicing import Range

NONE: Final = 0xFFFFFFFF  # MESHLLM_NONE: no operand
BLOCK: Final = 32  # MESHLLM_BLOCK: values of a block of quantized activations

ExchangeKind: TypeAlias = Literal["attention", "ffn"]


class Opcode(IntEnum):
    """enum meshllm_opcode."""

    EMBED = 0
    RMSNORM = 1
    QUANTIZE = 2
    MATMUL = 3
    BIAS = 4
    ROPE = 5
    KV_APPEND = 6
    ATTENTION = 7
    GATE = 8
    ADD = 9
    SCALE = 10
    EXCHANGE = 11
    SELECT = 12


class BufferKind(IntEnum):
    """enum meshllm_buffer_kind: f32 [rows][width], or int8 blocks of 32 with a scale each."""

    F32 = 0
    Q8 = 1


class WeightKind(IntEnum):
    """enum meshllm_weight_kind."""

    PACKED = 0
    TABLE = 1
    VECTOR = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of activations, one a token of the batch."""

    name: str
    kind: BufferKind
    width: int


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """A weight to be had before the program can run.

    tensor: its name in the file, None if `values` are the weight. rows, cols: the cut. values: a vector known without
    the file; if a tensor is named too, the weight is values / tensor. format: of the tensor in the file.
    """

    kind: WeightKind
    tensor: str | None
    format: Format
    rows: Range
    cols: Range
    values: tuple[float, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        if self.tensor is None:
            return f"{len(self.values)} values"
        divided = f"{len(self.values)} values / " if self.values else ""
        cut = (
            ""
            if self.kind is WeightKind.VECTOR
            else f"[{self.rows.start}:{self.rows.stop}, {self.cols.start}:{self.cols.stop}]"
        )
        return f"{divided}{self.tensor}{cut} {self.format.name}"


@dataclass(frozen=True, slots=True)
class Op:
    """struct meshllm_op: operands are indices of buffers and weights, None where the op has none."""

    opcode: Opcode
    out: int | None = None
    in_: int | None = None
    in2: int | None = None
    weight: int | None = None
    a: int = 0
    b: int = 0
    c: int = 0
    f0: float = 0.0
    f1: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What each position of a slot takes in the KV cache of this rank; f16. No layers: no cache."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    group: int  # query heads that share a KV head


@dataclass(frozen=True, slots=True)
class Program:
    """Ops of one rank for one step.

    exchanges: what is added at each EXCHANGE, in order; () on one rank. residual: the buffer that is the same on all
    ranks. logits: the buffer that holds logits of `vocab` after the end, one row an output; None if the slice has no
    vocabulary.
    """

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    weights: tuple[WeightRequest, ...]
    cache: CacheShape
    exchanges: tuple[ExchangeKind, ...]
    residual: int
    logits: int | None
    vocab: Range

    def disassemble(self) -> str:
        """The program as text: buffers, weights, then one op a line."""
        lines = [f"buffer {b.name}: {b.kind.name.lower()}[{b.width}]" for b in self.buffers]
        lines += [f"weight {i}: {w}" for i, w in enumerate(self.weights)]
        c = self.cache
        lines.append(f"cache: {c.n_layers} layers, {c.n_kv_heads} kv heads of {c.head_dim}, {c.group} query heads each")
        lines += [f"{i:4} {self._line(op)}" for i, op in enumerate(self.ops)]
        return "\n".join(lines) + "\n"

    def _line(self, op: Op) -> str:
        def name(index: int) -> str:
            return self.buffers[index].name

        words = [op.opcode.name]
        if op.out is not None:
            words.append(f"{name(op.out)} <-")
        words += [name(index) for index in (op.in_, op.in2) if index is not None]
        if op.weight is not None:
            words.append(f"w{op.weight}")
        words += [f"{key}={value:g}" for key in ("a", "b", "c", "f0", "f1") if (value := getattr(op, key))]
        return " ".join(words)


_OP: Final = struct.Struct("=8I2f")


def encode_ops(ops: Iterable[Op]) -> bytes:
    """The array of struct meshllm_op, in this machine's byte order."""

    def operand(index: int | None) -> int:
        return NONE if index is None else index

    return b"".join(
        _OP.pack(
            op.opcode,
            operand(op.out),
            operand(op.in_),
            operand(op.in2),
            operand(op.weight),
            op.a,
            op.b,
            op.c,
            op.f0,
            op.f1,
        )
        for op in ops
    )
