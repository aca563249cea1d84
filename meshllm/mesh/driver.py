"""The driver's work on epochs: offer, commit, end. When and what to plan is planning.py's. Pure.

A new epoch is prepared beside the old one and committed when all its members prepared it; the old one ends with its
last answer. Where both do not fit into memory, the offer waits until the old one is idle. An epoch that loses a member
ends: its answers fail, naming the member, and the next plan is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import Layout, NodeId
from meshllm.mesh.admissions import Admissions
from meshllm.mesh.epoch import EpochBook, EpochEvent, members_of
from meshllm.mesh.facts import NodeConfig
from meshllm.mesh.gathering import Gathering
from meshllm.mesh.membership import Membership
from meshllm.mesh.messages import Abort, Commit, ControlMessage, Epoch, Prepare
from meshllm.mesh.offer import Offer, OfferEvent, OfferState, fits_beside
from meshllm.mesh.outbox import Outbox
from meshllm.mesh.planning import Planning, same_placement
from meshllm.mesh.situation import Situation

PREPARE_S: Final = 600.0  # a rank that takes longer to pack its slice is left out
YIELD_S: Final = 15.0  # after another was elected, an idle epoch of ours ends: its memory may be what the other lacks


class Driver:
    """Drives while this node is the elected one; its committed epochs serve until another driver's replaces them."""

    def __init__(
        self,
        config: NodeConfig,
        planning: Planning,
        gathering: Gathering,
        members: Membership,
        epochs: EpochBook,
        admissions: Admissions,
        out: Outbox,
    ) -> None:
        self._own, self._incarnation = config.node, config.incarnation
        self._planning, self._gathering = planning, gathering
        self._members, self._epochs = members, epochs
        self._admissions, self._out = admissions, out
        self._offers: dict[Epoch, Offer] = {}
        self._yield_at, self._renew = math.inf, False  # renew: the layout in force needs a larger number
        self._when_idle: Layout | None = None  # does not fit beside what runs: offered when that has ended

    @property
    def is_busy(self) -> bool:
        """Whether a layout is about to be planned or is being prepared."""
        return self._planning.is_due or bool(self._offered()) or self._when_idle is not None

    def review(self, now: float) -> None:
        """After every event: ends what is over, plans if that is due."""
        self._finish_superseded()
        if self._planning.model is None or self._planning.elected() != self._own:
            self._stand_down(now)
            return
        self._yield_at = math.inf
        for offer, node in [(o, n) for o in self._offered() if now >= o.deadline for n in o.waiting]:
            self.refused(offer.epoch, node, f"not done within {PREPARE_S:.0f} s", None, now)
        if self._planning.look(offering=bool(self._offered()), now=now):
            self._when_idle = None
            if (planned := self._gathering.plan(now)) is not None:
                self._adopt(*planned, now)
        elif (gathered := self._gathering.complete()) is not None:
            self._adopt(*gathered, now)
        elif self._when_idle is not None:
            self._offer_when_idle(now)

    def next_deadline(self) -> float:
        """When `review` has something to do without another event."""
        yielding = self._yield_at if self._offers else math.inf
        return min([self._planning.next_deadline(), yielding, *(offer.deadline for offer in self._offered())])

    # --- what members say

    def prepared(self, epoch: Epoch, node: NodeId) -> None:
        """A member, or this node, is ready."""
        offer = self._offers.get(epoch)
        if offer is None or offer.state is not OfferState.OFFERED:
            return
        offer.waiting.pop(node, None)
        if not offer.waiting:
            self._commit(offer)

    def refused(self, epoch: Epoch, node: NodeId, reason: str, seen: Epoch | None, now: float) -> None:
        """A member cannot, or saw a larger epoch: `seen`."""
        self._epochs.saw(seen)
        offer = self._offers.get(epoch)
        if offer is not None and offer is self._in_force() and seen is not None and seen > epoch:
            self._renew = True  # halves of a split mesh met: those of the other half take only a larger epoch
            self._planning.again(now)
        if offer is None or offer.state is not OfferState.OFFERED or not offer.has(node):
            return
        name = "this device" if node == self._own else self._members.name_of(node)
        if seen is None or seen < epoch:
            self._planning.exclude(node, f"could not prepare: {reason}", now)
        self._end(offer, f"{name} could not prepare it: {reason}")
        self._planning.again(now)

    def broken(self, epoch: Epoch, blame: NodeId | None, reason: str, now: float) -> None:
        """A member's data loop lost the epoch, because of `blame` if one is known."""
        offer = self._offers.get(epoch)
        if offer is None:
            return
        if blame is not None and blame != self._own:
            self._planning.exclude(blame, reason, now)
        self._end(offer, reason)
        self._planning.again(now)

    def peer_ended(self, node: NodeId, reason: str, now: float) -> None:
        """A peer is gone, and with it every epoch that it is a member of."""
        self._when_idle = None
        for offer in [offer for offer in self._offers.values() if offer.has(node)]:
            self._end(offer, reason)
            self._planning.again(now)

    def peer_joined(self, node: NodeId) -> None:
        """Tells a newcomer, or one that serves our model now, the layout in force if it is ours."""
        self._gathering.remind(node)
        offer = self._in_force()
        if offer is not None and self._planning.elected() == self._own:
            self._announce(offer, [node])

    def end_all(self, reason: str) -> None:
        """A clean stop, or another model."""
        for offer in list(self._offers.values()):
            self._end(offer, reason)

    # --- from layout to epoch

    def _offered(self) -> list[Offer]:
        return [offer for offer in self._offers.values() if offer.state is OfferState.OFFERED]

    def _in_force(self) -> Offer | None:
        entry = self._epochs.in_force()
        return self._offers.get(entry.epoch) if entry else None

    def _adopt(self, layout: Layout, situation: Situation, now: float) -> None:
        """Offers a layout, unless the one in force or in preparation does as well."""
        if any(same_placement(offer.layout, layout) for offer in self._offered()):
            return
        for offer in self._offered():
            self._end(offer, "another layout is planned")
        current = self._in_force()
        stays = current is not None and current.model == situation.model and not self._renew
        if current and stays and not self._planning.is_worth_moving(current.layout, layout, situation):
            if current.layout.left_out != layout.left_out:
                self._annotate(current, msgspec.structs.replace(current.layout, left_out=layout.left_out))
        elif fits_beside(self._offers.values(), layout, situation):
            for offer in [o for o in self._offers.values() if o.state is OfferState.FINISHING]:
                self._end(offer, "another layout follows already")  # two are enough; its answers go on in the next
            self._offer(layout, now)
        else:
            self._when_idle = layout
            self._offer_when_idle(now)

    def _offer_when_idle(self, now: float) -> None:
        layout = self._when_idle
        if layout is None or any(self._admissions.count(epoch) for epoch in self._offers):
            return
        self._when_idle = None
        self.end_all("makes room for another layout")
        self._offer(layout, now)

    def _offer(self, layout: Layout, now: float) -> None:
        model = self._planning.model
        if model is None:
            raise LocalProtocolError("a layout without a model")
        self._renew = False
        epoch = Epoch(self._epochs.next_counter(), self._own, self._incarnation)
        others = members_of(epoch, layout, self._own)
        self._offers[epoch] = Offer(epoch, model, layout, dict.fromkeys([*others, self._own]), now + PREPARE_S)
        names = ", ".join("self" if s.node == self._own else self._members.plain_name(s.node) for s in layout.shares)
        self._out.report("layout_offered", epoch=epoch.counter, ranks=names, context=layout.context)
        addresses = {node: peer.address for node, peer in self._members.alive()}
        self._epochs.begin(epoch, model.hash, layout, addresses)
        for node in others:
            self._send(node, Prepare(epoch, model.hash, layout))

    def _commit(self, offer: Offer) -> None:
        offer.step(OfferEvent.ALL_PREPARED)
        entry = self._epochs.get(offer.epoch)
        if entry is None:
            raise LocalProtocolError(f"epoch {offer.epoch.counter} is unknown here")
        self._epochs.step(entry, EpochEvent.COMMIT)
        for node in members_of(offer.epoch, offer.layout, self._own):
            self._send(node, Commit(offer.epoch))
        self._announce(offer, [node for node, _ in self._planning.serving()])
        self._finish_superseded()

    def _announce(self, offer: Offer, nodes: Sequence[NodeId]) -> None:
        """Tells those that hold no slice of the layout in force."""
        for node in nodes:
            peer = self._members.get(node)
            if not offer.has(node) and peer is not None and peer.model == offer.model.hash:
                self._send(node, Prepare(offer.epoch, offer.model.hash, offer.layout))
                self._send(node, Commit(offer.epoch))

    def _annotate(self, offer: Offer, layout: Layout) -> None:
        """The same placement with other reasons for those left out."""
        offer.layout = layout
        entry = self._epochs.get(offer.epoch)
        if entry is not None:
            entry.layout = layout
        for node, _ in self._planning.serving():
            self._send(node, Prepare(offer.epoch, offer.model.hash, layout))

    def _finish_superseded(self) -> None:
        """Epochs of ours that are not in force any more end with their last answer."""
        entry = self._epochs.in_force()
        for offer in list(self._offers.values()):
            if offer.state is OfferState.COMMITTED and entry is not None and entry.epoch != offer.epoch:
                offer.step(OfferEvent.SUPERSEDED)
            if offer.state is OfferState.FINISHING and not self._admissions.count(offer.epoch):
                self._end(offer, "replaced")

    def _end(self, offer: Offer, reason: str) -> None:
        """Takes back an epoch in whatever state: its answers fail, its members free what it took."""
        offer.step(OfferEvent.ENDED)
        del self._offers[offer.epoch]
        self._out.report("epoch_ended", epoch=offer.epoch.counter, reason=reason)
        self._admissions.fail_epoch(offer.epoch, reason)
        for node, _ in self._members.alive():
            self._send(node, Abort(offer.epoch, reason))
        entry = self._epochs.get(offer.epoch)
        if entry is not None:
            self._epochs.step(entry, EpochEvent.END, reason)

    def _stand_down(self, now: float) -> None:
        """Somebody else drives, or there is no model: no new epochs of ours; committed ones serve until replaced."""
        self._gathering.stop()
        self._when_idle = None
        self._yield_at = min(self._yield_at, now + YIELD_S)
        if now >= self._yield_at:
            self._yield_at = now + YIELD_S
            for offer in [o for o in self._offers.values() if not self._admissions.count(o.epoch)]:
                self._end(offer, "yields to the device that drives now")
        for offer in self._offered():
            self._end(offer, "another device drives now")

    def _send(self, node: NodeId, message: ControlMessage) -> None:
        self._out.send(self._members.link_of(node), message)
