"""How a continuation is to be drawn: one frozen value that the API makes, the wire carries and the sampler obeys.

A leaf: imports nothing of ours but errors. Ranges are checked where a request comes in (`api/openai.py`), types on the
wire.
"""

from __future__ import annotations

import msgspec

MAX_TOP_LOGPROBS = 20
MIN_REPETITION_PENALTY = 0.01  # smaller ones divide a logit beyond f32


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """temperature 0 is greedy (lowest id on a tie). Order: penalties, top_k, top_p, min_p, temperature, as llama.cpp's
    default.

    seed: any value in [0, 2^64); the root draws one where a request has none. logprobs: None for none, else how many
    alternatives (0..20) are reported beside the chosen token's own; they are of the raw distribution, before
    penalties.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the draw is the argmax: temperature 0 or so small that dividing by it overflows."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token id and its natural-log probability."""

    token: int
    logprob: float


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A drawn token; with logprobs asked for, its own and the best alternatives, most likely first."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
