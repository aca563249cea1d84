"""Parts stay where devices hold them, as long as that costs little."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.layout.keep import keep_parts
from meshllm.layout.layout import Device, Layout, NodeId
from meshllm.layout.planner import plan
from meshllm.layout.split import reserved_bytes
from meshllm.model.slicing import Slice
from tests.shapes import LLAMA_1B

NODES = [NodeId(f"{i:016x}") for i in range(1, 6)]


def device(node: NodeId, read_gbps: float, usable_bytes: int = 8 << 30) -> Device:
    return Device(node=node, read_gbps=read_gbps, matmul_gops=10 * read_gbps, usable_bytes=usable_bytes)


def planned(devices: list[Device]) -> Layout:
    found = plan(devices, [], LLAMA_1B, mode="all", context=2048, slots=1, exchange="f16", driver=NODES[0])
    assert isinstance(found, Layout)
    return found


def parts(layout: Layout, *but: NodeId) -> dict[NodeId, Slice]:
    return {share.node: share.slice for share in layout.shares if share.node not in but}


def keep(layout: Layout, held: dict[NodeId, Slice], devices: list[Device]) -> Layout | None:
    return keep_parts(layout, held, {one.node: one for one in devices}, [], LLAMA_1B, NODES[0])


@pytest.mark.parametrize("n", [2, 3, 5])
def test_devices_measured_a_little_otherwise_keep_their_parts(n: int) -> None:
    before = planned([device(node, 10.0 + i / 10) for i, node in enumerate(NODES[:n])])
    now = [device(node, 10.5 - i / 10) for i, node in enumerate(NODES[:n])]  # and in another order
    after = planned(now)
    assert [share.node for share in after.shares] != [share.node for share in before.shares]
    held = parts(before, NODES[0])
    kept = keep(after, held, now)
    assert kept is not None
    assert all(held[share.node].holds(share.slice) for share in kept.shares if share.node in held)


def test_part_that_has_become_far_too_large_is_not_kept() -> None:
    before = planned([device(NODES[0], 10.0), device(NODES[1], 10.0)])
    now = [device(NODES[0], 10.0), device(NODES[1], 30.0)]
    assert keep(planned(now), parts(before, NODES[0]), now) is None


@pytest.mark.parametrize("missing_bytes", [0, 200 << 20])
def test_part_keeps_to_the_memory_that_there_is_now(missing_bytes: int) -> None:
    before = planned([device(NODES[0], 10.0), device(NODES[1], 9.0)])
    held = parts(before, NODES[0])
    (share,) = (share for share in before.shares if share.node == NODES[1])
    beside = reserved_bytes(LLAMA_1B) - LLAMA_1B.fixed_bytes
    room = share.slice_bytes + share.cache_bytes + beside - missing_bytes
    now = [device(NODES[0], 9.0), device(NODES[1], 10.0, room)]
    kept = keep(planned(now), held, now)
    assert kept is not None
    (share,) = (share for share in kept.shares if share.node == NODES[1])
    assert room - (64 << 20) < share.slice_bytes + share.cache_bytes + beside <= room


def test_parts_that_do_not_adjoin_cannot_be_kept() -> None:
    three = planned([device(node, 10.0) for node in NODES[:3]])
    now = [device(node, 10.0) for node in NODES[:2]]
    held = {NODES[0]: three.shares[0].slice, NODES[1]: three.shares[2].slice}
    assert keep(planned(now), held, now) is None


@given(st.integers(0, 2**32), st.integers(2, 5))
def test_what_is_kept_covers_the_model_and_is_held(seed: int, n: int) -> None:
    rng = random.Random(seed)
    before = planned([device(node, rng.uniform(5, 20)) for node in NODES[:n]])
    now = [device(node, rng.uniform(5, 20)) for node in NODES[:n]]
    held = parts(before, *rng.sample(NODES[:n], rng.randint(1, n)))
    kept = keep(planned(now), held, now)
    if kept is not None:
        assert LLAMA_1B.covers(tuple(share.slice for share in kept.shares))
        assert all(held[share.node].holds(share.slice) for share in kept.shares if share.node in held)
        assert sorted(share.node for share in kept.shares) == sorted(NODES[:n])
