"""Requests on their way between root and driver, either of which may be this node. Pure."""

from __future__ import annotations

from typing import TypeAlias

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import NodeId
from meshllm.mesh.admissions import Admissions
from meshllm.mesh.epoch import EpochBook
from meshllm.mesh.facts import NodeConfig
from meshllm.mesh.membership import Membership
from meshllm.mesh.messages import Cancel, ControlMessage, Failed, Finished, RequestId, Submit, Tokens
from meshllm.mesh.outbox import Outbox
from meshllm.mesh.planning import Planning
from meshllm.mesh.request import MOVED, RootRequests

RETRY_S = 0.25  # after a driver said that it does not drive, or that the epoch is over
Answer: TypeAlias = Tokens | Finished | Failed


class Routing:
    """Root's and driver's requests of this node, and the messages between."""

    def __init__(
        self, config: NodeConfig, planning: Planning, members: Membership, epochs: EpochBook, out: Outbox
    ) -> None:
        self._own = config.node
        self._planning = planning
        self._members = members
        self._epochs = epochs
        self._out = out
        self.roots = RootRequests(out, config.wait_s)
        self.admissions = Admissions(out, self._answer)
        self._now = 0.0

    def dispatch(self, now: float) -> None:
        """Sends requests that wait to the driver of the epoch in force, if there is one for their model."""
        self._now = now
        in_force = self._epochs.in_force()
        for request in self.roots.waiting(now):
            if in_force is not None and request.submit.model == in_force.model:
                driver = in_force.epoch.driver
                submit = self.roots.dispatched(request, driver)
                if driver == self._own:
                    self.admissions.take(self._own, submit, in_force.epoch)
                else:
                    self._send(driver, submit)

    def cancel(self, request: RequestId) -> None:
        """The local reader left."""
        driver = self.roots.cancel(request)
        if driver == self._own:
            self.admissions.cancel(request, self._own)
        elif driver is not None:
            self._send(driver, Cancel(request))

    def peer_ended(self, node: NodeId, reason: str, now: float) -> None:
        """A peer is gone: as a root it reads no more, as a driver it answers no more."""
        self.admissions.root_lost(node)
        self.roots.driver_lost(node, reason, now)

    def take(self, node: NodeId, message: Submit | Cancel | Answer, now: float) -> str | None:
        """A message from a root or from a driver. Returns how it breaks the protocol, if it does."""
        self._now = now
        match message:
            case Submit():
                self._take_submit(node, message)
            case Cancel():
                self.admissions.cancel(message.request, node)
            case Tokens():
                return self.roots.tokens(message, node)
            case Finished():
                return self.roots.finished(message, node)
            case Failed():
                self.roots.failed(message, node, now, now + RETRY_S)
        return None

    def _take_submit(self, node: NodeId, message: Submit) -> None:
        in_force, model = self._epochs.in_force(), self._planning.model
        if in_force is None or in_force.epoch.driver != self._own or model is None or message.model != in_force.model:
            self._send(node, Failed(message.request, MOVED, "another device drives now, or none does"))
        elif max(message.prompt + message.generated) >= model.shape.vocab_size:
            self._send(node, Failed(message.request, "invalid_request_error", "a token id is beyond the vocabulary"))
        else:
            self.admissions.take(node, message, in_force.epoch)

    def _answer(self, root: NodeId, message: Answer) -> None:
        """Takes a driver's message to a root."""
        if root != self._own:
            self._send(root, message)
        elif (wrong := self.take(self._own, message, self._now)) is not None:
            raise LocalProtocolError(wrong)

    def _send(self, node: NodeId, message: ControlMessage) -> None:
        self._out.send(self._members.link_of(node), message)
