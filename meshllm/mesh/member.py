"""A member's part in epochs: what it takes from drivers, what it answers, what it does when one breaks here. Pure."""

from __future__ import annotations

from typing import TypeAlias

from meshllm.layout.layout import NodeId
from meshllm.mesh.driver import Driver
from meshllm.mesh.epoch import EpochBook, EpochEvent, MemberEpoch, allows, members_of
from meshllm.mesh.facts import NodeConfig
from meshllm.mesh.membership import Membership
from meshllm.mesh.messages import Abort, Commit, ControlMessage, Epoch, Prepare, Prepared, Refused
from meshllm.mesh.outbox import Outbox
from meshllm.mesh.planning import Planning, same_placement

EpochMessage: TypeAlias = Prepare | Commit | Abort | Prepared | Refused


class Member:
    """Takes epochs from the driver that this node elects; tells the driver, itself included, how they fare here."""

    def __init__(
        self,
        config: NodeConfig,
        planning: Planning,
        members: Membership,
        epochs: EpochBook,
        driver: Driver,
        out: Outbox,
    ) -> None:
        self._own, self._name = config.node, f"'{config.name}'"
        self._planning = planning
        self._members = members
        self._epochs = epochs
        self._driver = driver
        self._out = out

    def take(self, node: NodeId, message: EpochMessage, now: float) -> str | None:
        """A message about an epoch. Returns how it breaks the protocol, if it does."""
        entry = self._epochs.get(message.epoch)
        match message:
            case Prepare():
                return self._take_offer(node, message)
            case Commit() if entry is not None and message.epoch.driver == node:
                if not allows(entry, EpochEvent.COMMIT):
                    return f"committed epoch {message.epoch.counter} before it was prepared here"
                if self._epochs.comes_late(entry):
                    self._break(entry, None, f"{self._name} is in a larger epoch by now", now)
                else:
                    self._epochs.step(entry, EpochEvent.COMMIT)
            case Abort(reason=reason) if entry is not None and message.epoch.driver == node:
                self._epochs.step(entry, EpochEvent.END, reason)
            case Abort(reason=reason) if message.epoch.driver == self._own:
                self._driver.broken(message.epoch, None, reason, now)
            case Prepared() if message.epoch.driver == self._own:
                self._driver.prepared(message.epoch, node)
            case Refused() if message.epoch.driver == self._own:
                self._driver.refused(message.epoch, node, message.reason, message.seen, now)
            case _:
                pass  # of an epoch that is over: late, harmless
        return None

    def prepared(self, epoch: Epoch) -> None:
        """The data loop is ready."""
        entry = self._epochs.get(epoch)
        if entry is None or not allows(entry, EpochEvent.READY):
            return
        self._epochs.step(entry, EpochEvent.READY)
        if epoch.driver == self._own:
            self._driver.prepared(epoch, self._own)
        else:
            self._send(epoch.driver, Prepared(epoch))

    def refused(self, epoch: Epoch, reason: str, now: float) -> None:
        """The data loop cannot."""
        entry = self._epochs.get(epoch)
        if entry is None:
            return
        if epoch.driver == self._own:
            self._driver.refused(epoch, self._own, reason, None, now)
        else:
            self._epochs.step(entry, EpochEvent.END, reason)
            self._send(epoch.driver, Refused(epoch, reason, None))

    def broken(self, epoch: Epoch, node: NodeId | None, reason: str, now: float) -> None:
        """The data loop lost the epoch, because of `node` if one is known."""
        entry = self._epochs.get(epoch)
        if entry is not None:
            if node == self._own:
                reason = f"{self._name} failed: {reason}"
            elif node is not None:
                reason = f"lost {self._members.name_of(node)}: {reason}"
            self._break(entry, node, reason, now)

    def model_changed(self, why: str, now: float) -> None:
        """Epochs of another model than the one served now are broken."""
        model = self._planning.model
        for entry in self._epochs.all():
            if model is None or entry.model != model.hash:
                self._break(entry, None, f"{self._name} {why}", now)

    def driver_lost(self, node: NodeId, reason: str) -> None:
        """Its epochs end."""
        for entry in self._epochs.all():
            if entry.epoch.driver == node:
                self._epochs.step(entry, EpochEvent.END, reason)

    def _break(self, entry: MemberEpoch, blame: NodeId | None, reason: str, now: float) -> None:
        if entry.epoch.driver == self._own:
            self._driver.broken(entry.epoch, blame, reason, now)
        else:
            self._epochs.step(entry, EpochEvent.END, reason)
            self._send(entry.epoch.driver, Abort(entry.epoch, reason))

    def _take_offer(self, node: NodeId, message: Prepare) -> str | None:
        known = self._epochs.get(message.epoch)
        if message.epoch.driver != node:
            return "offered an epoch of another driver"
        if known is not None:  # the same placement with other reasons for those left out
            if not same_placement(known.layout, message.layout):
                return f"changed the layout of epoch {message.epoch.counter}"
            known.layout = message.layout
        elif (reason := self._why_not(message)) is not None:
            self._send(node, Refused(message.epoch, reason, self._epochs.taken))
        else:
            addresses = {other: peer.address for other, peer in self._members.alive()}
            self._epochs.begin(message.epoch, message.model, message.layout, addresses)
        return None

    def _why_not(self, message: Prepare) -> str | None:
        """Why an offered epoch cannot be taken, or None."""
        model, layout = self._planning.model, message.layout
        if model is None or model.hash != message.model:
            return "serves another model"
        if not model.shape.covers(tuple(share.slice for share in layout.shares)):
            return "the layout does not cover the model"
        driver = self._planning.elected()
        if driver != message.epoch.driver:
            return f"follows {self._members.name_of(driver) if driver != self._own else 'itself'}"
        holds = layout.rank_of(self._own) is not None
        for node in members_of(message.epoch, layout, self._own) if holds else ():
            if self._members.link_of(node) is None:
                return f"has no link to {self._members.name_of(node)}"
        return self._epochs.why_not(message.epoch, holds=holds)

    def _send(self, node: NodeId, message: ControlMessage) -> None:
        self._out.send(self._members.link_of(node), message)
