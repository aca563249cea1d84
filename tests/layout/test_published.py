"""The cost model against figures that others published."""

from __future__ import annotations

import pytest

from meshllm.layout.cost import LinkTable, predict
from meshllm.layout.layout import Device, LinkSpeed, NodeId
from meshllm.layout.planner import CannotPlan, plan
from tests.shapes import shape

LLAMA3_8B = shape(32, 8, n_layers=32, dim=4096, head_dim=128, ffn_dim=14336, vocab=128256, bytes_per_weight=0.5625)

# Distributed Llama on Raspberry Pi 5 with 8 GB and a gigabit switch, Llama 3 8B Q40, as its project has published:
# milliseconds a token that devices compute, and that they exchange.
PUBLISHED = {1: (564, 0), 2: (363, 80), 4: (268, 62)}


@pytest.mark.parametrize("n", PUBLISHED)
def test_raspberry_pis_scale_as_published(n: int) -> None:
    """Their root does a part alone: 162 ms by the first two rows, which leaves the third to be predicted."""
    divided_ms, alone_ms = 2 * (564 - 363), 564 - 2 * (564 - 363)
    whole = LLAMA3_8B.slice_bytes(LLAMA3_8B.whole())
    gbps = whole / divided_ms * 1e3 / 1e9
    devices = [Device(node=NodeId(f"{i:016x}"), read_gbps=gbps, matmul_gops=100, usable_bytes=10**10) for i in range(n)]
    links = [
        LinkSpeed(a=a.node, b=b.node, rtt_us=300.0, mbps=940.0) for i, a in enumerate(devices) for b in devices[:i]
    ]
    layout = plan(devices, links, LLAMA3_8B, mode="all", context=4096, slots=1, exchange="q8_0")
    assert not isinstance(layout, CannotPlan)
    cost = predict(LLAMA3_8B, devices, [share.slice for share in layout.shares], LinkTable(links), layout.exchange)
    computed, exchanged = PUBLISHED[n]
    assert 1e3 * (cost.decode_s - cost.exchange_s) + alone_ms == pytest.approx(computed, rel=0.05)
    assert 1e3 * cost.exchange_s <= exchanged  # theirs waits for the slowest in it
    assert 1e3 * cost.exchange_s >= exchanged / 6
