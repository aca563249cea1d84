"""Draws from split vocabularies: llama.cpp's samplers as facts, and the promise that a layout changes nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.ranks import cut

from meshllm.engine.sampling import CANDIDATE_LIMIT, Candidates, draw, penalties_of, run_chain, select_candidates
from meshllm.errors import KernelError, RemoteProtocolError
from meshllm.model.slicing import Range
from meshllm.parameters import SampledToken, SamplingParameters

VOCAB = 3000


def make_logits(seed: int, n: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, n).astype(np.float32)


def draw_over(
    logits: np.ndarray, parts: list[Range], sampling: SamplingParameters, position: int = 5, **history: Any
) -> SampledToken:
    """Each part's candidates over the wire, then one draw."""
    offers = []
    for part in parts:
        found = select_candidates(logits[part.start : part.stop].copy(), part, sampling, position, **history)
        offers.append(Candidates.from_bytes(found.to_bytes(), part))
    return draw(offers, sampling, position)


CHAINS = [
    SamplingParameters(temperature=0),
    SamplingParameters(temperature=1.3, seed=7),
    SamplingParameters(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=2**64 - 1),
    SamplingParameters(temperature=2.0, top_p=0.9, seed=3),
    SamplingParameters(temperature=0.7, min_p=0.01, seed=4, logprobs=5),
    SamplingParameters(temperature=1.0, seed=5, logprobs=0),
    SamplingParameters(temperature=0, logprobs=20, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParameters(temperature=1.0, seed=6, presence_penalty=1.5, logprobs=3),
    SamplingParameters(temperature=1.0, seed=6, top_k=5, repetition_penalty=1.3, presence_penalty=-1.0),
]


@pytest.mark.parametrize("sampling", CHAINS)
@given(seed=st.integers(0, 2**32), ends=st.lists(st.integers(0, VOCAB), max_size=4), position=st.integers(0, 2**20))
def test_a_split_vocabulary_draws_what_a_whole_one_draws(
    sampling: SamplingParameters, seed: int, ends: list[int], position: int
) -> None:
    logits = make_logits(seed)
    history = {"history": [1, 5, 5, 2999, 1500, 5], "n_prompt": 2}
    whole = draw_over(logits, [Range(0, VOCAB)], sampling, position, **history)
    split = draw_over(logits, cut(VOCAB, *sorted(ends)), sampling, position, **history)
    assert split.token == whole.token
    assert split.logprob == (None if whole.logprob is None else pytest.approx(whole.logprob, abs=1e-6))
    assert [top.token for top in split.top] == [top.token for top in whole.top]


@given(st.sampled_from(CHAINS), st.integers(0, 2**32))
def test_logits_are_unchanged_by_penalties(sampling: SamplingParameters, seed: int) -> None:
    logits = make_logits(seed, 100)
    before = logits.copy()
    select_candidates(logits, Range(50, 150), sampling, 0, [60, 61, 7, 149], 1)
    np.testing.assert_array_equal(logits, before)


def test_seed_and_position_decide_the_draw() -> None:
    logits = make_logits(0)
    parts = [Range(0, VOCAB)]
    draws = [draw_over(logits, parts, SamplingParameters(seed=s), p).token for s in range(20) for p in range(20)]
    again = [draw_over(logits, parts, SamplingParameters(seed=s), p).token for s in range(20) for p in range(20)]
    assert draws == again
    assert len(set(draws)) > 50


@pytest.mark.parametrize(
    "sampling", [SamplingParameters(temperature=1.5), SamplingParameters(temperature=1.5, top_k=5)]
)
def test_draws_have_the_probabilities_of_softmax(sampling: SamplingParameters) -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 0.5], np.float32)
    right = np.exp(logits / 1.5) / np.exp(logits / 1.5).sum()
    n = 4000
    counts = Counter(draw_over(logits, cut(5, 2), sampling, position).token for position in range(n))
    for token in range(5):
        assert counts[token] / n == pytest.approx(right[token], abs=4 * math.sqrt(right[token] / n))


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    """SAMP-01."""
    logits = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    for sampling in (
        SamplingParameters(temperature=0),
        SamplingParameters(temperature=0, seed=1),
        SamplingParameters(temperature=1e-9),
        SamplingParameters(temperature=0, top_p=0.1),
        SamplingParameters(temperature=1.0, top_k=1, seed=9),
    ):
        for parts in (cut(4), cut(4, 2), cut(4, 1, 2, 3)):
            assert draw_over(logits, parts, sampling).token == 1
    assert draw_over(logits, cut(4), SamplingParameters(top_k=99, seed=1)).token in range(4)


