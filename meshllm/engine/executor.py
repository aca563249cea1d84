"""One rank's engine: a program bound to its weights and a KV cache, run step by step.

Life of a step: `begin(batch)`, then `run()` until it returns Finished; at each Exchange the partials of all
contributing ranks (this one's among them, in rank order) are given to `supply`. Or, once it is connected with the other
ranks, `run_connected()` until it is FINISHED, which exchanges by itself. Then `candidates` and `logits` answer for the
batch's output rows until the next `begin`. It knows no peers and no sockets. One thread at a time; only `stop` may be
called from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from meshllm.engine.sampling import Candidates, select_candidates
from meshllm.engine.weights import Weights
from meshllm.errors import KernelError, MeshLLMError
from meshllm.kernels.binding import Float32, Kernels, NativeProgram, Precision, RunStatus
from meshllm.kernels.links import Communicator, Progress, SealedLink
from meshllm.model.opcodes import ExchangeKind, Program, encode_ops
from meshllm.parameters import SamplingParameters

Int32: TypeAlias = npt.NDArray[np.int32]
ExchangePrecision: TypeAlias = Literal["q8_0", "f16", "f32"]

PRECISIONS: Final[dict[ExchangePrecision, Precision]] = {
    "q8_0": Precision.Q8_0,
    "f16": Precision.F16,
    "f32": Precision.F32,
}


# A row that is read from the map brings its surroundings along, some 600 kB: they are forgotten after so many rows.
EMBEDDED_ROWS: Final = 64


class BatchStoppedError(MeshLLMError):
    """`stop` was called: the step is void, and what it wrote to the cache past the sequences' ends does not count."""

    code = "stopped"


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step. tokens, positions, slots: int32 [n_tokens]; outputs: int32, growing: rows whose logits are
    wanted.

    Rows of one slot must follow each other by position, and all positions before them must be in its cache.
    """

    tokens: Int32
    positions: Int32
    slots: Int32
    outputs: Int32

    @classmethod
    def of(cls, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], outputs: Sequence[int]) -> Batch:
        """From any sequences of integers."""
        tokens_, positions_, slots_, outputs_ = (
            np.asarray(part, np.int32) for part in (tokens, positions, slots, outputs)
        )
        return cls(tokens_, positions_, slots_, outputs_)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A step waits for partials. index: counts from 0 in each step. partial: this rank's, empty if it adds nothing;
    valid until `supply`. size: bytes that every partial must have."""

    index: int
    kind: ExchangeKind
    partial: memoryview
    size: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The step is complete."""


_FINISHED: Final = Finished()


class Executor:
    """See the head of the file. n_slots sequences of `context` tokens; steps of at most max_tokens rows.

    Raises KernelError where memory does not suffice.
    """

    def __init__(
        self,
        kernels: Kernels,
        program: Program,
        weights: Weights,
        *,
        n_slots: int,
        context: int,
        max_tokens: int,
        precision: ExchangePrecision = "q8_0",
    ) -> None:
        shape = program.cache
        self.program = program
        self.n_slots = n_slots
        self.context = context
        self.max_tokens = max_tokens
        self._native: NativeProgram | None = NativeProgram(
            kernels,
            encode_ops(program.ops),
            [(buffer.kind, buffer.width) for buffer in program.buffers],
            weights.native,
            (shape.n_layers, n_slots, context, shape.n_kv_heads, shape.head_dim, shape.group),
            max_tokens=max_tokens,
            precision=PRECISIONS[precision],
        )
        self._logits = None if program.logits is None else self._native.buffer(program.logits)
        self._batch: Batch | None = None
        self._exchange = 0
        self._finished = False
        self._weights = weights
        self._embedded = 0
        self.communicator: Communicator | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache when all its positions are in use."""
        return self._program().cache_bytes

    def begin(self, batch: Batch, step: int = 0) -> None:
        """Starts a step; `step` is its number among connected ranks.

        Raises KernelError for a batch that does not fit (too many rows, a position past the context).
        """
        positions, slots = batch.positions, batch.slots
        if len(positions) and (int(positions.max()) >= self.context or int(slots.max()) >= self.n_slots):
            raise KernelError(f"position {positions.max()} of {self.context} or slot {slots.max()} of {self.n_slots}")
        self._program().begin(batch.tokens, positions, slots, batch.outputs)
        if self._embedded >= EMBEDDED_ROWS:
            self._weights.forget_tables()
            self._embedded = 0
        self._embedded += len(batch.tokens)
        self._batch = batch
        self._exchange = 0
        self._finished = False
        if self.communicator is not None:
            self.communicator.begin(step)

    def run(self) -> Exchange | Finished:
        """To the next exchange or the end; without the GIL. Raises BatchStoppedError after `stop`."""
        native = self._program()
        match native.run():
            case RunStatus.FINISHED:
                self._finished = True
                return _FINISHED
            case RunStatus.EXCHANGE:
                kind = self.program.exchanges[self._exchange]
                return Exchange(self._exchange, kind, native.partial(), native.partial_size())
            case RunStatus.STOPPED:
                raise BatchStoppedError("the step was stopped")

    def connect(self, own: int, links: Sequence[SealedLink | None], contributors: Sequence[Sequence[int]]) -> None:
        """Gives it the links to the other ranks: see kernels.links.Communicator."""
        self.communicator = Communicator(self._program(), own, links, contributors)

    def run_connected(self, spin_s: float, yield_s: float) -> Progress:
        """Runs on with all exchanges: see Communicator.run, whose errors it raises. BatchStoppedError after `stop`."""
        if (communicator := self.communicator) is None:
            raise KernelError("this executor has no links")
        progress = communicator.run(spin_s, yield_s)
        if progress is Progress.STOPPED:
            raise BatchStoppedError("the step was stopped")
        self._finished = progress is Progress.FINISHED
        return progress

    def supply(self, partials: Sequence[memoryview | bytes]) -> None:
        """Adds the partials of this exchange's contributors, in rank order. Raises KernelError for a wrong length."""
        self._program().supply(partials)
        self._exchange += 1

    def candidates(
        self, row: int, sampling: SamplingParameters, history: Sequence[int] = (), n_prompt: int = 0
    ) -> Candidates:
        """What this rank's vocabulary offers for output `row`. history, n_prompt: see sampling.select_candidates."""
        batch = self._checked_row(row)
        position = int(batch.positions[batch.outputs[row]])
        return select_candidates(self.logits(row), self.program.vocab, sampling, position, history, n_prompt)

    def logits(self, row: int) -> Float32:
        """f32 [len(vocab)] of output `row`, valid until the next `begin`; empty if the slice has no vocabulary."""
        self._checked_row(row)
        return _NO_LOGITS if self._logits is None else self._logits[row]

    def residual(self, row: int) -> Float32:
        """f32 [dim]: the residual stream of a row as it stands now. The same on all ranks, bit for bit, after an
        exchange.
        """
        view: Float32 = self._program().buffer(self.program.residual)[row]
        return view

    def stop(self) -> None:
        """From any thread: the running step ends within one op."""
        if (native := self._native) is not None:
            native.stop()

    def copy_slot(self, to: int, from_: int, n: int) -> None:
        """Copies the first n positions of a slot's cache to another slot."""
        self._program().copy_slot(to, from_, n)

    def close(self) -> None:
        """Gives weights and cache up; memory goes when the last array handed out is gone."""
        self._native = None
        self.communicator = None
        self._logits = None

    def _program(self) -> NativeProgram:
        if self._native is None:
            raise KernelError("this executor is closed")
        return self._native

    def _checked_row(self, row: int) -> Batch:
        if self._batch is None or not self._finished or not 0 <= row < len(self._batch.outputs):
            raise KernelError(f"output row {row} of no finished step")
        return self._batch


_NO_LOGITS: Final = np.empty(0, np.float32)
