"""When the driver plans, with whom, and whether the result is worth moving the mesh. Pure.

It plans when who is there, or what they serve or can do, changed, and SETTLE_S passed without another change. A layout
that places the model as it is placed now changes nothing. In mode "auto" it looks again from time to time, since round
trips get better known, and moves only for a gain of MOVE_GAIN. A device that failed is left out for a while, longer
each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from meshllm.layout.cost import LinkTable, predict
from meshllm.layout.layout import Device, Layout, NodeId
from meshllm.layout.planner import CannotPlan, plan
from meshllm.mesh.election import elect, fully_linked
from meshllm.mesh.epoch import EpochBook
from meshllm.mesh.facts import ModelFacts, NodeConfig
from meshllm.mesh.link_speeds import known_links
from meshllm.mesh.membership import Membership, PeerState
from meshllm.mesh.outbox import Outbox
from meshllm.mesh.situation import Situation
from meshllm.mesh.speeds import SpeedBook

SETTLE_S: Final = 0.5
LONGEST_SETTLE_S: Final = 2.0  # a flapping device does not put a plan off for longer
MEASURE_S: Final = 2.5  # at most, for round trips that "auto" compares layouts by
SUSPECT_PAUSE_S: Final = 0.2
RECHECK_S: Final = 60.0
FIRST_RECHECK_S: Final = 6.0
MOVE_GAIN: Final = 0.05  # of an answer's time; speeds seen at work differ by less from one minute to the next
FIRST_EXCLUSION_S: Final = 2.0
LONGEST_EXCLUSION_S: Final = 60.0  # trying again is harmless: it is prepared beside what runs
FORGIVE_S: Final = 120.0  # after which a failure no longer lengthens the next exclusion


@dataclass(frozen=True, slots=True)
class _Exclusion:
    until: float
    reason: str
    failures: int
    incarnation: int


class Planning:
    """Decides when, and asks the planner."""

    def __init__(self, config: NodeConfig, members: Membership, epochs: EpochBook, out: Outbox) -> None:
        self._config = config
        self._own = config.node
        self._members = members
        self._epochs = epochs
        self._speeds = SpeedBook()
        self._out = out
        self.model: ModelFacts | None = None  # served here
        self.device: Device | None = None
        self.problem: str | None = None  # why there is no layout
        self._planned: Situation | None = None  # what the last plan was made for
        self._pending: Situation | None = None  # what the next one will be made for
        self._changed_at = 0.0  # first change since the last plan
        self._plan_at = math.inf
        self._recheck_at = math.inf
        self._exclusions: dict[NodeId, _Exclusion] = {}
        self._now = 0.0

    def serving(self) -> list[tuple[NodeId, PeerState]]:
        """Live peers that serve our model, by id."""
        if self.model is None:
            return []
        return [(node, peer.state) for node, peer in self._members.alive() if peer.model == self.model.hash]

    def elected(self) -> NodeId:
        """Whom this node follows."""
        return elect(self._own, [node for node, _ in self.serving()])

    @property
    def is_due(self) -> bool:
        """Whether a plan is scheduled for a change."""
        return self._plan_at < math.inf

    def next_deadline(self) -> float:
        """When `look` may have something to do without another event."""
        ends = [e.until for e in self._exclusions.values() if e.until > self._now]
        return min([self._plan_at, self._recheck_at, *ends])

    def stop(self) -> None:
        """Somebody else drives."""
        self._planned = self._pending = self.problem = None
        self._plan_at = self._recheck_at = math.inf
        self._exclusions.clear()

    def again(self, now: float) -> None:
        """The last plan came to nothing: make another soon."""
        self._planned = self._pending = None
        self._changed_at, self._plan_at = now, now + SETTLE_S

    def exclude(self, node: NodeId, reason: str, now: float) -> None:
        """Leaves a device out for a while."""
        incarnation = self._incarnation(node)
        before = self._exclusions.get(node)
        failures = 1
        if before and before.incarnation == incarnation and now < before.until + FORGIVE_S:
            failures = before.failures + 1
        pause = min(FIRST_EXCLUSION_S * 2 ** (failures - 1), LONGEST_EXCLUSION_S)
        self._exclusions[node] = _Exclusion(now + pause, reason, failures, incarnation)

    def look(self, *, offering: bool, now: float) -> bool:
        """Notices changes; whether to plan now. offering: one is being prepared, suspects are no reason to wait."""
        self._now = now
        situation = self._situation(now)
        if situation is None:
            return False
        self._notice(situation, now)
        return now >= min(self._plan_at, self._recheck_at) and not self._must_wait(offering=offering, now=now)

    def plan(self, now: float, but: Sequence[NodeId] = (), why: str = "") -> tuple[Layout, Situation] | None:
        """Plans; None where there is none (`problem` says why) or nobody to plan for. but: who is left out, and why."""
        situation = self._situation(now)
        if situation is None:
            return None
        self._schedule_recheck(situation, recheck=self._plan_at > now, now=now)
        self._plan_at, self._planned, self._pending = math.inf, situation, None
        if (current := self._epochs.in_force()) is not None:
            ranks = [share.node for share in current.layout.shares]
            self._speeds.observe(situation.devices, current.epoch.counter, ranks)
        situation = Situation(situation.model, self._speeds.comparable(situation.devices), situation.left_out)
        situation = situation.without(but, why)
        devices = [device for _, device in situation.devices]
        found = plan(
            devices,
            known_links(self._own, self._members, [device.node for device in devices]),
            situation.model.shape,
            mode=self._config.layout_mode,
            context=self._config.context,
            slots=self._config.slots,
            exchange=self._config.exchange,
            driver=self._own,
        )
        if isinstance(found, CannotPlan):
            excluded = "" if devices else ": " + "; ".join(sorted({reason for _, reason in situation.left_out}))
            if (problem := found.reason + excluded) != self.problem:
                self._out.report("plan_failed", reason=problem)
            self.problem = problem
            return None
        self.problem = None
        return msgspec.structs.replace(found, left_out=found.left_out + situation.left_out), situation

    def is_worth_moving(self, old: Layout, new: Layout, situation: Situation) -> bool:
        """Whether to leave a layout that works for another, made for the same model."""
        if (old.context, old.slots) != (new.context, new.slots):
            return True
        if same_placement(old, new):
            return False
        devices = {device.node: device for _, device in situation.devices}
        if any(share.node not in devices for share in old.shares):
            return True
        if self._config.layout_mode == "all" and len(old.shares) != len(new.shares):
            return True
        links = LinkTable(known_links(self._own, self._members, list(devices)))
        old_s, new_s = (
            predict(
                situation.model.shape,
                [devices[share.node] for share in layout.shares],
                [share.slice for share in layout.shares],
                links,
                layout.exchange,
                self._own,
            ).answer_s
            for layout in (old, new)
        )
        return new_s < (1 - MOVE_GAIN) * old_s

    def _incarnation(self, node: NodeId) -> int:
        peer = self._members.get(node)
        return peer.hello.incarnation if peer else self._config.incarnation

    def _situation(self, now: float) -> Situation | None:
        if self.model is None or self.device is None:
            return None
        nodes, apart = fully_linked(self._own, [node for node, _ in self.serving()], self._members.are_linked)
        left_out = [(node, f"has no link to {self._members.name_of(other)}") for node, other in apart]
        devices: list[tuple[int, Device]] = []
        for node in nodes:
            peer = self._members.get(node) if node != self._own else None
            device = peer.device if peer is not None and peer.device is not None else self.device
            exclusion = self._exclusions.get(node)
            if exclusion and exclusion.incarnation == self._incarnation(node) and now < exclusion.until:
                left_out.append((node, exclusion.reason))
            else:
                devices.append((self._incarnation(node), device))
        return Situation(self.model, tuple(devices), tuple(sorted(left_out)))

    def _notice(self, situation: Situation, now: float) -> None:
        """Schedules a plan if things are not as they were at the last one."""
        if situation == (self._pending if self.is_due and self._pending else self._planned):
            return
        if situation == self._planned:  # back to what the layout is made for
            self._plan_at, self._pending = math.inf, None
            return
        if not self.is_due:
            self._changed_at = now
        self._pending = situation
        self._plan_at = max(now, min(now + SETTLE_S, self._changed_at + LONGEST_SETTLE_S))

    def _must_wait(self, *, offering: bool, now: float) -> bool:
        """Whether somebody is about to be lost or found again, or (for "auto") round trips are still unknown."""
        serving = self.serving()
        if any(state is PeerState.SUSPECTED for _, state in serving) and not offering:
            self._plan_at, self._recheck_at = now + SUSPECT_PAUSE_S, math.inf
            return True
        nodes = [self._own, *(node for node, _ in serving)]
        unmeasured = len(known_links(self._own, self._members, nodes)) < len(nodes) * (len(nodes) - 1) // 2
        if self._config.layout_mode == "auto" and unmeasured and now < self._changed_at + MEASURE_S:
            self._plan_at, self._recheck_at = now + SUSPECT_PAUSE_S, math.inf
            return True
        return False

    def _schedule_recheck(self, situation: Situation, *, recheck: bool, now: float) -> None:
        wanted = self._config.layout_mode == "auto" and len(situation.devices) > 1
        self._recheck_at = now + (RECHECK_S if recheck else FIRST_RECHECK_S) if wanted else math.inf


def same_placement(a: Layout, b: Layout) -> bool:
    """Whether two layouts put the same slices on the same nodes, with caches of the same size."""
    places = [[(share.node, share.slice) for share in layout.shares] for layout in (a, b)]
    return places[0] == places[1] and (a.context, a.slots, a.exchange) == (b.context, b.slots, b.exchange)
