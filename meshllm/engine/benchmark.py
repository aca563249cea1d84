"""How fast this device is: on a model (`meshllm bench`), and in the two numbers that a planner wants.

Speed is of the real kernels on real or real-shaped weights; nothing is extrapolated.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from meshllm.engine.executor import Batch, Executor, Finished
from meshllm.engine.op_benchmark import FILL, quickest
from meshllm.engine.weights import load_weights
from meshllm.errors import KernelError, UsageError
from meshllm.kernels.binding import Kernels
from meshllm.kernels.memory import allocate_weights
from meshllm.model.compiler import compile_program, whole_slice
from meshllm.model.formats import Format
from meshllm.model.model_file import ModelFile

CHUNK: Final = 256  # prompt tokens a step, as a daemon does it
STREAM_SHAPE: Final = (16384, 8192)  # rows, columns of Q4_0: 75 MB, more than caches hold
GEMM_SHAPE: Final = (2048, 2048)
GEMM_TOKENS: Final = 32
MEASURE_S: Final = 0.1  # for each of the two numbers
STREAM_BYTES: Final = 256 << 20  # for the bandwidth of memory: well past every cache
STREAM_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Tokens a second of a prompt and of decoding after it; load_s: to pack the weights; memory_mb: resident, 1e6
    bytes; decode_gbps: weights that decoding reads, 1e9 bytes a second; bandwidth_gbps: what reading alone reaches, if
    it was measured.
    """

    prefill_tok_s: float
    decode_tok_s: float
    load_s: float
    memory_mb: float
    isa: str
    threads: int
    decode_gbps: float
    bandwidth_gbps: float | None


def measure_device(kernels: Kernels) -> tuple[float, float]:
    """(read_gbps, matmul_gops): packed weights streamed in 1e9 bytes a second by one-token products, and multiply-adds
    times two a second of prompt products, in 1e9. Takes about 0.3 s. (0, 0) is never returned; without memory it
    raises KernelError.
    """
    size = kernels.packed_size(Format.Q4_0, *STREAM_SHAPE)
    data = allocate_weights(size)
    data[:] = FILL  # written, so that its pages are its own
    stream_s = quickest(kernels, Format.Q4_0, STREAM_SHAPE, data, 1, MEASURE_S)
    gemm_s = quickest(kernels, Format.Q4_0, GEMM_SHAPE, data, GEMM_TOKENS, MEASURE_S)
    return size / stream_s / 1e9, 2 * GEMM_SHAPE[0] * GEMM_SHAPE[1] * GEMM_TOKENS / gemm_s / 1e9


def measure_bandwidth(kernels: Kernels) -> float:
    """1e9 bytes a second that all threads together read from memory, the best of a second: the limit of decoding.
    Raises KernelError without memory.
    """
    data = allocate_weights(STREAM_BYTES)
    data[:] = 1  # written, so that its pages are its own
    return kernels.measure_bandwidth(data, STREAM_S) / 1e9


def run_benchmark(
    path: Path, *, threads: int, n_prompt: int, n_decode: int, isa: str = "", bandwidth: bool = False
) -> BenchResult:
    """Loads the whole model in this process and times one prompt and its continuation; then, with bandwidth, reads.

    Raises NoModelError, ModelFileError, KernelError; UsageError where the model's context is too short.
    """
    with ModelFile.open(path) as model:
        h = model.hyperparameters
        if n_prompt < 1 or n_decode < 1 or n_prompt + n_decode > h.context_length:
            raise UsageError(
                f"--prompt and --decode: from 1, together at most the model's context of {h.context_length}"
            )
        kernels = Kernels(isa, threads)
        formats = {name: tensor.format for name, tensor in model.gguf.tensors.items()}
        program = compile_program(h, whole_slice(h), 1, formats)
        start = time.perf_counter()
        weights = load_weights(kernels, model, program)
        load_s = time.perf_counter() - start
        executor = Executor(
            kernels, program, weights, n_slots=1, context=n_prompt + n_decode, max_tokens=min(CHUNK, n_prompt)
        )
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, h.vocab_size, n_prompt + n_decode).astype(np.int32)
        _run(executor, tokens[:1], 0)  # pages, caches and threads are warm, as in a daemon
        prefill_s = _time_prompt(executor, tokens[:n_prompt])
        start = time.perf_counter()
        for position in range(n_prompt, n_prompt + n_decode):
            _run(executor, tokens[position : position + 1], position)
            int(executor.logits(0).argmax())
        decode_s = time.perf_counter() - start
        memory_mb = resident_bytes() / 1e6
        executor.close()
    decode_tok_s = n_decode / decode_s
    return BenchResult(
        prefill_tok_s=n_prompt / prefill_s,
        decode_tok_s=decode_tok_s,
        load_s=load_s,
        memory_mb=memory_mb,
        isa=kernels.isa,
        threads=kernels.n_threads,
        decode_gbps=weights.packed_bytes * decode_tok_s / 1e9,
        bandwidth_gbps=measure_bandwidth(kernels) if bandwidth else None,
    )


def _time_prompt(executor: Executor, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> float:
    start = time.perf_counter()
    for first in range(0, len(tokens), executor.max_tokens):
        _run(executor, tokens[first : first + executor.max_tokens], first)
    return time.perf_counter() - start


def _run(executor: Executor, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], position: int) -> None:
    n = len(tokens)
    positions = np.arange(position, position + n, dtype=np.int32)
    executor.begin(Batch(tokens, positions, np.zeros(n, np.int32), np.array([n - 1], np.int32)))
    if not isinstance(executor.run(), Finished):
        raise KernelError("a program of one rank stopped at an exchange")


def resident_bytes() -> int:
    """Memory of this process in RAM, touched pages of the mapped file included; 0 if the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
