"""Slices: which part of a model a rank holds. Below engine, layout and the wire, since all three need it.

A slice is three half-open ranges: query heads, hidden units of the feed-forward, vocabulary rows. Any may be empty. KV heads
follow from query heads, so that a KV head is shared by two ranks where a cut falls inside its group. Pure.
"""

from __future__ import annotations

import msgspec


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Half-open: start <= i < stop."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part: query heads, feed-forward hidden units, vocabulary rows."""

    heads: Range
    ffn: Range
    vocab: Range

    def kv_heads(self, group: int) -> Range:
        """KV heads that these query heads read, `group` query heads to one KV head."""
        if not self.heads:
            return Range(0, 0)
        return Range(self.heads.start // group, -(-self.heads.stop // group))
