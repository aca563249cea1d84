"""How fast the products with weights are on this device, by format: what `meshllm bench --ops` shows.

Decoding streams a matrix well past every cache for one token, so it is measured in bytes a second, beside what reading
alone reaches. With more tokens at once each byte serves all of them, until arithmetic is the limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshllm.kernels.binding import Kernels, NativeWeight
from meshllm.kernels.memory import Bytes, allocate_weights
from meshllm.model.formats import RUNNABLE_FORMATS, Format
from meshllm.model.opcodes import WeightKind

STREAM_BYTES: Final = 128 << 20  # of weights that decoding reads
WIDTH: Final = 2048  # columns; and rows of the matrix for prompts, which stays in caches
PROMPT: Final = 128
SECONDS: Final = 0.2  # for each figure, of which the quickest product counts
FILL: Final = 0x11  # halves of 0x1111 are small and finite


@dataclass(frozen=True, slots=True)
class OpSpeed:
    """Of one format. decode_gbps: 1e9 bytes of weights a second for one token; four, eight: products a second of so
    many tokens at once, by those of one; prompt_gops: 1e9 multiplications and additions a second for 128 tokens.
    """

    format: str
    decode_gbps: float
    four: float
    eight: float
    prompt_gops: float


def measure_ops(kernels: Kernels) -> Iterator[OpSpeed]:
    """Each format in turn, about a second for each. Raises KernelError without memory."""
    data = allocate_weights(STREAM_BYTES)
    data[:] = FILL  # written, so that its pages are its own
    for format_ in sorted(RUNNABLE_FORMATS, key=lambda found: found.row_bytes(WIDTH)):
        yield _measure(kernels, format_, data)


def _measure(kernels: Kernels, format_: Format, data: Bytes) -> OpSpeed:
    square = (WIDTH, WIDTH)
    long = (STREAM_BYTES // kernels.packed_size(format_, *square) * WIDTH, WIDTH)
    one, four, eight = (quickest(kernels, format_, long, data, n, SECONDS) for n in (1, 4, 8))
    prompt = quickest(kernels, format_, square, data, PROMPT, SECONDS)
    return OpSpeed(
        format=format_.name,
        decode_gbps=kernels.packed_size(format_, *long) / one / 1e9,
        four=4 * one / four,
        eight=8 * one / eight,
        prompt_gops=2 * WIDTH * WIDTH * PROMPT / prompt / 1e9,
    )


def quickest(
    kernels: Kernels, format_: Format, shape: tuple[int, int], data: Bytes, n_tokens: int, seconds: float
) -> float:
    """Seconds of the quickest product of n_tokens with a matrix of this shape, packed at the start of data, among
    those that fit in so many seconds, one at least.
    """
    weight = NativeWeight(WeightKind.PACKED, format_, *shape, data[: kernels.packed_size(format_, *shape)])
    x = np.ones((n_tokens, shape[1]), np.float32)
    best, begun = float("inf"), time.perf_counter()
    while (start := time.perf_counter()) - begun < seconds or best == float("inf"):
        kernels.matmul(weight, x)
        best = min(best, time.perf_counter() - start)
    return best
