"""A layout like the planned one that moves no bytes: parts stay where devices already hold them. Pure.

A plan follows measured speeds, which differ a little from one start to the next, and with them the order of ranks and
every cut. A device that holds only its part of the file would then fetch another one for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, permutations
from typing import Final

import msgspec

from meshllm.layout.cost import LinkTable, predict
from meshllm.layout.layout import Device, Layout, LinkSpeed, NodeId, Prediction, Share
from meshllm.layout.split import reserved_bytes
from meshllm.model.slicing import ModelShape, Range, Slice

COSTS_AT_MOST: Final = 0.10  # of an answer's time: for more than this, parts are fetched
ALL_ORDERS: Final = 5  # ranks: 120 orders; beyond that the planned one and that of the parts


def keep_parts(
    planned: Layout,
    held: Mapping[NodeId, Slice],
    devices: Mapping[NodeId, Device],
    links: Sequence[LinkSpeed],
    shape: ModelShape,
    driver: NodeId,
) -> Layout | None:
    """The best layout of the planned ranks that gives those in `held` no more than that; the others hold everything.

    None if there is none, or it would make answers slower by more than COSTS_AT_MOST.
    """
    table = LinkTable(links)

    def cost_of(shares: Sequence[Share]) -> Prediction:
        ranks = [devices[share.node] for share in shares]
        cost = predict(shape, ranks, [share.slice for share in shares], table, planned.exchange, driver)
        seconds[tuple(shares)] = cost.answer_s
        return Prediction(
            decode_tok_s=1 / cost.decode_s, prefill_tok_s=1 / cost.prefill_s, wire_bytes_per_token=cost.wire_bytes
        )

    seconds: dict[tuple[Share, ...], float] = {}
    cost_of(planned.shares)
    found: list[Layout] = []
    for order in _orders(planned.shares, held):
        shares = _cut(order, held, planned, shape)
        if shares is not None and all(_fits(share, devices[share.node], shape) for share in shares):
            found.append(msgspec.structs.replace(planned, shares=shares, prediction=cost_of(shares)))
    best = min(found, key=lambda layout: seconds[layout.shares], default=None)
    if best is None or seconds[best.shares] > (1 + COSTS_AT_MOST) * seconds[planned.shares]:
        return None
    return best


def _orders(shares: Sequence[Share], held: Mapping[NodeId, Slice]) -> Iterator[Sequence[Share]]:
    if len(shares) <= ALL_ORDERS:
        yield from permutations(shares)
        return
    yield shares
    yield sorted(shares, key=lambda share: held.get(share.node, share.slice).ffn.start)


def _cut(
    order: Sequence[Share], held: Mapping[NodeId, Slice], planned: Layout, shape: ModelShape
) -> tuple[Share, ...] | None:
    """The model cut in this order as nearly as planned, within what is held; None if that leaves something out."""
    parts = [held.get(share.node) for share in order]
    heads = _ranges([s.slice.heads for s in order], [None if p is None else p.heads for p in parts], shape.n_heads)
    ffn = _ranges([s.slice.ffn for s in order], [None if p is None else p.ffn for p in parts], shape.ffn_dim)
    vocab = _ranges([s.slice.vocab for s in order], [None if p is None else p.vocab for p in parts], shape.vocab_size)
    if heads is None or ffn is None or vocab is None:
        return None
    positions, shares = planned.context * planned.slots, []
    for share, *ranges in zip(order, heads, ffn, vocab, strict=True):
        part = Slice(*ranges)
        if not (part.heads or part.ffn or part.vocab):
            return None
        cache_bytes = shape.position_bytes(part) * positions
        shares.append(Share(node=share.node, slice=part, slice_bytes=shape.slice_bytes(part), cache_bytes=cache_bytes))
    return tuple(shares)


def _ranges(planned: Sequence[Range], held: Sequence[Range | None], end: int) -> list[Range] | None:
    """Adjoining ranges from 0 to end, as long as planned as far as possible, each within what is held (None: all)."""
    ranges, position = [Range(0, 0)] * len(planned), 0
    able = [i for i, part in enumerate(held) if part is None or part]
    bounds = [part or Range(0, end) for part in (held[i] for i in able)]
    wished = accumulate(len(planned[i]) for i in able)
    for n, (i, bound, wish) in enumerate(zip(able, bounds, wished, strict=True)):
        least = bounds[n + 1].start if n + 1 < len(able) else end
        stop = min(max(wish, least, position), bound.stop)
        if bound.start > position or stop < max(position, least):
            return None
        ranges[i] = Range(position, stop)
        position = stop
    position = 0
    for i, part in enumerate(ranges):
        ranges[i] = part if part else Range(position, position)
        position = ranges[i].stop
    return ranges if position == end else None


def _fits(share: Share, device: Device, shape: ModelShape) -> bool:
    beside = reserved_bytes(shape) - shape.fixed_bytes  # which are in both
    return share.slice_bytes + share.cache_bytes + beside <= device.usable_bytes
