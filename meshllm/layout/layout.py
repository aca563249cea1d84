"""The nouns of planning: devices, links, shares, layouts. Pure values; they also travel on the wire."""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

from meshllm.model.slicing import Slice

NodeId = NewType("NodeId", str)  # 16 lower-case hex digits, made once for each state folder
ExchangePrecision = Literal["q8_0", "f16", "f32"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner knows of a device."""

    node: NodeId
    read_gbps: float  # bytes of packed weights a second that its kernels stream, in 1e9
    matmul_gops: float  # multiply-adds a second in prompt kernels, in 1e9, times two
    usable_bytes: int  # memory it may give to slice, cache and buffers
    work_gbps: float = 0.0  # as read_gbps, seen while it decoded, with all that a step needs beside; 0: not seen
    work_epoch: int = 0  # counter of the epoch in which that was seen: to be compared within one only


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Between two devices, either way."""

    a: NodeId
    b: NodeId
    rtt_us: float
    mbps: float | None = None  # 1e6 bits a second; None if unmeasured


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a layout."""

    node: NodeId
    slice: Slice
    slice_bytes: int
    cache_bytes: int


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner expects of a layout."""

    decode_tok_s: float
    prefill_tok_s: float
    wire_bytes_per_token: int  # sent by the busiest rank


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds what. shares[i] is rank i; every head, hidden unit and vocabulary row is in exactly one share."""

    shares: tuple[Share, ...]
    exchange: ExchangePrecision
    context: int  # positions a slot
    slots: int  # sequences at once
    prediction: Prediction
    left_out: tuple[tuple[NodeId, str], ...] = ()  # device, reason in words

    def rank_of(self, node: NodeId) -> int | None:
        """The rank a node holds, or None."""
        return next((i for i, share in enumerate(self.shares) if share.node == node), None)
