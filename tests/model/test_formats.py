"""Formats: sizes against another program's table, and rows that cannot be."""

from __future__ import annotations

import pytest

from meshllm.model.formats import RUNNABLE_FORMATS, Format


def test_block_sizes_are_those_of_ggml() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {number: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items() if (number := int(kind)) in set(Format)}
    del theirs[Format.Q8_1]  # 40 there, of a time with f32 scales; ggml-common.h has two f16, so 36; never in files
    assert theirs == {int(f): (f.block_values, f.block_bytes) for f in Format if f in theirs}
    assert len(theirs) >= 30


def test_row_takes_whole_blocks() -> None:
    assert Format.Q4_0.row_bytes(64) == 36
    assert Format.F32.row_bytes(3) == 12
    assert Format.Q8_0.row_bytes(0) == 0


@pytest.mark.parametrize("n", [1, 31, 33, -32])
def test_row_that_is_no_whole_blocks_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="Q4_1"):
        Format.Q4_1.row_bytes(n)


def test_runnable_formats_are_those_of_the_kernels() -> None:
    floats, fives = {"F32", "F16", "BF16"}, {"Q5_0", "Q5_1"}
    of_k = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    assert {f.name for f in RUNNABLE_FORMATS} == floats | fives | of_k | {"Q4_0", "Q4_1", "Q8_0", "IQ4_NL"}
