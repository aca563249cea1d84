"""From logits that are spread over ranks to one token. Each rank calls `select_candidates` on its part of the
vocabulary, the driver `draw` on what all of them sent.

Randomness is Gumbel noise of (seed, position, token id) and nothing else, so a token does not depend on how the
vocabulary was split. Plain temperature draws from the whole softmax: the largest of logits / temperature + noise over
all slices. With top_k, top_p or min_p the chain (penalties, top_k, top_p, min_p, temperature: llama.cpp's order) runs
over the CANDIDATE_LIMIT best tokens of all; probabilities for top_p are of the whole vocabulary. Pure.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from meshllm.errors import KernelError, RemoteProtocolError
from meshllm.kernels.binding import gumbel, gumbel_argmax, log_sum_exp, top_k
from meshllm.model.slicing import Range
from meshllm.parameters import MAX_TOP_LOGPROBS, SampledToken, SamplingParameters, TokenLogprob

_NO_LOGIT: Final = "no logit is a number: the weights are damaged; get the file again and restart the daemons"
CANDIDATE_LIMIT: Final = 512
REPETITION_WINDOW: Final = 64  # tokens that the repetition penalty looks back on, as llama.cpp's default

Ids: TypeAlias = npt.NDArray[np.uint32]
Logits: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Best:
    """The winner of a slice for plain temperature: logit / temperature + noise, and the logit before penalties."""

    token: int
    perturbed: float
    raw: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """What one slice of the vocabulary offers for one row of logits.

    ids, logits: its best tokens after penalties, best first; raw: their logits before penalties. top_ids, top_raw: the
    best before penalties, for logprobs. log_sum_exp, raw_log_sum_exp: over the whole slice after and before penalties;
    -inf for an empty slice, NaN where the request does not need it.
    """

    ids: Ids
    logits: Logits
    raw: Logits
    top_ids: Ids
    top_raw: Logits
    log_sum_exp: float
    raw_log_sum_exp: float
    best: Best | None

    def to_bytes(self) -> bytes:
        """For the wire: a header, then the arrays, little-endian."""
        best = self.best or Best(0, math.nan, math.nan)
        unpenalized = np.array_equal(self.logits, self.raw)  # then the raw ones need not travel
        header = _HEADER.pack(
            len(self.ids), len(self.top_ids), self.best is not None, unpenalized,
            best.token, best.raw, best.perturbed, self.log_sum_exp, self.raw_log_sum_exp,
        )  # fmt: skip
        parts = [self.ids, self.logits, self.top_ids, self.top_raw, *([] if unpenalized else [self.raw])]
        return header + b"".join(part.astype(part.dtype.newbyteorder("<"), copy=False).tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes, vocab: Range) -> Candidates:
        """Raises RemoteProtocolError unless data is whole and every id lies in the sender's range."""
        if len(data) < _HEADER.size:
            raise RemoteProtocolError(f"candidates of {len(data)} bytes, expected at least {_HEADER.size}")
        n, n_top, has_best, unpenalized, token, raw, perturbed, lse, raw_lse = _HEADER.unpack_from(data)
        expected = _HEADER.size + (8 if unpenalized else 12) * n + 8 * n_top
        if n > CANDIDATE_LIMIT or n_top > MAX_TOP_LOGPROBS or len(data) != expected:
            raise RemoteProtocolError(f"candidates of {len(data)} bytes, {n} and {n_top} tokens need {expected}")
        words = np.frombuffer(data, "<u4", offset=_HEADER.size).astype(np.uint32, copy=False)
        ids, logits, top_ids, top_raw, raw_logits = np.split(words, [n, 2 * n, 2 * n + n_top, 2 * (n + n_top)])
        seen = np.concatenate([ids, top_ids, np.array([token] if has_best else [], np.uint32)])
        if np.any(seen < vocab.start) or np.any(seen >= vocab.stop):
            raise RemoteProtocolError(f"candidates outside of the sender's vocabulary {vocab.start} to {vocab.stop}")
        floats = [part.view(np.float32) for part in (logits, logits if unpenalized else raw_logits, top_raw)]
        best = Best(token, perturbed, raw) if has_best else None
        return cls(ids, floats[0], floats[1], top_ids, floats[2], lse, raw_lse, best)


_HEADER: Final = struct.Struct("<HH??xxIfddd")  # see Candidates.to_bytes


def select_candidates(
    logits: Logits,
    vocab: Range,
    sampling: SamplingParameters,
    position: int,
    history: Sequence[int] = (),
    n_prompt: int = 0,
) -> Candidates:
    """What this slice offers. logits: f32 [len(vocab)], contiguous; changed while this runs, unchanged after it.

    position: of the row, the last token's. history: all tokens of the sequence, of which n_prompt are the prompt;
    needed with penalties only.
    """
    n_top = 0 if sampling.logprobs is None else sampling.logprobs
    top_ids, top_raw = top_k(logits, n_top)
    raw_sum = log_sum_exp(logits) if sampling.logprobs is not None else math.nan
    touched = penalties_of(sampling, history, n_prompt, vocab) if sampling.has_penalties else None
    before = None
    if touched is not None:
        before = logits[touched.index]
        logits[touched.index] = touched.apply(before)
    try:
        indices, kept = top_k(logits, _count_candidates(sampling))
        best = None
        if _is_plain_temperature(sampling):
            best = gumbel_argmax(sampling.seed, position, vocab.start, sampling.temperature, logits)
        needs_sum = sampling.top_p < 1 and not _is_plain(sampling)
        penalized_sum = log_sum_exp(logits) if needs_sum else math.nan
    finally:
        if touched is not None:
            logits[touched.index] = before
    return Candidates(
        ids=indices + np.uint32(vocab.start),
        logits=kept,
        raw=logits[indices],
        top_ids=top_ids + np.uint32(vocab.start),
        top_raw=top_raw,
        log_sum_exp=penalized_sum,
        raw_log_sum_exp=raw_sum,
        best=None if best is None else Best(best[0] + vocab.start, best[1], float(logits[best[0]])),
    )


