"""Slices: which part of a model a rank holds. Below engine, layout and the wire, since all three need it.

A slice is three half-open ranges: query heads, hidden units of the feed-forward, vocabulary rows. Any may be empty. KV
heads follow from query heads, so that a KV head is shared by two ranks where a cut falls inside its group. Pure.
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

    def holds(self, other: Slice) -> bool:
        """Whether all of another slice is in this one."""
        pairs = ((self.heads, other.heads), (self.ffn, other.ffn), (self.vocab, other.vocab))
        return all(not theirs or (ours.start <= theirs.start and theirs.stop <= ours.stop) for ours, theirs in pairs)

    def kv_heads(self, group: int) -> Range:
        """KV heads that these query heads read, `group` query heads to one KV head."""
        if not self.heads:
            return Range(0, 0)
        return Range(self.heads.start // group, -(-self.heads.stop // group))


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model's numbers and bytes as far as cutting it goes; weight_sizes.measure_shape makes it of a file.

    Bytes are those of all layers together and as stored; packing keeps them to within a percent. The embedding table
    is not among them: it stays a memory map. head_align, ffn_align: cuts fall on multiples of these, else a quantized
    block of the matching down-projection would be split.
    """

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    context_length: int  # positions the model was made for
    head_bytes: int  # query and output projection of one query head
    kv_head_bytes: int  # key and value projection of one KV head
    ffn_unit_bytes: int  # gate, up and down of one hidden unit
    vocab_row_bytes: int  # one row of the head
    fixed_bytes: int  # norms and the like, on every rank
    head_align: int
    ffn_align: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.n_heads // self.n_kv_heads

    def whole(self) -> Slice:
        """The slice of a device that holds everything."""
        return Slice(Range(0, self.n_heads), Range(0, self.ffn_dim), Range(0, self.vocab_size))

    def slice_bytes(self, part: Slice) -> int:
        """Bytes of packed weights of a slice."""
        heads = len(part.heads) * self.head_bytes + len(part.kv_heads(self.group)) * self.kv_head_bytes
        return heads + len(part.ffn) * self.ffn_unit_bytes + len(part.vocab) * self.vocab_row_bytes + self.fixed_bytes

    def position_bytes(self, part: Slice) -> int:
        """Bytes of the f16 KV cache of a slice for one position of one slot."""
        return 2 * 2 * self.n_layers * len(part.kv_heads(self.group)) * self.head_dim

    def covers(self, parts: tuple[Slice, ...]) -> bool:
        """Whether the parts, in order, hold each head, hidden unit and vocabulary row exactly once."""
        heads = _adjoin([part.heads for part in parts], self.n_heads)
        ffn = _adjoin([part.ffn for part in parts], self.ffn_dim)
        return heads and ffn and _adjoin([part.vocab for part in parts], self.vocab_size)


def _adjoin(ranges: list[Range], end: int) -> bool:
    """Whether non-empty ranges follow one another from 0 to end."""
    position = 0
    for part in ranges:
        if part.start != position or part.stop < part.start:
            return False
        position = part.stop
    return position == end