def test_only_nan_is_an_error_and_some_nan_is_not() -> None:
    for sampling in CHAINS:
        logits = np.full(10, np.nan, np.float32)
        with pytest.raises(KernelError, match="no logit is a number"):
            draw_over(logits, cut(10, 5), sampling)
        logits[7] = 1.0
        assert draw_over(logits, cut(10, 5), sampling).token == 7


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = make_logits(1)
    right = logits - np.logaddexp.reduce(logits.astype(np.float64))
    sampling = SamplingParameters(temperature=0, logprobs=3, repetition_penalty=2.0)
    best = np.argsort(-logits)[:3]
    token = draw_over(logits, cut(VOCAB, 700), sampling, history=[int(best[0])])
    assert token.token != best[0]
    assert token.logprob == pytest.approx(right[token.token], abs=1e-6)
    assert [top.token for top in token.top] == best.tolist()
    assert [top.logprob for top in token.top] == pytest.approx(right[best].tolist(), abs=1e-6)


def test_chains_leave_what_llama_cpp_leaves(golden: Callable[[str], Any]) -> None:
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    compared = 0
    for case in golden("sampler_vectors")["chains"]:
        steps = [name for name, _ in case["chain"]]
        if not set(steps) <= names.keys() or (len(steps) > 1 and steps[0] == "temp"):
            continue  # samplers and orders that are not ours
        sampling = SamplingParameters(**{names[name]: values[0] for name, values in case["chain"]})
        logits = np.array(case["logits"], np.float32)
        if sampling.is_greedy:
            assert [draw_over(logits, cut(len(logits)), sampling).token, 1] == case["probs"][0]
            continue
        order = np.argsort(-logits, kind="stable")
        kept = run_chain(logits[order], float(np.logaddexp.reduce(logits.astype(np.float64))), sampling)
        found = np.exp(kept - np.logaddexp.reduce(kept))
        assert found.tolist() == pytest.approx([p for _, p in case["probs"]], abs=2e-4)
        if len(set(case["logits"])) == len(logits):  # without ties the order is one
            assert order[: len(kept)].tolist() == [token for token, _ in case["probs"]]
        compared += 1
    assert compared > 40


def test_penalties_are_llama_cpps(golden: Callable[[str], Any]) -> None:
    for case in golden("sampler_vectors")["penalties"]:
        history = case["history"]
        n = max(case["last_n"], 0)
        sampling = SamplingParameters(
            repetition_penalty=case["repeat"], frequency_penalty=case["frequency"], presence_penalty=case["presence"]
        )
        logits = np.array(case["logits"], np.float32)
        recent = history[-n:] if n else []
        changed = penalties_of(sampling, recent, 0, Range(0, len(logits)))
        logits[changed.index] = changed.apply(logits[changed.index])
        np.testing.assert_allclose(logits, case["after"], atol=1e-5)


def test_frequency_counts_the_answer_and_repetition_the_last_tokens_of_both() -> None:
    sampling = SamplingParameters(repetition_penalty=2.0, frequency_penalty=0.5)
    history = [1] + [9] * 100 + [2, 3, 3]  # 1 is out of the window; 9, 2, 3 are in it; the answer is 3, 3
    changed = penalties_of(sampling, history, len(history) - 2, Range(0, 20))
    assert changed.index.tolist() == [2, 3, 9]
    assert changed.apply(np.array([4, 4, -4], np.float32)).tolist() == [2, 1, -8]


@given(st.binary(max_size=200), st.integers(0, 50), st.integers(0, 50))
def test_any_bytes_as_candidates_are_refused_or_checked(data: bytes, start: int, length: int) -> None:
    vocab = Range(start, start + length)
    try:
        found = Candidates.from_bytes(data, vocab)
    except RemoteProtocolError:
        return
    assert all(vocab.start <= token < vocab.stop for token in [*found.ids, *found.top_ids])


def test_candidates_of_another_slice_are_refused() -> None:
    sampling = SamplingParameters(temperature=0)
    data = select_candidates(np.zeros(5, np.float32), Range(10, 15), sampling, 0).to_bytes()
    assert Candidates.from_bytes(data, Range(10, 15)).ids.tolist() == [10]
    for wrong in (Range(11, 15), Range(0, 10)):
        with pytest.raises(RemoteProtocolError):
            Candidates.from_bytes(data, wrong)
    with pytest.raises(RemoteProtocolError):
        Candidates.from_bytes(data + b"\0", Range(10, 15))


def test_candidates_are_a_few_kilobytes_at_most() -> None:
    logits = make_logits(0)
    sizes = [len(select_candidates(logits, Range(0, VOCAB), s, 0, [1], 0).to_bytes()) for s in CHAINS]
    assert max(sizes) < 12 * CANDIDATE_LIMIT + 300
    assert sizes[0] < 60
