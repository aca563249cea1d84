"""One model over given devices: slices in proportion to speed, within memory, cut only where a cut is allowed. Pure.

Each kind of thing (KV groups, hidden units, vocabulary rows) is allotted by itself, since a phase waits for its slowest
rank. Where memory binds, the proportion is that of a water-filling first, so that a small fast device gets a fair part
of each kind instead of all the heads and no hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from meshllm.model.slicing import ModelShape, Range, Slice

FFN_UNIT: Final = 32  # hidden units: kernels take rows by 8 or 16, two streams of them
VOCAB_UNIT: Final = 64
BATCH: Final = 256  # largest batch of a step, for buffers


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest part of a kind that a rank is given."""

    size: int  # heads, hidden units or rows
    bytes: int  # weights and cache of one unit
    total: int  # heads, hidden units or rows in all

    @property
    def count(self) -> int:
        """How many there are; the last may be smaller."""
        return -(-self.total // self.size)


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model's three kinds."""

    heads: Unit
    ffn: Unit
    vocab: Unit

    @property
    def bytes(self) -> int:
        """All that is divided."""
        return sum(unit.bytes * unit.count for unit in (self.heads, self.ffn, self.vocab))


def units_of(shape: ModelShape, positions: int, *, shared_kv: bool) -> Units:
    """Units for a cache of so many positions in all slots. shared_kv: cut inside groups, KV heads are held twice."""
    group = shape.group
    step = shape.head_align if shared_kv else _lcm_within(group, shape.head_align, shape.n_heads)
    kv_heads = max(1, -(-step // group))
    cache = kv_heads * 4 * shape.n_layers * shape.head_dim * positions
    heads = Unit(step, step * shape.head_bytes + kv_heads * shape.kv_head_bytes + cache, shape.n_heads)
    ffn_step = _lcm_within(shape.ffn_align, FFN_UNIT, shape.ffn_dim)
    ffn = Unit(ffn_step, ffn_step * shape.ffn_unit_bytes, shape.ffn_dim)
    return Units(heads, ffn, Unit(VOCAB_UNIT, VOCAB_UNIT * shape.vocab_row_bytes, shape.vocab_size))


def reserved_bytes(shape: ModelShape) -> int:
    """What a rank needs whatever its slice: fixed weights and the buffers of a batch (f32, a few of each width)."""
    widest = 3 * shape.dim + 3 * shape.n_heads * shape.head_dim + 3 * shape.ffn_dim
    return shape.fixed_bytes + BATCH * widest * 4 + 4 * 4 * shape.vocab_size


def least_bytes(shape: ModelShape) -> int:
    """What a device needs to be a rank at all: all that is reserved and one unit of the feed-forward."""
    return reserved_bytes(shape) + units_of(shape, 0, shared_kv=False).ffn.bytes


def split(
    shape: ModelShape, speeds: Sequence[float], usable_bytes: Sequence[int], positions: int, *, shared_kv: bool
) -> tuple[Slice, ...] | None:
    """slices[i] for a device of speeds[i] (any unit) and usable_bytes[i], in order; None if it does not fit."""
    units = units_of(shape, positions, shared_kv=shared_kv)
    room = [max(0, n - reserved_bytes(shape)) for n in usable_bytes]
    weights = _fill(speeds, room, units.bytes)
    if weights is None:
        return None
    heads = _allot(units.heads, weights, room, least=0)
    ffn = _allot(units.ffn, weights, room, least=1)
    vocab = _allot(units.vocab, weights, room, least=0)
    if heads is None or ffn is None or vocab is None:
        return None
    return tuple(Slice(*ranges) for ranges in zip(heads, ffn, vocab, strict=True))


def _lcm_within(a: int, b: int, total: int) -> int:
    """A multiple of `a`, of `b` too if that leaves at least four units."""
    step = a
    while step % b and step + a <= total:
        step += a
    return step if step % b == 0 and (step == a or total >= 4 * step or total % a) else a


def _fill(speeds: Sequence[float], room: Sequence[int], total: int) -> list[float] | None:
    """Parts of the whole in proportion to speed, none above its room; None if the rooms together are too small."""
    if sum(room) < total:
        return None
    parts = [0.0] * len(speeds)
    open_ranks = [rank for rank, n in enumerate(room) if n > 0]
    rest = float(total)
    while open_ranks and rest > 0:
        speed = sum(speeds[rank] for rank in open_ranks)
        full = [rank for rank in open_ranks if rest * speeds[rank] / speed >= room[rank]]
        if not full:
            for rank in open_ranks:
                parts[rank] = rest * speeds[rank] / speed
            break
        for rank in full:
            parts[rank] = float(room[rank])
            rest -= room[rank]
        open_ranks = [rank for rank in open_ranks if rank not in full]
    return [part / total for part in parts]


def _allot(unit: Unit, weights: Sequence[float], room: list[int], least: int) -> list[Range] | None:
    """Ranges in rank order that cover the kind; takes their bytes out of `room`. None if they do not fit.

    Starts from the whole units of each exact proportion and gives the rest one by one to the rank that would be done
    first: with equal units this is the split whose slowest rank is fastest (Graham's list scheduling is exact there).
    """
    counts = [min(int(w * unit.count), _fits(unit, room[r])) for r, w in enumerate(weights)]
    if least and unit.count >= least * len(counts):
        counts = [max(n, min(least, _fits(unit, room[r]))) for r, n in enumerate(counts)]
    while sum(counts) > unit.count:  # `least` gave too much
        counts[counts.index(max(counts))] -= 1
    for _ in range(unit.count - sum(counts)):
        free = [r for r, n in enumerate(counts) if n < _fits(unit, room[r])]
        if not free:
            return None
        counts[min(free, key=lambda r: ((counts[r] + 1) / max(weights[r], 1e-12), r))] += 1
    for rank, n in enumerate(counts):
        room[rank] -= n * unit.bytes
    ends = [0]
    for n in counts:
        ends.append(ends[-1] + n)
    return [Range(min(a * unit.size, unit.total), min(b * unit.size, unit.total)) for a, b in pairwise(ends)]


def _fits(unit: Unit, room: int) -> int:
    return room // unit.bytes if unit.bytes else unit.count
