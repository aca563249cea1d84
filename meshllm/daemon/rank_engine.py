"""One member's engine of one epoch: the slice packed, steps in, candidates out. It decides nothing about links.

Built in a worker thread, then used by the data loop alone. A driver without a slice has one too, which knows the
model's numbers and holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshllm.engine.executor import Batch, Executor
from meshllm.engine.kv_cache import SlotHistory
from meshllm.engine.sampling import Candidates
from meshllm.engine.weights import load_weights
from meshllm.errors import ModelFileError
from meshllm.kernels.binding import Kernels, lost_maps
from meshllm.kernels.links import Communicator, Progress, SealedLink
from meshllm.layout.layout import Layout
from meshllm.mesh.exchange import Schedule, data_frame_limit, make_schedule
from meshllm.mesh.messages import Step
from meshllm.model.compiler import compile_program
from meshllm.model.model_file import ModelFile

MAX_STEP_TOKENS: Final = 256  # rows of a step


class RankEngine:
    """See the head of this file. `schedule`: the exchanges of a step; empty on a driver without a slice."""

    def __init__(self, kernels: Kernels, model_file: ModelFile, layout: Layout, rank: int | None) -> None:
        """Blocks for as long as packing takes. The file's map is guarded (see binding.guard_map).

        Raises ModelFileError, SliceError or KernelError; what was taken is then free again.
        """
        self._executor: Executor | None = None
        self._step: Step | None = None
        self._file = model_file
        self._lost_maps = lost_maps()
        try:
            h = self._file.hyperparameters
            self.vocab_size = h.vocab_size
            self.max_tokens = max(MAX_STEP_TOKENS, layout.slots)
            self.frame_limit = data_frame_limit(layout, h.dim, self.max_tokens)
            self.schedule: Schedule = ()
            self.slice_bytes = 0
            self._history = SlotHistory(layout.slots, layout.context)
            if rank is not None:
                self._pack(kernels, layout, rank)
            self._check_file()
        except BaseException:
            self.close()
            raise

    @property
    def is_rank(self) -> bool:
        """Whether it holds a slice."""
        return self._executor is not None

    @property
    def cache_bytes(self) -> int:
        """Of the KV cache when full."""
        return 0 if self._executor is None else self._executor.cache_bytes

    def begin(self, step: Step) -> None:
        """Starts a step that keeps to the limits. Raises KernelError."""
        executor = self._held()
        for to, source, n_positions in step.copies:
            executor.copy_slot(to, source, n_positions)
            self._history.copy(to, source, n_positions)
        executor.begin(_batch_of(step), step.step)
        for entry in step.entries:
            self._history.append(entry.slot, entry.position, entry.tokens)
        self._step = step

    def connect(self, links: Sequence[SealedLink | None]) -> None:
        """The links to the other ranks, in rank order, None in this one's place; once, before the first step."""
        if self._executor is not None:
            self._executor.connect(links.index(None), links, self.schedule)

    @property
    def communicator(self) -> Communicator:
        """What a running step waits for."""
        communicator = self._held().communicator
        assert communicator is not None  # links come before steps
        return communicator

    def run(self, spin_s: float, yield_s: float) -> Progress:
        """The step with its exchanges: see Communicator.run. Raises BatchStoppedError after `stop`, ModelFileError
        where the file lost what the step has read, and an error of the link of the communicator's `rank`.
        """
        progress = self._held().run_connected(spin_s, yield_s)
        if progress is Progress.FINISHED and lost_maps() != self._lost_maps:
            self._check_file()
        return progress

    def candidates(self) -> list[Candidates]:
        """Of a finished step: for each entry with sampling, what this slice offers; [] if it has no vocabulary."""
        executor, step = self._held(), self._step
        if step is None or not executor.program.vocab:
            return []
        drawing = [entry for entry in step.entries if entry.sampling is not None]
        return [
            executor.candidates(row, entry.sampling, self._history.tokens(entry.slot), entry.prompt_tokens)
            for row, entry in enumerate(drawing)
            if entry.sampling is not None
        ]

    def stop(self) -> None:
        """From any thread: a running step ends within one op."""
        executor = self._executor
        if executor is not None:
            executor.stop()

    def close(self) -> None:
        """Frees slice and cache. May be called again."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    def _check_file(self) -> None:
        self._file.check_unchanged()
        if lost_maps() != self._lost_maps:
            raise ModelFileError(f"{self._file.path}: can no longer be read as a whole; check its disk")

    def _pack(self, kernels: Kernels, layout: Layout, rank: int) -> None:
        formats = {name: tensor.format for name, tensor in self._file.gguf.tensors.items()}
        hyperparameters = self._file.hyperparameters
        program = compile_program(hyperparameters, layout.shares[rank].slice, len(layout.shares), formats)
        weights = load_weights(kernels, self._file, program)
        self._executor = Executor(
            kernels,
            program,
            weights,
            n_slots=layout.slots,
            context=layout.context,
            max_tokens=self.max_tokens,
            precision=layout.exchange,
        )
        self.slice_bytes = weights.packed_bytes
        self.schedule = make_schedule(layout, program.exchanges)

    def _held(self) -> Executor:
        assert self._executor is not None  # only ranks run steps
        return self._executor


def _batch_of(step: Step) -> Batch:
    """The rows of a step, entry after entry; output rows are the last ones of entries with sampling."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outputs: list[int] = []
    for entry in step.entries:
        n_tokens = len(entry.tokens)
        tokens += entry.tokens
        positions += range(entry.position, entry.position + n_tokens)
        slots += [entry.slot] * n_tokens
        if entry.sampling is not None:
            outputs.append(len(tokens) - 1)
    return Batch.of(tokens, positions, slots, outputs)
