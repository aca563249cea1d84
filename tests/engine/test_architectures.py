"""Every architecture and rope kind, as small random models: the engine against the numpy reference, whole and split
over ranks, and against transformers' own model of the family where torch is installed (the extra `reference`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from reference.numpy_interpreter import NumpyInterpreter, Rows, run_ranks
from reference.ranks import Ranks, cut, slices
from reference.tiny_architectures import FFN, HEADS, TINY_MODELS, VOCAB

from meshllm.errors import ModelFileError
from meshllm.kernels.binding import Kernels, list_isas
from meshllm.model.architectures import ARCHITECTURES
from meshllm.model.compiler import compile_program, whole_slice
from meshllm.model.model_file import ModelFile
from meshllm.model.opcodes import Opcode
from meshllm.model.slicing import Slice
from meshllm.model.weight_sizes import measure_shape

TOKENS = [(7 * i * i + 3 * i) % VOCAB for i in range(48)]  # past every window
MOST_KL = 1e-3
NOT_IN_TRANSFORMERS = ("llama-factors", "gemma3-capped-scores")  # it knows no such tensor, and takes no such cap

has_torch = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None


def layouts(model: ModelFile) -> dict[str, list[Slice]]:
    """One rank, and two of unequal parts whose cut of the heads falls inside a group."""
    parts = slices(cut(HEADS, 1), cut(FFN, 64), cut(VOCAB, 37))
    return {"one": [whole_slice(model.hyperparameters)], "two": parts}


def engine_logits(kernels: Kernels, model: ModelFile, parts: list[Slice]) -> npt.NDArray[np.float32]:
    """[tokens, vocabulary]: a first part as a prompt, then token by token."""
    ranks = Ranks.load(kernels, model, parts, context=64, max_tokens=64)
    n = 40
    ranks.step(TOKENS[:n], 0, range(n))
    found = [ranks.logits(i) for i in range(n)]
    for i in range(n, len(TOKENS)):
        ranks.step(TOKENS[i : i + 1], i, [0])
        found.append(ranks.logits(0))
    ranks.close()
    return np.array(found)


def reference_logits(model: ModelFile, parts: list[Slice], arrays: dict[str, npt.NDArray[np.float32]]) -> np.ndarray:
    formats = {name: tensor.format for name, tensor in model.gguf.tensors.items()}
    ranks = [
        NumpyInterpreter(
            compile_program(model.hyperparameters, part, len(parts), formats),
            lambda name: np.atleast_2d(arrays[name]),
            n_slots=1,
            context=64,
            rounded=True,
        )
        for part in parts
    ]
    n = len(TOKENS)
    return run_ranks(ranks, Rows(TOKENS, range(n), [0] * n, range(n)))


def divergences(right: np.ndarray, found: np.ndarray) -> np.ndarray:
    """KL(right || found) of each row of logits."""
    right, found = (x - np.logaddexp.reduce(x, -1)[:, None] for x in (np.float64(right), np.float64(found)))
    return np.sum(np.exp(right) * (right - found), -1)


def test_every_architecture_has_a_small_model() -> None:
    assert {tiny.architecture for tiny in TINY_MODELS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("layout", ["one", "two"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_engine_computes_what_the_reference_computes(name: str, layout: str, tmp_path: Path, kernels: Kernels) -> None:
    arrays = TINY_MODELS[name].write(tmp_path / "tiny.gguf")
    with ModelFile.open(tmp_path / "tiny.gguf") as model:
        parts = layouts(model)[layout]
        found, right = engine_logits(kernels, model, parts), reference_logits(model, parts, arrays)
        assert np.linalg.norm(found - right) / np.linalg.norm(right) < 1e-3


def test_longrope_ends_where_its_first_factors_do(tmp_path: Path) -> None:
    """And its files have both sets, or are refused."""
    tiny = TINY_MODELS["phi3-longrope"]
    tiny.write(tmp_path / "tiny.gguf")
    with ModelFile.open(tmp_path / "tiny.gguf") as model:
        assert (tiny.context, model.hyperparameters.context_length) == (512, 64)
    without = replace(tiny, factors={"rope_factors_long.weight": tiny.factors["rope_factors_long.weight"]})
    without.write(tmp_path / "tiny.gguf")
    with (
        ModelFile.open(tmp_path / "tiny.gguf") as model,
        pytest.raises(ModelFileError, match=r"tensor rope_factors_short\.weight is missing"),
    ):
        _ = model.hyperparameters


@pytest.mark.parametrize("isa", [isa for isa, runs in list_isas() if runs])
@pytest.mark.parametrize("name", ["qwen2", "gemma3-linear-capped", "gemma3-capped-scores", "phi3-partly-turned"])
def test_every_instruction_set_computes_what_the_reference_computes(name: str, isa: str, tmp_path: Path) -> None:
    arrays = TINY_MODELS[name].write(tmp_path / "tiny.gguf")
    with ModelFile.open(tmp_path / "tiny.gguf") as model:
        parts = layouts(model)["two"]
        found, right = engine_logits(Kernels(isa, 2), model, parts), reference_logits(model, parts, arrays)
        assert np.linalg.norm(found - right) / np.linalg.norm(right) < 1e-3


@pytest.mark.parametrize("name", TINY_MODELS)
def test_slices_weigh_what_the_file_holds(name: str, tmp_path: Path) -> None:
    """Heads, fused or not, and hidden units take their part; what is rounded up is less than a byte of each."""
    TINY_MODELS[name].write(tmp_path / "tiny.gguf")
    with ModelFile.open(tmp_path / "tiny.gguf") as model:
        h, tensors = model.hyperparameters, model.gguf.tensors
        shape = measure_shape(h, tensors.values())
        stored = sum(t.size for t in tensors.values() if h.tied_head or t.name != "token_embd.weight")
        assert 0 <= shape.slice_bytes(whole_slice(h)) - stored <= HEADS + FFN + VOCAB
        matrices = 2 * h.n_layers * 4 * h.dim * h.head_dim
        assert 0 <= h.n_heads * shape.head_bytes - matrices * h.n_heads <= h.n_layers * 4 * HEADS * h.head_dim
        assert 0 <= shape.kv_head_bytes - matrices <= h.n_layers * 4 * 2 * h.head_dim  # biases


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_shape_03_width_of_a_head_is_a_number_of_its_own(name: str, tmp_path: Path, kernels: Kernels) -> None:
    """64 values, 4 heads of 32: twice as many query values as the stream has."""
    arrays = TINY_MODELS[name].write(tmp_path / "tiny.gguf")
    with ModelFile.open(tmp_path / "tiny.gguf") as model:
        h, whole = model.hyperparameters, [whole_slice(model.hyperparameters)]
        assert (h.dim, h.n_heads, h.head_dim) == (64, 4, 32)
        program = compile_program(h, whole[0], 1, {n: t.format for n, t in model.gguf.tensors.items()})
        assert {op.f0 for op in program.ops if op.opcode is Opcode.ATTENTION} == {32**-0.5}
        found, right = engine_logits(kernels, model, whole), reference_logits(model, whole, arrays)
        assert np.linalg.norm(found - right) / np.linalg.norm(right) < 1e-4


@pytest.mark.skipif(not has_torch, reason="torch and transformers are not here: pip install '.[reference]'")
@pytest.mark.parametrize("layout", ["one", "two"])
@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name not in NOT_IN_TRANSFORMERS])
@pytest.mark.filterwarnings("default")  # of others
def test_distributions_are_those_of_transformers(name: str, layout: str, tmp_path: Path, kernels: Kernels) -> None:
    from reference.torch_forward import logits_of

    arrays = TINY_MODELS[name].write(tmp_path / "tiny.gguf")
    right = logits_of(TINY_MODELS[name], arrays, TOKENS)
    with ModelFile.open(tmp_path / "tiny.gguf") as model:
        found = engine_logits(kernels, model, layouts(model)[layout])
    assert divergences(right, found).max() < MOST_KL
