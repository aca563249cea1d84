"""The planner's promises: any number of devices, fair and legal cuts, within memory, nobody who slows the mesh down."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.layout.layout import Device, Layout, LinkSpeed, NodeId
from meshllm.layout.planner import CannotPlan, plan
from meshllm.model.slicing import ModelShape, Range, Slice
from tests.shapes import LLAMA_1B, shape

GB = 10**9


SMOLLM2 = shape(9, 3)
TINYLLAMA = shape(32, 4, n_layers=22, dim=2048, ffn_dim=5632, vocab=32000)
SHAPES = {
    "SmolLM2-135M": SMOLLM2,
    "TinyLlama": TINYLLAMA,
    "20 heads, 5 KV": shape(20, 5, dim=1280),
    "1 layer": shape(9, 3, n_layers=1),
    "13 layers": shape(9, 3, n_layers=13),
    "ffn 1504": shape(9, 3, ffn_dim=1504),
    "odd vocabulary": shape(9, 3, vocab=32003),
}


def devices(speeds: tuple[float, ...], usable: int = 8 * GB) -> list[Device]:
    return [
        Device(node=NodeId(f"{i:016x}"), read_gbps=speed, matmul_gops=12 * speed, usable_bytes=usable)
        for i, speed in enumerate(speeds)
    ]


def links(found: list[Device], rtt_us: float = 100.0, mbps: float | None = None) -> list[LinkSpeed]:
    return [LinkSpeed(a=a.node, b=b.node, rtt_us=rtt_us, mbps=mbps) for i, a in enumerate(found) for b in found[:i]]


def must_plan(found: list[Device], model: ModelShape, **options: object) -> Layout:
    layout = plan(found, links(found), model, **options)  # type: ignore[arg-type]
    assert isinstance(layout, Layout), layout
    return layout


def check_whole(layout: Layout, model: ModelShape) -> None:
    """Every head, unit and row once; cuts on whole quantization blocks; KV heads as the heads need."""
    parts = [share.slice for share in layout.shares]
    for ranges, total, align in (
        ([p.heads for p in parts], model.n_heads, model.head_align),
        ([p.ffn for p in parts], model.ffn_dim, model.ffn_align),
        ([p.vocab for p in parts], model.vocab_size, 1),
    ):
        assert ranges[0].start == 0
        assert ranges[-1].stop == total
        assert all(a.stop == b.start for a, b in pairwise(ranges))
        assert all(r.start <= r.stop for r in ranges)
        assert all(r.stop % align == 0 for r in ranges)
    assert model.covers(tuple(parts))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (10.0, 1.0, 1.0)], ids=str)
def test_any_number_of_devices_shares_any_model_shape_01(name: str, n: int, weights: tuple[float, ...]) -> None:
    """SHAPE-01: no setting is needed, cuts fall on whole KV groups and blocks, the parts make the whole.

    With many more devices than KV heads, cuts inside a group may pay, and then KV heads are held twice on purpose.
    """
    model = SHAPES[name]
    speeds = tuple(10.0 * weights[i % len(weights)] for i in range(n))
    layout = must_plan(devices(speeds), model, mode="all")
    assert len(layout.shares) == n
    check_whole(layout, model)
    if n <= max(5, model.n_kv_heads):
        assert all(share.slice.heads.stop % model.group == 0 for share in layout.shares), "a KV head is held twice"


def test_two_devices_share_three_kv_heads_as_two_and_one_shape_01() -> None:
    layout = must_plan(devices((10.0, 10.0)), SMOLLM2, mode="all")
    heads = [len(share.slice.heads) for share in layout.shares]
    kv_heads = [len(share.slice.kv_heads(SMOLLM2.group)) for share in layout.shares]
    assert (heads, kv_heads) == ([6, 3], [2, 1])


def test_a_fourth_device_gets_units_without_heads() -> None:
    layout = must_plan(devices((10.0,) * 4), SMOLLM2, mode="all")
    assert [len(share.slice.heads) for share in layout.shares] == [3, 3, 3, 0]
    assert [len(share.slice.ffn) for share in layout.shares] == [384] * 4


def test_heads_of_a_group_are_divided_where_that_pays() -> None:
    """One KV head, eight query heads, wide attention: four devices cut inside the group and hold the KV head each."""
    model = shape(8, 1, dim=1024, head_dim=512, ffn_dim=1024)
    layout = must_plan(devices((10.0,) * 4), model, mode="all")
    assert [len(share.slice.heads) for share in layout.shares] == [2, 2, 2, 2]
    assert [share.slice.kv_heads(model.group) for share in layout.shares] == [Range(0, 1)] * 4


def test_heads_keep_to_blocks_where_a_head_is_no_block() -> None:
    """head_dim 80: the output projection can be cut only at every second head."""
    model = shape(32, 32, dim=2560, head_dim=80)
    model = type(model)(**{f: getattr(model, f) for f in model.__struct_fields__} | {"head_align": 2})
    layout = must_plan(devices((10.0, 9.0, 8.0)), model, mode="all")
    check_whole(layout, model)


@given(
    st.lists(st.floats(0.5, 50.0), min_size=1, max_size=10),
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(["all", "auto"]),
)
def test_shares_follow_speed(speeds: list[float], name: str, mode: str) -> None:
    """The slowest rank of a phase is as fast as whole units allow: done in (units + ranks) / (sum of speeds)."""
    model = SHAPES[name]
    found = devices(tuple(speeds))
    layout = must_plan(found, model, mode=mode)
    check_whole(layout, model)
    by_node = {device.node: device.read_gbps for device in found}
    total = sum(by_node[share.node] for share in layout.shares)
    ranks = len(layout.shares)
    for share in layout.shares:
        part = by_node[share.node] / total * (1 + 1e-9)
        assert len(share.slice.heads) <= part * (model.n_heads + ranks * model.group)
        assert len(share.slice.ffn) <= max(32, part * (model.ffn_dim + ranks * 32))
        assert len(share.slice.vocab) <= part * (model.vocab_size + ranks * 64)


@given(
    st.lists(st.tuples(st.floats(0.5, 50.0), st.integers(0, 400)), min_size=1, max_size=7),
    st.sampled_from(["all", "auto", 1, 2, 3]),
    st.sampled_from([None, 512, 4096]),
)
def test_no_device_is_given_more_than_its_memory(
    found: list[tuple[float, int]], mode: str | int, context: int | None
) -> None:
    machines = [
        Device(node=NodeId(f"{i:016x}"), read_gbps=speed, matmul_gops=9 * speed, usable_bytes=mb * 10**6)
        for i, (speed, mb) in enumerate(found)
    ]
    layout = plan(machines, links(machines), SMOLLM2, mode=mode, context=context)  # type: ignore[arg-type]
    if isinstance(layout, CannotPlan):
        assert layout.reason
        return
    check_whole(layout, SMOLLM2)
    usable = {device.node: device.usable_bytes for device in machines}
    for share in layout.shares:
        assert share.slice_bytes + share.cache_bytes <= usable[share.node]
        assert share.slice_bytes == SMOLLM2.slice_bytes(share.slice)
    placed = {share.node for share in layout.shares} | {node for node, _ in layout.left_out}
    assert placed == usable.keys(), "a device is neither used nor told why not"
    if isinstance(mode, int):
        assert len(layout.shares) == mode


def test_a_slow_link_leaves_the_second_device_out_peer_05() -> None:
    """PEER-05: 30 ms and 20 Mbit/s: alone is faster, and the reason says so with both predictions."""
    found = devices((15.0, 15.0))
    layout = plan(found, links(found, rtt_us=60_000, mbps=20), SMOLLM2)
    assert isinstance(layout, Layout)
    assert len(layout.shares) == 1
    ((node, reason),) = layout.left_out
    assert node == found[1].node
    assert "slower" in reason
    assert reason.count("tokens/s") == 1
    assert "with it" in reason
    assert "without" in reason


def test_a_slow_device_does_not_set_the_pace_peer_05() -> None:
    """PEER-05: a device at a fifth of the speed gets about a fifth of the work, or none."""
    found = devices((15.0, 3.0))
    layout = must_plan(found, LLAMA_1B)
    alone = must_plan(found[:1], LLAMA_1B)
    assert layout.prediction.decode_tok_s >= 0.97 * alone.prediction.decode_tok_s
    if len(layout.shares) == 2:
        assert len(layout.shares[1].slice.ffn) < 0.25 * LLAMA_1B.ffn_dim


@given(st.lists(st.floats(0.5, 50.0), min_size=1, max_size=6), st.floats(20, 50_000), st.floats(1, 10_000))
def test_the_mesh_is_never_predicted_slower_than_its_best_device(
    speeds: list[float], rtt_us: float, mbps: float
) -> None:
    found = devices(tuple(speeds))
    layout = plan(found, links(found, rtt_us, mbps), LLAMA_1B)
    best = plan([max(found, key=lambda d: d.read_gbps)], [], LLAMA_1B)
    assert isinstance(layout, Layout)
    assert isinstance(best, Layout)

    def answer(made: Layout) -> float:
        return 1 / made.prediction.decode_tok_s + 1 / made.prediction.prefill_tok_s

    assert answer(layout) <= answer(best) * (1 + 1e-9)


def test_two_fast_links_double_a_large_model() -> None:
    found = devices((15.0, 15.0))
    one = must_plan(found[:1], LLAMA_1B)
    two = must_plan(found, LLAMA_1B)
    assert len(two.shares) == 2
    assert two.prediction.decode_tok_s > 1.6 * one.prediction.decode_tok_s


def test_missing_memory_is_named() -> None:
    found = devices((10.0, 10.0), usable=120 * 10**6)
    refused = plan(found, links(found), LLAMA_1B, context=2048)
    assert isinstance(refused, CannotPlan)
    assert "MB are missing" in refused.reason


def test_memory_of_several_devices_adds_up() -> None:
    need = LLAMA_1B.slice_bytes(LLAMA_1B.whole())
    found = devices((20.0, 5.0, 5.0), usable=int(need * 0.5))
    layout = must_plan(found, LLAMA_1B, context=512, slots=1)
    assert len(layout.shares) == 3
    check_whole(layout, LLAMA_1B)


def test_context_shrinks_to_memory_unless_it_was_asked_for() -> None:
    found = devices((10.0,), usable=300 * 10**6)
    assert must_plan(found, SMOLLM2).context < 8192
    assert isinstance(plan(found, [], SMOLLM2, context=8192), CannotPlan)


def test_exact_number_of_ranks_is_kept() -> None:
    found = devices((10.0, 9.0, 8.0))
    layout = must_plan(found, SMOLLM2, mode=2)
    assert {share.node for share in layout.shares} == {found[0].node, found[1].node}
    refused = plan(found, links(found), SMOLLM2, mode=4)
    assert isinstance(refused, CannotPlan)
    assert "wants 4 devices, 3" in refused.reason


def test_exchange_falls_back_where_blocks_do_not_fit() -> None:
    assert must_plan(devices((10.0, 10.0)), shape(4, 4, dim=520), mode="all").exchange == "f16"
    assert must_plan(devices((10.0, 10.0)), SMOLLM2, mode="all").exchange == "q8_0"


def test_same_input_gives_same_layout_whatever_the_order() -> None:
    found = devices((7.0, 9.0, 9.0, 3.0))
    one = plan(found, links(found), LLAMA_1B)
    other = plan(found[::-1], links(found[::-1]), LLAMA_1B)
    assert isinstance(one, Layout)
    assert isinstance(other, Layout)
    assert one.shares == other.shares


def test_unmeasured_device_waits() -> None:
    layout = must_plan(devices((10.0, 0.0)), SMOLLM2, mode="all")
    assert len(layout.shares) == 1
    assert "not measured" in layout.left_out[0][1]


def test_parts_that_overlap_or_leave_gaps_do_not_cover() -> None:
    whole = SMOLLM2.whole()
    half = Slice(Range(0, 3), Range(0, 768), Range(0, 49152))
    rest = Slice(Range(3, 9), Range(768, 1536), Range(49152, 49152))
    assert SMOLLM2.covers((whole,))
    assert SMOLLM2.covers((half, rest))
    assert not SMOLLM2.covers((half,))
    assert not SMOLLM2.covers((whole, half))
    assert not SMOLLM2.covers(())
