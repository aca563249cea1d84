"""Gemma 3 270M against llama.cpp's answers and float32: one KV head, so any second rank has a part of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.numpy_interpreter import NumpyInterpreter, Rows, run_ranks
from reference.ranks import Ranks, cut, slices
from reference.tiny_model import read_tensor

from meshllm.kernels.binding import Kernels
from meshllm.model.compiler import compile_program, whole_slice
from meshllm.model.model_file import ModelFile
from tests.margins import first_small

# Ends of heads (4), hidden units (2048) and vocabulary rows (262144) of all ranks but the last.
LAYOUTS = {
    "one": ([], [], []),
    "two": ([2], [1024], [131072]),
    "two-uneven": ([1], [1792], [1]),
    "two-one-without-heads": ([4], [512], [200000]),
    "three": ([1, 2], [512, 1280], [100000, 200000]),
}


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Iterator[ModelFile]:
    with ModelFile.open(gemma3_path) as model:
        yield model


@pytest.fixture(scope="module")
def cases(golden: Callable[[str], Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = golden("gemma3_vectors")["cases"]
    assert len(found) == 12
    return found


def test_prompts_are_tokenized_as_llama_cpp_does(gemma3: ModelFile, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        assert gemma3.tokenizer.encode(case["prompt"], parse_special=True, add_bos=True) == case["prompt_ids"]
        assert gemma3.tokenizer.decode(case["greedy_ids"]) == case["text"]


@pytest.mark.parametrize(("layout", "precision"), [*((layout, "f16") for layout in LAYOUTS), ("three", "f32")])
def test_ranks_follow_the_greedy_answers(
    layout: str, precision: str, gemma3: ModelFile, cases: list[dict[str, Any]], kernels: Kernels
) -> None:
    h = gemma3.hyperparameters
    heads, ffn, vocab = LAYOUTS[layout]
    parts = slices(cut(h.n_heads, *heads), cut(h.ffn_dim, *ffn), cut(h.vocab_size, *vocab))
    ranks = Ranks.load(kernels, gemma3, parts, precision=precision)  # type: ignore[arg-type]
    compared = 0
    for case in cases:
        if n := first_small(case["margins"]):
            assert ranks.greedy(case["prompt_ids"], n) == case["greedy_ids"][:n], case["prompt"]
            compared += n
    assert compared > 120
    ranks.close()


MOST_KL = 1.2e-2  # golden/README.md: what llama.cpp's rounding costs a small model in this format


def test_distributions_are_as_near_to_float32_as_llama_cpp(
    gemma3: ModelFile, cases: list[dict[str, Any]], kernels: Kernels
) -> None:
    """Its ten best of each prompt, and the whole distribution. float32 is the numpy reference's."""
    whole = whole_slice(gemma3.hyperparameters)
    formats = {name: tensor.format for name, tensor in gemma3.gguf.tensors.items()}
    program = compile_program(gemma3.hyperparameters, whole, 1, formats)
    exact = NumpyInterpreter(program, lambda name: read_tensor(gemma3, name), n_slots=len(cases), context=64)
    rows = [(t, i, slot) for slot, case in enumerate(cases) for i, t in enumerate(case["prompt_ids"])]
    last = np.cumsum([len(case["prompt_ids"]) for case in cases]) - 1
    tokens, positions, slots = zip(*rows, strict=True)
    rights = run_ranks([exact], Rows(tokens, positions, slots, last.tolist())).astype(np.float64)
    ranks = Ranks.load(kernels, gemma3, [whole])
    theirs, ours, divergences = [], [], []
    for case, logits in zip(cases, rights, strict=True):
        ranks.step(case["prompt_ids"], 0, [len(case["prompt_ids"]) - 1])
        right, found = (x - np.logaddexp.reduce(x) for x in (logits, ranks.logits(0).astype(np.float64)))
        best, logprobs = zip(*case["first_top"], strict=True)
        theirs.append(np.abs(np.array(logprobs) - right[list(best)]).mean())
        ours.append(np.abs(found - right)[list(best)].mean())
        divergences.append(np.sum(np.exp(right) * (right - found)))
    assert np.mean(ours) <= np.mean(theirs)
    assert np.mean(divergences) <= MOST_KL
    ranks.close()
