"""Random weights in any quantized format: any codes and small scales at all, with f16 numbers of a size that suits.

The `gguf` package quantizes to some formats only, but takes every one apart.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from meshllm.model.formats import Format

# Where the f16 numbers of a block stand, and each one's part of the size of a value.
_NUMBERS: Final[dict[Format, tuple[tuple[int, float], ...]]] = {
    Format.Q4_0: ((0, 0.2),),
    Format.Q4_1: ((0, 0.2), (2, -1.5)),
    Format.Q5_0: ((0, 0.1),),
    Format.Q5_1: ((0, 0.1), (2, -1.5)),
    Format.Q8_0: ((0, 0.013),),
    Format.IQ4_NL: ((0, 0.013),),
    Format.Q2_K: ((80, 0.06), (82, 0.09)),
    Format.Q3_K: ((108, 0.02),),
    Format.Q4_K: ((0, 0.006), (2, 0.045)),
    Format.Q5_K: ((0, 0.003), (2, 0.045)),
    Format.Q6_K: ((208, 0.0007),),
}


def random_blocks(
    format_: Format, rows: int, cols: int, rng: np.random.Generator, size: float = 1.0
) -> npt.NDArray[np.uint8]:
    """uint8 [rows, bytes of a row] of values of about `size`."""
    n_blocks = rows * cols // format_.block_values
    blocks = rng.integers(0, 256, (n_blocks, format_.block_bytes), np.uint8)
    for at, part in _NUMBERS[format_]:
        numbers = (part * size * rng.uniform(0.5, 1.5, n_blocks)).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(n_blocks, 2)
    return blocks.reshape(rows, -1)
