"""Packing slices: the sum of the slices is the model, and memory is a slice and little more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reference.tiny_model import Shape, read_tensor, write_tiny_model

from meshllm.engine.weights import load_weights
from meshllm.errors import ModelFileError
from meshllm.kernels.binding import Kernels
from meshllm.model.compiler import compile_program, whole_slice
from meshllm.model.model_file import ModelFile
from meshllm.model.opcodes import WeightKind
from meshllm.model.rope import inverse_frequencies
from meshllm.model.slicing import Range, Slice


@pytest.mark.parametrize("quant", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_each_cut_multiplies_like_the_cut_of_the_dequantized_tensor(
    quant: str, tmp_path: Path, kernels: Kernels
) -> None:
    shape = Shape(quant=quant, dim=96, ffn_dim=160, n_heads=4, n_kv_heads=2, head_dim=32)
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", shape)) as model:
        formats = {name: tensor.format for name, tensor in model.gguf.tensors.items()}
        part = Slice(Range(1, 3), Range(32, 128), Range(7, 41))
        program = compile_program(model.hyperparameters, part, 2, formats)
        weights = load_weights(kernels, model, program)
        rng = np.random.default_rng(0)
        for request, native in zip(program.weights, weights.native, strict=True):
            if request.kind is not WeightKind.PACKED or request.tensor is None:
                continue
            x = rng.integers(-127, 128, (3, native.n_cols)).astype(np.float32)
            x[:, ::32] = 127  # whole numbers and 127 in each block: rounding to int8 changes nothing
            rows, cols = request.rows, request.cols
            right = x @ read_tensor(model, request.tensor)[rows.start : rows.stop, cols.start : cols.stop].T
            np.testing.assert_allclose(kernels.matmul(native, x), right, rtol=1e-4, atol=1e-3 * np.abs(right).max())


def test_packed_bytes_are_about_those_of_the_file(tmp_path: Path, kernels: Kernels) -> None:
    shape = Shape(quant="Q4_0", dim=256, ffn_dim=512, n_heads=4, n_kv_heads=4, head_dim=64, vocab_size=64)
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", shape)) as model:
        formats = {name: tensor.format for name, tensor in model.gguf.tensors.items()}
        stored = sum(tensor.size for tensor in model.gguf.tensors.values())
        h = model.hyperparameters
        whole = load_weights(kernels, model, compile_program(h, whole_slice(h), 1, formats))
        assert whole.packed_bytes == pytest.approx(stored, rel=0.02)
        half = Slice(Range(0, 2), Range(0, 256), Range(0, 32))
        assert load_weights(kernels, model, compile_program(h, half, 2, formats)).packed_bytes == pytest.approx(
            stored / 2, rel=0.1
        )


def test_frequencies_are_divided_by_the_files_factors(tmp_path: Path, kernels: Kernels) -> None:
    """Case SHAPE-07: a file with the tensor, and code that ignores it, must fail here."""
    shape = Shape(rope_factors=True, linear_factor=2.0)
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", shape)) as model:
        h = model.hyperparameters
        formats = {name: tensor.format for name, tensor in model.gguf.tensors.items()}
        program = compile_program(h, whole_slice(h), 1, formats)
        weights = load_weights(kernels, model, program)
        (found,) = (n.data for n, r in zip(weights.native, program.weights, strict=True) if r.values)
        right = [10000 ** (-i / 8) / 2 / factor for i, factor in enumerate(np.linspace(1, 8, 8))]
        np.testing.assert_allclose(np.asarray(found), right, rtol=1e-6)
        assert inverse_frequencies(h.rope_theta, h.rope_dim, h.rope_scaling)[0] == 0.5


def test_a_factor_of_zero_is_refused(tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "linspace", lambda *_: np.zeros(8))
    path = write_tiny_model(tmp_path / "m.gguf", Shape(rope_factors=True))
    with ModelFile.open(path) as model:
        h = model.hyperparameters
        formats = {name: tensor.format for name, tensor in model.gguf.tensors.items()}
        with pytest.raises(ModelFileError, match=r"m\.gguf: tensor rope_freqs\.weight"):
            load_weights(kernels, model, compile_program(h, whole_slice(h), 1, formats))
