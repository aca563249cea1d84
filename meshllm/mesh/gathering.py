"""Parts of a model's file that ranks fetch before a layout needs them. Pure.

A layout is offered only to devices that hold what it gives them. Where one lacks some of it, its driver says `Need`,
the device fetches beside whatever runs and says `Held`; meanwhile the driver uses those that lack nothing. So a
transfer, which may take an hour, neither stops an answer nor holds memory for a layout to come, and Prepare is what it
was: packing.
"""

from __future__ import annotations

from typing import Final

from meshllm.layout.keep import keep_parts
from meshllm.layout.layout import Layout, NodeId
from meshllm.mesh.actions import Gather
from meshllm.mesh.check_values import MAX_HELD
from meshllm.mesh.epoch import EpochBook
from meshllm.mesh.link_speeds import known_links
from meshllm.mesh.membership import Membership
from meshllm.mesh.messages import Held, ModelHash, Need
from meshllm.mesh.outbox import Outbox
from meshllm.mesh.planning import Planning
from meshllm.mesh.situation import Situation
from meshllm.model.slicing import Slice

FETCHES: Final = "is fetching its part of the model"


class Gathering:
    """As driver: plans with what devices hold. As rank: fetches, and says so."""

    def __init__(self, own: NodeId, planning: Planning, members: Membership, epochs: EpochBook, out: Outbox) -> None:
        self._own = own
        self._planning = planning
        self._members = members
        self._epochs = epochs
        self._out = out
        self._held: tuple[ModelHash | None, tuple[Slice, ...]] = (None, ())  # by this device, of that file
        self._wished: tuple[Layout, Situation] | None = None  # offered when all of it is held

    # --- the driver

    def plan(self, now: float) -> tuple[Layout, Situation] | None:
        """The layout to use now, whose ranks lack nothing; whoever lacks something for a better one is told."""
        self._wished = None
        planned = self._plan(now, [])
        if planned is None:
            return None
        lacking = self._lacking(planned[0])
        if not lacking:
            return planned
        self._wished = planned
        for node in lacking:
            self._tell(node, planned[0])
        current = self._epochs.in_force()
        ours = current is not None and current.epoch.driver == self._own
        if ours and current is not None and any(current.layout.rank_of(node) is not None for node in lacking):
            return None  # it works as it is, until the better one can be had
        left_out: list[NodeId] = []
        while planned is not None and (lacking := self._lacking(planned[0])):
            left_out += lacking  # without them the others are given more, which they may lack in turn
            planned = self._plan(now, left_out)
        return planned

    def _plan(self, now: float, left_out: list[NodeId]) -> tuple[Layout, Situation] | None:
        """A plan, or one almost as good for which nobody has to fetch."""
        planned = self._planning.plan(now, left_out, FETCHES)
        if planned is None or not self._lacking(planned[0]):
            return planned
        layout, situation = planned
        parts = {share.node: self._held_by(share.node) for share in layout.shares}
        held = {node: slices[0] for node, slices in parts.items() if slices}
        if not all(node in held for node in self._lacking(layout)):
            return planned
        devices = {device.node: device for _, device in situation.devices}
        links = known_links(self._own, self._members, list(devices))
        kept = keep_parts(layout, held, devices, links, situation.model.shape, self._own)
        return planned if kept is None else (kept, situation)

    def complete(self) -> tuple[Layout, Situation] | None:
        """The layout that was waited for, once its ranks lack nothing."""
        wished = self._wished
        if wished is None or self._planning.is_due or self._lacking(wished[0]):
            return None
        there = {self._own, *(node for node, _ in self._planning.serving())}
        if not all(share.node in there for share in wished[0].shares):
            return None  # another plan follows
        self._wished = None
        return wished

    def remind(self, node: NodeId) -> None:
        """It has a new link, or another model: what was said on the last one may be lost."""
        if self._wished is not None and node in self._lacking(self._wished[0]):
            self._tell(node, self._wished[0])

    def stop(self) -> None:
        """Somebody else drives: nothing is planned, nothing waited for."""
        self._planning.stop()
        self._wished = None

    def _lacking(self, layout: Layout) -> list[NodeId]:
        return [share.node for share in layout.shares if not self._holds(share.node, share.slice)]

    def _holds(self, node: NodeId, part: Slice) -> bool:
        held = self._held_by(node)
        return held is None or any(one.holds(part) for one in held)

    def _held_by(self, node: NodeId) -> tuple[Slice, ...] | None:
        """Slices that a device has fetched, the latest first; None if it holds all of the file."""
        if node == self._own:
            model, (of, held) = self._planning.model, self._held
            if model is None or model.whole:
                return None
            return held if of == model.hash else model.held
        peer = self._members.get(node)
        return None if peer is None or peer.whole else peer.held

    def _tell(self, node: NodeId, layout: Layout) -> None:
        model, part = self._planning.model, next(share.slice for share in layout.shares if share.node == node)
        assert model is not None  # there is a layout of it
        self._out.report("part_needed", peer="self" if node == self._own else self._members.plain_name(node))
        if node == self._own:
            self._out.add(Gather(model.hash, part))
        else:
            self._out.send(self._members.link_of(node), Need(model.hash, part))

    # --- a rank

    def take(self, node: NodeId, message: Need | Held, now: float) -> None:
        """What a driver needs of us, or what a rank says to it."""
        model = self._planning.model
        if isinstance(message, Held):
            peer = self._members.get(node)
            if peer is not None and peer.model == message.model:
                self._take_held(node, message.part, message.problem, now)
        elif model is None or model.hash != message.model:
            self._out.send(self._members.link_of(node), Held(message.model, message.part, "serves another model"))
        elif self._planning.elected() != node:
            name = self._members.name_of(self._planning.elected())
            self._out.send(self._members.link_of(node), Held(message.model, message.part, f"follows {name}"))
        else:
            self._out.add(Gather(message.model, message.part))

    def held(self, model: ModelHash, part: Slice, problem: str | None, now: float) -> None:
        """This device's daemon carried out a Gather, or cannot."""
        if self._planning.model is None or self._planning.model.hash != model:
            return
        if problem is None:
            self._held = (model, _remember(self._held_by(self._own) or (), part))
        driver = self._planning.elected()
        if driver == self._own:
            self._take_held(self._own, part, problem, now)
        else:
            self._out.send(self._members.link_of(driver), Held(model, part, problem))

    def _take_held(self, node: NodeId, part: Slice, problem: str | None, now: float) -> None:
        peer = self._members.get(node)
        if problem is not None:
            self._planning.exclude(node, f"cannot fetch its part of the model: {problem}", now)
        elif peer is not None and node != self._own:
            peer.held = _remember(peer.held, part)


def _remember(held: tuple[Slice, ...], part: Slice) -> tuple[Slice, ...]:
    """What was fetched stays: an answer to an older Need may come after one to a newer."""
    return (part, *(one for one in held if not part.holds(one)))[:MAX_HELD]
