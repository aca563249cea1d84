"""How far a greedy answer can be held to another: to the first step at which roundings may decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

CLEAR_MARGIN: Final = 0.5  # nats between best and second: below it either may come first, since activations are rounded


def first_small(margins: Sequence[float], limit: float = CLEAR_MARGIN) -> int:
    """Steps before the first margin under the limit."""
    return next((i for i, margin in enumerate(margins) if margin < limit), len(margins))


def clear_tokens(choice: dict[str, Any]) -> list[int]:
    """Of an answer with two logprobs: tokens up to the first that another might have taken the place of. What follows
    depends on how the layout rounds.
    """
    margins = [max(top.values()) - min(top.values()) for top in choice["logprobs"]["top_logprobs"]]
    return list(choice["token_ids"][: first_small(margins)])
