"""The second execution of a program: float32 numpy, one op a few lines, as native/meshllm.h states them. What right
means.

Weights are dequantized, activations are not quantized and the cache is not rounded, so the native engine may differ by
what those cost. With `rounded=True` activations and cache are rounded as the engine's kernels do, and only the order
of float additions is left to differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshllm.model.opcodes import Op, Opcode, Program, WeightKind, WeightRequest

Float32 = npt.NDArray[np.float32]
ReadTensor = Callable[[str], Float32]  # name -> [rows, cols]


@dataclass(frozen=True)
class Rows:
    """A batch: token, position and slot of each row; rows that are outputs."""

    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    outputs: Sequence[int]


def round_to_blocks(x: Float32) -> Float32:
    """x as int8 blocks of 32 with an f16 scale of max / 127 give it back."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    scale = (largest / np.float32(127)).astype(np.float16).astype(np.float32)
    return (np.rint(blocks * inverse) * scale).astype(np.float32).reshape(x.shape)


class NumpyInterpreter:
    """One rank. step() until it returns None; where it returns an array or "nothing", call supply with all partials."""

    def __init__(
        self, program: Program, read: ReadTensor, *, n_slots: int, context: int, rounded: bool = False
    ) -> None:
        self.program = program
        self._rounded = rounded
        self._weights = [self._load(request, read) for request in program.weights]
        cache = program.cache
        shape = (2, cache.n_layers, n_slots, cache.n_kv_heads, context, cache.head_dim)
        self._cache = np.zeros(shape, np.float32)
        self._buffers: list[Float32] = []
        self._rows = Rows([], [], [], [])
        self._next = 0

    @staticmethod
    def _load(request: WeightRequest, read: ReadTensor) -> Float32:
        if request.tensor is None:
            return np.array(request.values, np.float32)
        tensor = read(request.tensor)
        if request.kind is WeightKind.VECTOR:
            vector = tensor.reshape(-1)[request.cols.start : request.cols.stop]
            return (np.array(request.values) / vector).astype(np.float32) if request.values else vector
        rows, cols = request.rows, request.cols
        return tensor[rows.start : rows.stop, cols.start : cols.stop]

    def begin(self, rows: Rows) -> None:
        self._rows = rows
        self._buffers = [np.zeros((len(rows.tokens), buffer.width), np.float32) for buffer in self.program.buffers]
        self._next = 0

    def step(self) -> Float32 | str | None:
        """To the next EXCHANGE: this rank's partial, or "nothing"; None at the end."""
        while self._next < len(self.program.ops):
            op = self.program.ops[self._next]
            if op.opcode is Opcode.EXCHANGE:
                return "nothing" if op.in_ is None else self._buffers[op.in_]
            self._run(op)
            self._next += 1
        return None

    def supply(self, partials: Sequence[Float32]) -> None:
        op = self.program.ops[self._next]
        out = op.out
        assert out is not None
        if op.a:
            self._buffers[out] = np.zeros_like(self._buffers[out])
        for partial in partials:
            self._buffers[out] += partial
        self._next += 1

    def residual(self) -> Float32:
        return self._buffers[self.program.residual]

    def logits(self) -> Float32:
        """[outputs, vocabulary of the slice]."""
        if self.program.logits is None:
            return np.zeros((len(self._rows.outputs), 0), np.float32)
        return self._buffers[self.program.logits]

    def _run(self, op: Op) -> None:
        b = self._buffers
        out, in_, in2 = (op.out or 0), (op.in_ or 0), (op.in2 or 0)
        weight = self._weights[op.weight] if op.weight is not None else np.zeros(0, np.float32)
        match op.opcode:
            case Opcode.EMBED:
                b[out][:] = weight[list(self._rows.tokens)]
            case Opcode.RMSNORM:
                groups = b[in_].reshape(len(b[in_]), -1, op.a)
                mean = np.mean(np.square(groups, dtype=np.float64), -1, keepdims=True)
                b[out] = (groups / np.sqrt(mean + op.f0) * weight).astype(np.float32).reshape(b[in_].shape)
            case Opcode.QUANTIZE:
                b[out] = round_to_blocks(b[in_]) if self._rounded else b[in_].copy()
            case Opcode.MATMUL:
                b[out] = b[in_] @ weight.T
            case Opcode.BIAS:
                b[out] += weight
            case Opcode.ROPE:
                self._rope(op, out, weight)
            case Opcode.KV_APPEND:
                self._append(op, b[in_], b[in2])
            case Opcode.ATTENTION:
                b[out] = self._attend(op, b[in_])
            case Opcode.GATE:
                b[out] = self._activation(op.a, b[in_]) * b[in2]
            case Opcode.ADD:
                b[out] += b[in_]
            case Opcode.SCALE:
                b[out] *= np.float32(op.f0)
                if op.f1:
                    b[out] = (op.f1 * np.tanh(b[out] / op.f1)).astype(np.float32)
            case Opcode.SELECT:
                for i, buffer in enumerate(b):
                    b[i] = buffer[list(self._rows.outputs)]
                b[out] = b[in_].copy()
            case Opcode.EXCHANGE:
                raise AssertionError("step stops at it")

    @staticmethod
    def _activation(kind: int, x: Float32) -> Float32:
        if kind == 0:
            return x / (1 + np.exp(-x))
        return (0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))).astype(np.float32)

    def _rope(self, op: Op, out: int, frequencies: Float32) -> None:
        angles = np.outer(np.array(self._rows.positions, np.float64), frequencies.astype(np.float64))
        cos, sin = (
            part[:, None, :].astype(np.float32) * np.float32(op.f0) for part in (np.cos(angles), np.sin(angles))
        )
        heads = self._buffers[out].reshape(len(angles), op.a, op.b).copy()
        n = len(frequencies)
        first, second = (slice(0, n), slice(n, 2 * n)) if op.c else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
        u, v = heads[..., first].copy(), heads[..., second].copy()
        heads[..., first], heads[..., second] = u * cos - v * sin, u * sin + v * cos
        self._buffers[out] = heads.reshape(self._buffers[out].shape)

    def _append(self, op: Op, keys: Float32, values: Float32) -> None:
        cache = self.program.cache
        for i, (slot, position) in enumerate(zip(self._rows.slots, self._rows.positions, strict=True)):
            for kind, rows in enumerate((keys, values)):
                row = rows[i].reshape(cache.n_kv_heads, cache.head_dim)
                stored = row.astype(np.float16).astype(np.float32) if self._rounded else row
                self._cache[kind, op.a, slot, :, position] = stored

    def _attend(self, op: Op, queries: Float32) -> Float32:
        cache = self.program.cache
        out = np.empty_like(queries)
        for i, (slot, position) in enumerate(zip(self._rows.slots, self._rows.positions, strict=True)):
            start = max(0, position + 1 - op.c) if op.c else 0
            heads = queries[i].reshape(-1, cache.head_dim)
            mixed = []
            for h, query in enumerate(heads):
                keys, values = self._cache[:, op.a, slot, (h + op.b) // cache.group, start : position + 1]
                scores = (keys @ query) * np.float32(op.f0)
                if op.f1 > 0:
                    scores = op.f1 * np.tanh(scores / op.f1)
                weights = np.exp(scores - scores.max())
                mixed.append(weights @ values / weights.sum())
            out[i] = np.concatenate(mixed)
        return out


def run_ranks(ranks: Sequence[NumpyInterpreter], rows: Rows) -> Float32:
    """One step on all ranks; logits [outputs, whole vocabulary]."""
    for rank in ranks:
        rank.begin(rows)
    while True:
        partials = [rank.step() for rank in ranks]
        if partials[0] is None:
            assert all(partial is None for partial in partials)
            return np.concatenate([rank.logits() for rank in ranks], axis=1)
        given = [partial.copy() for partial in partials if not (partial is None or isinstance(partial, str))]
        for rank in ranks:
            rank.supply(given)
