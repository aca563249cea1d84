"""Speeds of devices that may be compared. Pure.

The measure at a start streams one large matrix; at work a step needs more than that, the more so the smaller its slice
is. So what two devices show at work is compared only if both showed it in one epoch, and a device of which nothing was
seen yet is taken to lose as much of its first measure as the others do.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

import msgspec

from meshllm.layout.layout import Device, NodeId

Placed = tuple[int, Device]  # with its incarnation


class SpeedBook:
    """What was seen at work, by node and incarnation."""

    def __init__(self) -> None:
        self._seen: dict[tuple[NodeId, int], float] = {}

    def observe(self, devices: Sequence[Placed], epoch: int, ranks: Collection[NodeId]) -> None:
        """Takes over what the ranks of the epoch in force say of their work in it, once all of them do."""
        ranked = [(incarnation, device) for incarnation, device in devices if device.node in ranks]
        if len(ranked) == len(ranks) and all(d.work_epoch == epoch and d.work_gbps > 0 for _, d in ranked):
            for incarnation, device in ranked:
                self._seen[device.node, incarnation] = device.work_gbps

    def comparable(self, devices: Sequence[Placed]) -> tuple[Placed, ...]:
        """The devices with read_gbps as far as is known by now."""
        seen = [self._seen.get((device.node, incarnation)) for incarnation, device in devices]
        kept = [gbps / d.read_gbps for gbps, (_, d) in zip(seen, devices, strict=True) if gbps and d.read_gbps > 0]
        usual = statistics.median(kept) if kept else 1.0
        speeds = [gbps or d.read_gbps * usual for gbps, (_, d) in zip(seen, devices, strict=True)]
        return tuple(
            (incarnation, msgspec.structs.replace(d, read_gbps=gbps, work_gbps=0.0, work_epoch=0))
            for gbps, (incarnation, d) in zip(speeds, devices, strict=True)
        )
