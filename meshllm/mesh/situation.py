"""What a plan is made for: the model, the devices that can take part, and why the others cannot. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a plan depends on, but round trips."""

    model: ModelFacts
    devices: tuple[tuple[int, Device], ...]  # with incarnations; ours first
    left_out: tuple[tuple[NodeId, str], ...]

    def without(self, nodes: Collection[NodeId], reason: str) -> Situation:
        """The same with these devices left out."""
        devices = tuple(entry for entry in self.devices if entry[1].node not in nodes)
        return Situation(self.model, devices, tuple(sorted([*self.left_out, *((node, reason) for node in nodes)])))
