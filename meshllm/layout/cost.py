"""Predicted time of a token for given slices: the roofline of each phase plus what crosses the wire between phases.

A layer is two phases, attention and feed-forward, each ended by an exchange in which all ranks wait for the slowest. So
times of a phase are maxima over ranks, and times of phases add up: a rank with fewer hidden units does not make up for
one with more heads. Seconds a token:

    decode   = sum over phases of max over ranks (bytes of its slice / read bandwidth): each weight is read once
               + exchanges + step, if there is more than one member
    prefill  = the same with 2 * weights / (matmul operations a second), PROMPT tokens to an exchange, no vocabulary
    exchange = EXCHANGE_S + max over pairs (rtt / 2) + bytes to or from the busiest rank / throughput; two a layer

The constants were measured (their comments say where) and are assumptions about other machines. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from meshllm.layout.layout import Device, ExchangePrecision, LinkSpeed, NodeId
from meshllm.model.slicing import ModelShape, Slice

EXCHANGE_S: Final = 50e-6  # system calls, sealing, adding partials: 4 KB on loopback, caches cold 30 to 40; hot 14
STEP_S: Final = 150e-6  # driver's batch, candidates, draw; one crossing of the loops is 44 us
PROMPT: Final = 128  # tokens of a prompt step, for the prediction
ANSWER: Final = 128  # decoded tokens of the answer that is predicted
UNKNOWN_RTT_US: Final = 1000.0  # of a link not measured yet
CANDIDATE_BYTES: Final = 6000  # of one rank's candidates at most: 512 of 12 bytes
STEP_BYTES: Final = 100

# Throughput where none was measured, by round trip: this machine, a wired switch, a slow or wireless link, farther.
_ASSUMED_MBPS: Final = ((150.0, 10000.0), (1500.0, 800.0), (8000.0, 100.0))
_FAR_MBPS: Final = 20.0


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Seconds a token, and where they go."""

    decode_s: float
    prefill_s: float
    exchange_s: float  # the part of decode_s that is not arithmetic
    wire_bytes: int  # sent by the busiest rank for a decoded token

    @property
    def answer_s(self) -> float:
        """Of a whole answer to a prompt of PROMPT tokens: what layouts are compared by."""
        return PROMPT * self.prefill_s + ANSWER * self.decode_s


class LinkTable:
    """Round trip and throughput between any two devices; assumptions where nothing was measured."""

    def __init__(self, links: Sequence[LinkSpeed]) -> None:
        self._links: dict[tuple[NodeId, NodeId], LinkSpeed] = {}
        for link in links:
            self._links[(link.a, link.b)] = self._links[(link.b, link.a)] = link

    def rtt_s(self, a: NodeId, b: NodeId) -> float:
        """Seconds there and back."""
        link = self._links.get((a, b))
        return (link.rtt_us if link else UNKNOWN_RTT_US) * 1e-6

    def bytes_per_s(self, a: NodeId, b: NodeId) -> float:
        """Bytes a second one way."""
        link = self._links.get((a, b))
        mbps = link.mbps if link else None
        if mbps is None:
            rtt_us = link.rtt_us if link else UNKNOWN_RTT_US
            mbps = next((speed for limit, speed in _ASSUMED_MBPS if rtt_us <= limit), _FAR_MBPS)
        return max(mbps, 0.001) * 1e6 / 8

    def between(self, nodes: Sequence[NodeId]) -> tuple[float, float]:
        """The longest round trip (s) and the least throughput (bytes/s) among these; (0, inf) for one."""
        pairs = [(a, b) for i, a in enumerate(nodes) for b in nodes[:i]]
        if not pairs:
            return 0.0, float("inf")
        return max(self.rtt_s(a, b) for a, b in pairs), min(self.bytes_per_s(a, b) for a, b in pairs)


def partial_bytes(dim: int, precision: ExchangePrecision) -> int:
    """Bytes of the partial sums of one token."""
    per_block: Mapping[ExchangePrecision, int] = {"q8_0": 34, "f16": 64, "f32": 128}
    return -(-dim // 32) * per_block[precision]


def predict(
    shape: ModelShape,
    devices: Sequence[Device],
    slices: Sequence[Slice],
    links: LinkTable,
    precision: ExchangePrecision,
    driver: NodeId | None = None,
) -> TokenCost:
    """The cost of a token with slices[i] on devices[i]. driver: where steps come from, if it is no rank."""
    decode = _slowest([_phase_bytes(shape, part) for part in slices], [d.read_gbps * 1e9 for d in devices])
    prefill = _slowest([_phase_operations(shape, part) for part in slices], [d.matmul_gops * 1e9 for d in devices])
    nodes = [device.node for device in devices]
    members = nodes if driver is None or driver in nodes else [driver, *nodes]
    if len(members) == 1:
        return TokenCost(decode, prefill, 0.0, 0)
    rtt_s, bytes_per_s = links.between(members)
    n_bytes = partial_bytes(shape.dim, precision)
    busiest = max(_sent_copies(slices), default=0)
    latency = rtt_s + 2 * CANDIDATE_BYTES / bytes_per_s + STEP_S  # a step's batch out, its candidates back
    exchanges = 2 * shape.n_layers * (EXCHANGE_S + rtt_s / 2) if len(nodes) > 1 else 0.0
    wire = n_bytes * busiest * shape.n_layers
    decode_wire = latency + exchanges + wire / bytes_per_s
    prefill_wire = (latency + exchanges) / PROMPT + wire / bytes_per_s
    return TokenCost(decode + decode_wire, prefill + prefill_wire, decode_wire, wire + CANDIDATE_BYTES + STEP_BYTES)


def _phase_bytes(shape: ModelShape, part: Slice) -> tuple[float, float, float]:
    """Bytes read for a token: attention, feed-forward, vocabulary."""
    heads = len(part.heads) * shape.head_bytes + len(part.kv_heads(shape.group)) * shape.kv_head_bytes
    return float(heads), float(len(part.ffn) * shape.ffn_unit_bytes), float(len(part.vocab) * shape.vocab_row_bytes)


def _phase_operations(shape: ModelShape, part: Slice) -> tuple[float, float, float]:
    """Multiply-adds times two for a prompt token: attention's projections, feed-forward; no vocabulary."""
    wide = 2.0 * shape.n_layers * shape.dim
    projections = (2 * len(part.heads) + 2 * len(part.kv_heads(shape.group))) * shape.head_dim
    return wide * projections, wide * 3 * len(part.ffn), 0.0


def _slowest(phases: Sequence[tuple[float, float, float]], speeds: Sequence[float]) -> float:
    """Sum over phases of the longest time of a rank; speeds in amounts a second."""
    times: Iterator[list[float]] = (
        [amount / max(speed, 1.0) for amount in rank] for rank, speed in zip(phases, speeds, strict=True)
    )
    longest: list[float] = [max(phase) for phase in zip(*times, strict=True)]
    return sum(longest)


def _sent_copies(slices: Sequence[Slice]) -> list[int]:
    """Partials that each rank sends or receives in a layer, whichever is more: links carry both ways at once."""
    ranks = len(slices)
    by_phase = ([bool(part.heads) for part in slices], [bool(part.ffn) for part in slices])
    copies = [0] * ranks
    for contributes in by_phase:
        for rank in range(ranks):
            others = sum(contributes) - contributes[rank]
            copies[rank] += max((ranks - 1) if contributes[rank] else 0, others)
    return copies
