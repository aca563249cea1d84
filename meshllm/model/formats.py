"""Formats of tensors in GGUF files: how many values a block holds, how many bytes it takes, where a row may be cut.

The numbers are GGUF's (`enum ggml_type` in ggml.h), those of native/meshllm.h among them. All published formats are
known, so that every file can be indexed and its tokenizer used; RUNNABLE_FORMATS are those that the kernels run. Pure.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Format(IntEnum):
    """A tensor's element format. A row is stored as whole blocks, one after the other."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39

    @property
    def block_values(self) -> int:
        """Values in a block; a cut along a row must fall on a multiple of it."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return _BLOCKS[self][1]

    def row_bytes(self, n_values: int) -> int:
        """Bytes of a row of `n_values`, which must be a multiple of `block_values`."""
        n_blocks, rest = divmod(n_values, self.block_values)
        if rest or n_values < 0:
            raise ValueError(f"a row of {n_values} values cannot be held in {self.name} blocks of {self.block_values}")
        return n_blocks * self.block_bytes


# Values and bytes of a block, from the structs in ggml-common.h.
_BLOCKS: Final[dict[Format, tuple[int, int]]] = {
    Format.F32: (1, 4),
    Format.F16: (1, 2),
    Format.Q4_0: (32, 18),
    Format.Q4_1: (32, 20),
    Format.Q5_0: (32, 22),
    Format.Q5_1: (32, 24),
    Format.Q8_0: (32, 34),
    Format.Q8_1: (32, 36),
    Format.Q2_K: (256, 84),
    Format.Q3_K: (256, 110),
    Format.Q4_K: (256, 144),
    Format.Q5_K: (256, 176),
    Format.Q6_K: (256, 210),
    Format.Q8_K: (256, 292),
    Format.IQ2_XXS: (256, 66),
    Format.IQ2_XS: (256, 74),
    Format.IQ3_XXS: (256, 98),
    Format.IQ1_S: (256, 50),
    Format.IQ4_NL: (32, 18),
    Format.IQ3_S: (256, 110),
    Format.IQ2_S: (256, 82),
    Format.IQ4_XS: (256, 136),
    Format.I8: (1, 1),
    Format.I16: (1, 2),
    Format.I32: (1, 4),
    Format.I64: (1, 8),
    Format.F64: (1, 8),
    Format.IQ1_M: (256, 56),
    Format.BF16: (1, 2),
    Format.TQ1_0: (256, 54),
    Format.TQ2_0: (256, 66),
    Format.MXFP4: (32, 17),
}

RUNNABLE_FORMATS: Final = frozenset(
    {
        Format.F32,
        Format.F16,
        Format.BF16,
        Format.Q4_0,
        Format.Q4_1,
        Format.Q5_0,
        Format.Q5_1,
        Format.Q8_0,
        Format.Q2_K,
        Format.Q3_K,
        Format.Q4_K,
        Format.Q5_K,
        Format.Q6_K,
        Format.IQ4_NL,
    }
)
