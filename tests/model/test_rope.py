"""How fast rotary pairs turn: published factors, formulas written out anew, and what a file must say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meshllm.errors import ModelFileError
from meshllm.model.gguf import open_gguf
from meshllm.model.hyperparameters import read_hyperparameters
from meshllm.model.rope import RopeScaling, inverse_frequencies

Writer = Callable[..., bytes]


def plain(theta: float, dim: int) -> np.ndarray:
    return theta ** (-np.arange(0, dim, 2) / dim)


@pytest.mark.parametrize("case", ["SHAPE-07"], indirect=True)
@pytest.mark.parametrize(("dim", "factor", "first"), [(128, 8.0, 29), (64, 32.0, 15)])
def test_llama3_numbers_give_the_factors_of_its_files(
    case: dict[str, Any], dim: int, factor: float, first: int
) -> None:
    published = next(text for name, text in case["input"]["values"].items() if f"head_dim {dim}" in name)
    between = [float(word) for word in published.split("= 1, ")[1].split(", ")[0].split()[1:] if word != "="]
    found = plain(500000.0, dim) / inverse_frequencies(500000.0, dim, RopeScaling("llama3", factor, 8192, 1.0, 4.0))
    last = first + len(between)
    assert len(between) >= 3
    np.testing.assert_allclose(found[:first], 1, rtol=1e-6)
    np.testing.assert_allclose(found[first:last], between, rtol=1e-5)
    np.testing.assert_allclose(found[last:], factor, rtol=1e-6)


def test_linear_divides_all_and_none_nothing() -> None:
    np.testing.assert_allclose(inverse_frequencies(1e4, 64, RopeScaling()), plain(1e4, 64))
    np.testing.assert_allclose(inverse_frequencies(1e4, 64, RopeScaling("linear", 4.0)), plain(1e4, 64) / 4)
    np.testing.assert_allclose(inverse_frequencies(1e4, 64, RopeScaling("longrope", 4.0, 512)), plain(1e4, 64))


@pytest.mark.parametrize(("theta", "dim", "original"), [(1e6, 128, 32768), (1e4, 64, 4096), (1e4, 8, 64)])
def test_yarn_leaves_fast_pairs_and_stretches_slow_ones(theta: float, dim: int, original: int) -> None:
    """Peng 2023, section 3.2: a ramp over pairs between those that turn 32 times and once, ends rounded outwards."""
    found = np.array(inverse_frequencies(theta, dim, RopeScaling("yarn", 4.0, original, 1.0, 32.0)))
    turns = original * plain(theta, dim) / (2 * math.pi)
    fastest_kept = max(int(np.sum(turns > 32)) - 1, 0)  # the last pair that turns more often
    slowest = int(np.sum(turns >= 1))  # the first that turns less than once
    pairs = np.arange(dim // 2)
    stretched = np.clip((pairs - fastest_kept) / (min(slowest, dim - 1) - fastest_kept), 0, 1)
    np.testing.assert_allclose(found, plain(theta, dim) * (1 - stretched * 3 / 4), rtol=1e-9)


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}


def read(write_gguf: Writer, tiny: Any, numbers: dict[str, object], **keys: object) -> RopeScaling:
    named = {f"llama.rope.scaling.{key}": value for key, value in numbers.items()}
    raw = write_gguf({**tiny[0], **named, **keys}, tiny[1])
    return read_hyperparameters(open_gguf(memoryview(raw), "m.gguf")).rope_scaling


def test_yarn_warms_attention_with_the_factor(write_gguf: Writer, tiny: Any) -> None:
    found = read(write_gguf, tiny, YARN)
    assert (found.low, found.high, found.original_context) == (1.0, 32.0, 64)
    assert found.attention_factor == pytest.approx(1 + 0.1 * math.log(4))
    assert read(write_gguf, tiny, YARN | {"attn_factor": 2.0}).attention_factor == pytest.approx(2 + 0.2 * math.log(4))
    assert read(write_gguf, tiny, YARN | {"yarn_beta_fast": 16.0}).high == 16.0


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"type": "yarn", "factor": 4.0}, "original_context_length is missing"),
        (YARN | {"factor": 0.0}, "rope.scaling.factor is 0"),
        (YARN | {"factor": float("inf")}, "rope.scaling.factor is inf"),
        (YARN | {"original_context_length": 0}, "original_context_length is 0, expected 1 to"),
        (YARN | {"yarn_beta_fast": 0.5}, "yarn_beta_fast is 0.5, expected over 1"),
        (YARN | {"type": "llama3"}, "low_freq_factor is missing"),
        (YARN | {"type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor is 4"),
        ({"type": "longrope"}, "original_context_length is missing"),
        ({"type": "su"}, "rope.scaling.type is su, expected none, linear, llama3, yarn or longrope"),
    ],
)
def test_a_stretching_that_cannot_be_is_refused_by_its_key(
    write_gguf: Writer, tiny: Any, numbers: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelFileError, match=r"^m\.gguf: [^\n]+$") as caught:
        read(write_gguf, tiny, numbers)
    assert words in str(caught.value)
