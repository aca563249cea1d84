"""How long steps may take, from how long they took: when a peer counts as hung, how long a prompt chunk is. Pure."""

from __future__ import annotations

from typing import Final

EASE_S: Final = 2.0  # a peer may be late by this before it counts as hung
EASE_FACTOR: Final = 3.0  # times the expected step: two epochs may take turns, a device may slow down
FEW_TOKENS: Final = 8  # up to this a step costs about what one token costs
FADE: Final = 0.9  # of the slowest step seen, for each step since
MAX_EXPECTED_S: Final = 60.0


class Patience:
    """How long to wait for a peer within a step: EASE_S beyond what a step takes, as predicted and then as seen."""

    def __init__(self, decode_tok_s: float, prefill_tok_s: float) -> None:
        """The layout's predictions; 0 or less if there is none."""
        self._few_s = 1.0 / decode_tok_s if decode_tok_s > 0 else 0.0
        self._token_s = 1.0 / prefill_tok_s if prefill_tok_s > 0 else 0.0

    def observe(self, n_tokens: int, seconds: float) -> None:
        """A step of n_tokens took so long, waiting included."""
        if n_tokens <= FEW_TOKENS:
            self._few_s = max(seconds, FADE * self._few_s)
        else:
            self._token_s = max(seconds / n_tokens, FADE * self._token_s)

    def expected_s(self, n_tokens: int) -> float:
        """What a step of n_tokens may take."""
        more = self._token_s * n_tokens if n_tokens > FEW_TOKENS else 0.0
        return min(self._few_s + more, MAX_EXPECTED_S)

    def limit_s(self, n_tokens: int) -> float:
        """How long to wait before a peer counts as hung."""
        return EASE_S + EASE_FACTOR * self.expected_s(n_tokens)


STEP_S: Final = 0.5  # a step with prompt tokens should not take longer: a cancel waits for it
DECODING_STEP_S: Final = 0.15  # nor this while others decode
PROMPT_CHUNKS: Final = (256, 128, 64, 32)  # tokens; few sizes, so that the same prompt is mostly cut the same way


class PromptPace:
    """How many prompt tokens a step may have so that it stays short, as earlier steps went."""

    def __init__(self, prefill_tok_s: float) -> None:
        """The layout's prediction; 0 or less if there is none."""
        self._token_s = 1.0 / prefill_tok_s if prefill_tok_s > 0 else 0.0

    def observe(self, n_tokens: int, seconds: float) -> None:
        """A step of n_tokens took so long."""
        if n_tokens >= PROMPT_CHUNKS[-1]:
            self._token_s += 0.5 * (seconds / n_tokens - self._token_s)

    def limit(self, decoding: bool) -> int:
        """Prompt tokens for the next step. decoding: other sequences decode in it."""
        target_s = DECODING_STEP_S if decoding else STEP_S
        return next((n for n in PROMPT_CHUNKS if n * self._token_s <= target_s), PROMPT_CHUNKS[-1])
