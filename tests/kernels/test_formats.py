"""Every format against the `gguf` package: values of rows, and products with packed rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from reference.random_blocks import random_blocks

from meshllm.kernels.binding import Kernels, NativeWeight, dequantize_row, list_isas
from meshllm.kernels.memory import allocate_weights
from meshllm.model.formats import RUNNABLE_FORMATS, Format
from meshllm.model.opcodes import WeightKind

QUANTIZED = sorted(RUNNABLE_FORMATS - {Format.F32, Format.F16, Format.BF16})
COLS = 512


@pytest.fixture(params=[name for name, runs in list_isas() if runs])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param, 1)


def values_of(format_: Format, stored: np.ndarray) -> np.ndarray:
    return np.asarray(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(int(format_))), np.float32)


@pytest.mark.parametrize("format_", QUANTIZED, ids=lambda f: f.name)
def test_values_are_those_of_the_gguf_package(format_: Format) -> None:
    stored = random_blocks(format_, 64, COLS, np.random.default_rng(0))
    found = np.stack([dequantize_row(format_, row, COLS) for row in stored])
    np.testing.assert_array_equal(found, values_of(format_, stored))


def test_bf16_values_are_the_upper_half_of_f32() -> None:
    values = np.random.default_rng(0).normal(size=COLS).astype(np.float32)
    stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    right = (stored.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(dequantize_row(Format.BF16, stored.view(np.uint8), COLS), right)


@pytest.mark.parametrize("n_tokens", [1, 3, 9])
@pytest.mark.parametrize("format_", QUANTIZED, ids=lambda f: f.name)
def test_products_are_those_of_the_values(format_: Format, n_tokens: int, kernels: Kernels) -> None:
    rows = 37
    rng = np.random.default_rng(1)
    stored = random_blocks(format_, rows, COLS, rng)
    data = allocate_weights(kernels.packed_size(format_, rows, COLS))
    kernels.pack(data, format_, (0, rows), (0, COLS), COLS, stored)
    x = rng.integers(-127, 128, (n_tokens, COLS)).astype(np.float32)
    x[:, ::32] = 127  # whole numbers and 127 in each block: rounding to int8 changes nothing
    found = kernels.matmul(NativeWeight(WeightKind.PACKED, format_, rows, COLS, data), x)
    values = values_of(format_, stored)
    errors = np.abs(found - x @ values.T) / (np.abs(x) @ np.abs(values).T)
    assert errors.max() < 1e-6
