"""Who adds at each exchange, and how large messages may be."""

from __future__ import annotations

import pytest

from meshllm.errors import LocalProtocolError
from meshllm.kernels.links import HEAD_BYTES
from meshllm.layout.layout import ExchangePrecision, Layout, NodeId, Prediction, Share
from meshllm.mesh.exchange import data_frame_limit, make_schedule, partial_row_bytes
from meshllm.mesh.framing import encode_body
from meshllm.mesh.messages import Step, StepEntry
from meshllm.model.slicing import Range, Slice
from meshllm.parameters import SamplingParameters

EMPTY = Range(0, 0)


def layout_of(*slices: Slice, exchange: ExchangePrecision = "q8_0", slots: int = 4) -> Layout:
    shares = tuple(
        Share(node=NodeId(f"{i:016x}"), slice=part, slice_bytes=0, cache_bytes=0) for i, part in enumerate(slices)
    )
    prediction = Prediction(decode_tok_s=1, prefill_tok_s=1, wire_bytes_per_token=0)
    return Layout(shares=shares, exchange=exchange, context=100, slots=slots, prediction=prediction)


def test_only_ranks_with_a_part_of_the_product_add() -> None:
    layout = layout_of(
        Slice(Range(0, 2), EMPTY, EMPTY), Slice(EMPTY, Range(0, 32), EMPTY), Slice(Range(2, 4), Range(32, 64), EMPTY)
    )
    schedule = make_schedule(layout, ["attention", "ffn"] * 2)
    assert schedule == ((0, 2), (1, 2)) * 2


@pytest.mark.parametrize(("precision", "size"), [("q8_0", 2 * 34), ("f16", 128), ("f32", 256)])
def test_partial_has_the_bytes_of_its_precision(precision: ExchangePrecision, size: int) -> None:
    assert partial_row_bytes(precision, 64) == size


def test_q8_0_needs_whole_blocks() -> None:
    with pytest.raises(LocalProtocolError, match="width 50"):
        partial_row_bytes("q8_0", 50)


def test_largest_messages_fit_the_frame_limit() -> None:
    layout = layout_of(Slice(Range(0, 2), EMPTY, EMPTY), slots=16)
    limit = data_frame_limit(layout, 64, 256)
    sampling = SamplingParameters(temperature=1.23456789, top_k=2**31, top_p=0.123, min_p=0.1, seed=2**64 - 1)
    entries = tuple(StepEntry(slot, 2**31 - 1, (2**31 - 1,) * 16, sampling, 2**31 - 1) for slot in range(16))
    step = Step(2**40, entries, tuple((slot, 65535, 2**31 - 1) for slot in range(16)))
    assert len(encode_body(step)) <= limit
    assert limit >= HEAD_BYTES + 256 * 68
