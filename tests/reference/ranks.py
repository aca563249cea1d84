"""A layout in one process: an executor a rank, partials passed by hand as the data loop passes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshllm.engine.executor import Batch, Exchange, ExchangePrecision, Executor, Finished
from meshllm.engine.sampling import Candidates, draw
from meshllm.engine.weights import load_weights
from meshllm.kernels.binding import Kernels
from meshllm.model.compiler import compile_program
from meshllm.model.model_file import ModelFile
from meshllm.model.slicing import Range, Slice
from meshllm.parameters import SampledToken, SamplingParameters


def cut(n: int, *ends: int) -> list[Range]:
    """Ranges that end at `ends`, the last at n."""
    stops = [*ends, n]
    return [Range(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def slices(heads: Sequence[Range], ffn: Sequence[Range], vocab: Sequence[Range]) -> list[Slice]:
    return [Slice(*ranges) for ranges in zip(heads, ffn, vocab, strict=True)]


@dataclass
class Ranks:
    """executors[i] is rank i. check_residual: after each exchange all residual streams must be equal bit for bit."""

    executors: list[Executor]
    check_residual: bool = True
    exchanged_bytes: int = 0

    @classmethod
    def load(
        cls,
        kernels: Kernels,
        model_file: ModelFile,
        parts: Sequence[Slice],
        *,
        precision: ExchangePrecision = "f32",
        n_slots: int = 2,
        context: int = 512,
        max_tokens: int = 256,
    ) -> Ranks:
        formats = {name: tensor.format for name, tensor in model_file.gguf.tensors.items()}
        executors = []
        for part in parts:
            program = compile_program(model_file.hyperparameters, part, len(parts), formats)
            weights = load_weights(kernels, model_file, program)
            executors.append(
                Executor(
                    kernels,
                    program,
                    weights,
                    n_slots=n_slots,
                    context=context,
                    max_tokens=max_tokens,
                    precision=precision,
                )
            )
        return cls(executors)

    def step(self, tokens: Sequence[int], position: int, outputs: Sequence[int], slot: int = 0) -> None:
        """Rows of one slot from `position` on."""
        n = len(tokens)
        self.run(Batch.of(tokens, range(position, position + n), [slot] * n, outputs))

    def run(self, batch: Batch) -> None:
        for executor in self.executors:
            executor.begin(batch)
        n_rows = len(batch.tokens)
        while True:
            states = [executor.run() for executor in self.executors]
            if isinstance(states[0], Finished):
                assert all(isinstance(state, Finished) for state in states)
                return
            self._exchange([state for state in states if isinstance(state, Exchange)], n_rows)

    def _exchange(self, states: Sequence[Exchange], n_rows: int) -> None:
        assert len(states) == len(self.executors)
        assert len({(state.index, state.kind, state.size) for state in states}) == 1
        partials = [bytes(state.partial) for state in states if len(state.partial)]
        self.exchanged_bytes += sum(map(len, partials))
        for executor in self.executors:
            executor.supply(partials)
        if self.check_residual:
            for row in range(n_rows):
                first = self.executors[0].residual(row).view(np.uint32)
                for executor in self.executors[1:]:
                    assert np.array_equal(executor.residual(row).view(np.uint32), first)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """[whole vocabulary]; a copy."""
        return np.concatenate([executor.logits(row) for executor in self.executors])

    def draw(
        self, row: int, sampling: SamplingParameters, position: int, history: Sequence[int] = (), n_prompt: int = 0
    ) -> SampledToken:
        """As the driver does it: candidates of each rank, over the wire, then one draw."""
        parts = [
            Candidates.from_bytes(e.candidates(row, sampling, history, n_prompt).to_bytes(), e.program.vocab)
            for e in self.executors
        ]
        return draw(parts, sampling, position)

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """n greedy tokens after the prompt."""
        self.step(prompt, 0, [len(prompt) - 1])
        greedy = SamplingParameters(temperature=0)
        answer: list[int] = []
        while True:
            position = len(prompt) + len(answer)
            answer.append(self.draw(0, greedy, position - 1).token)
            if len(answer) == n:
                return answer
            self.step(answer[-1:], position, [0])

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
