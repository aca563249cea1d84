"""How far a greedy answer can be held to another: to the first step at which roundings may decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

CLEAR_MARGIN: Final = 0.5  # nats between best and second: below it either may come first, since activations are rounded


def first_small(margins: Sequence[float], limit: float = CLEAR_MARGIN) -> int:
    """Steps before the first margin under the limit."""
    return next((i for i, margin in enumerate(margins) if margin < limit), len(margins))
