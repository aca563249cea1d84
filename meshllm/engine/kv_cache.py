"""Which tokens each slot of a KV cache holds, so that a new sequence can start from what is already there.

Rule: this is bookkeeping. The cache itself is native; what stands here is true only if every batch and every copy is
told. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshllm.errors import LocalProtocolError


class SlotHistory:
    """The tokens at positions 0, 1, ... of each slot. n_slots sequences of at most `context` tokens."""

    def __init__(self, n_slots: int, context: int) -> None:
        self.context = context
        self._tokens: list[list[int]] = [[] for _ in range(n_slots)]

    @property
    def n_slots(self) -> int:
        """How many slots there are."""
        return len(self._tokens)

    def tokens(self, slot: int) -> Sequence[int]:
        """What the slot holds; do not change it."""
        return self._tokens[slot]

    def append(self, slot: int, position: int, tokens: Sequence[int]) -> None:
        """Tokens were computed at `position` and on; what stood there before is gone."""
        held = self._tokens[slot]
        if position > len(held) or position + len(tokens) > self.context:
            raise LocalProtocolError(
                f"slot {slot}: tokens {position} to {position + len(tokens)} do not follow the {len(held)} it holds "
                f"or pass its {self.context} positions"
            )
        held[position:] = tokens

    def truncate(self, slot: int, n: int) -> None:
        """Only the first n tokens stand."""
        del self._tokens[slot][n:]

    def copy(self, to: int, from_: int, n: int) -> None:
        """`to` holds the first n tokens of `from_`."""
        if n > len(self._tokens[from_]):
            raise LocalProtocolError(f"slot {from_} holds {len(self._tokens[from_])} tokens, {n} were to be copied")
        self._tokens[to] = self._tokens[from_][:n]

    def common_prefix(self, slot: int, tokens: Sequence[int]) -> int:
        """How many tokens the slot and `tokens` begin alike."""
        held = self._tokens[slot]
        wanted = list(tokens[: len(held)])
        low, high = 0, len(wanted)
        while low < high:  # comparing slices is quick, one token after the other is not
            middle = (low + high + 1) // 2
            if held[low:middle] == wanted[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low

    def longest_common_prefix(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The slot that begins most like `tokens`, and how many tokens alike; the first such slot."""
        lengths = [self.common_prefix(slot, tokens) for slot in range(self.n_slots)]
        best = max(range(self.n_slots), key=lambda slot: lengths[slot])
        return best, lengths[best]