def draw(parts: Sequence[Candidates], sampling: SamplingParameters, position: int) -> SampledToken:
    """The token drawn from the candidates of all slices. Raises KernelError where no logit is a number."""
    if _is_plain_temperature(sampling):
        token, raw = _largest_perturbed(parts)
    else:
        ids = np.concatenate([part.ids for part in parts])
        logits = np.concatenate([part.logits for part in parts])
        raws = np.concatenate([part.raw for part in parts])
        if not len(ids):
            raise KernelError(_NO_LOGIT)
        order = np.lexsort((ids, -logits))[: 1 if sampling.is_greedy else CANDIDATE_LIMIT]
        ids, logits, raws = ids[order], logits[order], raws[order]
        chosen = 0
        if not sampling.is_greedy:
            scaled = run_chain(logits, _combined_sum([part.log_sum_exp for part in parts]), sampling)
            chosen = int(np.argmax(scaled + gumbel(sampling.seed, position, ids[: len(scaled)])))
        token, raw = int(ids[chosen]), float(raws[chosen])
    if sampling.logprobs is None:
        return SampledToken(token)
    total = _combined_sum([part.raw_log_sum_exp for part in parts])
    return SampledToken(token, raw - total, _top_logprobs(parts, total, sampling.logprobs))


def run_chain(logits: Logits, total: float, sampling: SamplingParameters) -> npt.NDArray[np.float64]:
    """logits / temperature of the tokens that top_k, top_p and min_p leave, which are the first ones.

    logits: best first. total: log of the sum of exp over the whole vocabulary, which top_p counts against unless top_k
    has cut it.
    """
    kept = logits.astype(np.float64)
    if sampling.top_k:
        kept = kept[: sampling.top_k]
        total = float(np.logaddexp.reduce(kept))
    if sampling.top_p < 1:
        reached = np.cumsum(np.exp(kept - total)) >= sampling.top_p
        kept = kept[: int(np.argmax(reached)) + 1] if reached.any() else kept
    if sampling.min_p > 0:
        n_kept = int(np.count_nonzero(kept >= kept[0] + math.log(sampling.min_p)))
        kept = kept[: max(n_kept, 1)]
    return kept / sampling.temperature


@dataclass(frozen=True, slots=True)
class Penalties:
    """Which logits of a slice change, and how: first by repetition (where repeated), then by the amount."""

    index: npt.NDArray[np.intp]
    repeated: npt.NDArray[np.bool_]
    amount: Logits  # presence + frequency * count
    repetition: float

    def apply(self, logits: Logits) -> Logits:
        """The changed logits of `index`."""
        factor = np.float32(self.repetition)
        scaled = np.where(logits <= 0, logits * factor, logits / factor)
        return np.where(self.repeated, scaled, logits).astype(np.float32) - self.amount


def penalties_of(
    sampling: SamplingParameters, history: Sequence[int], n_prompt: int, vocab: Range, window: int = REPETITION_WINDOW
) -> Penalties:
    """Repetition counts the last `window` tokens, prompt or not (as llama.cpp); frequency and presence the tokens
    answered so far (as OpenAI's API says)."""
    recent = set(history[-window:]) if sampling.repetition_penalty != 1 and window > 0 else set()
    answered = Counter(history[n_prompt:])
    ids = sorted(token for token in recent | answered.keys() if vocab.start <= token < vocab.stop)
    counts = np.array([answered[token] for token in ids], np.float32)
    amount = counts * np.float32(sampling.frequency_penalty) + (counts > 0) * np.float32(sampling.presence_penalty)
    return Penalties(
        index=np.array(ids, np.intp) - vocab.start,
        repeated=np.array([token in recent for token in ids], np.bool_),
        amount=amount.astype(np.float32),
        repetition=sampling.repetition_penalty,
    )


def _is_plain(sampling: SamplingParameters) -> bool:
    return sampling.is_greedy or _is_plain_temperature(sampling)


def _is_plain_temperature(sampling: SamplingParameters) -> bool:
    """Whether the draw is from the whole softmax."""
    return not (sampling.is_greedy or sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0)


def _count_candidates(sampling: SamplingParameters) -> int:
    if sampling.is_greedy:
        return 1
    if _is_plain_temperature(sampling):
        return 0
    return min(sampling.top_k or CANDIDATE_LIMIT, CANDIDATE_LIMIT)


def _largest_perturbed(parts: Sequence[Candidates]) -> tuple[int, float]:
    if not (offers := [part.best for part in parts if part.best is not None]):
        raise KernelError(_NO_LOGIT)
    winner = min(offers, key=lambda offer: (-offer.perturbed, offer.token))
    return winner.token, winner.raw


def _combined_sum(sums: Sequence[float]) -> float:
    """log of the sum of exp of all; empty slices have -inf, NaN counts as such."""
    known = [value for value in sums if value > -math.inf]
    largest = max(known, default=-math.inf)
    if math.isinf(largest):
        return largest
    return largest + math.log(sum(math.exp(value - largest) for value in known))


def _top_logprobs(parts: Sequence[Candidates], total: float, count: int) -> tuple[TokenLogprob, ...]:
    ids = np.concatenate([part.top_ids for part in parts])
    raws = np.concatenate([part.top_raw for part in parts])
    order = np.lexsort((ids, -raws))[:count]
    return tuple(TokenLogprob(int(ids[i]), float(raws[i]) - total) for i in order)
