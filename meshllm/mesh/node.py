"""The control loop's face of the mesh: what happened goes in with the time, what to do comes out as actions. Pure.

One Node a daemon, owned by its control loop. After every call: run `take_actions()` in order, and sleep until
`next_deadline()` at most, then `wake`. Time is any monotonic clock in seconds. Nothing here raises because of a peer or
the world; LocalProtocolError means that the caller used it wrongly.
"""

from __future__ import annotations

import math
from typing import assert_never

from meshllm.errors import InvalidRequestError, LocalProtocolError, MeshLLMError, ModelFileError, RemoteProtocolError
from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.actions import Action, Address, CloseLink, Deliver, LinkId
from meshllm.mesh.checks import check
from meshllm.mesh.driver import Driver
from meshllm.mesh.epoch import EpochBook, EpochEvent
from meshllm.mesh.facts import AddressSource, ModelFacts, NodeConfig, NodeView
from meshllm.mesh.gathering import Gathering
from meshllm.mesh.greetings import make_hello
from meshllm.mesh.member import Member
from meshllm.mesh.membership import Membership
from meshllm.mesh.messages import (
    Abort,
    Cancel,
    Commit,
    ControlMessage,
    Epoch,
    Failed,
    Filler,
    Finished,
    Goodbye,
    Heartbeat,
    Held,
    Hello,
    ModelHash,
    Need,
    PeerAddresses,
    Prepare,
    Prepared,
    Refused,
    RequestId,
    ServedModel,
    Submit,
    Tokens,
)
from meshllm.mesh.outbox import Outbox
from meshllm.mesh.planning import Planning
from meshllm.mesh.request import UNAVAILABLE
from meshllm.mesh.routing import Routing
from meshllm.mesh.sessions import Ended, Joined, SessionEvent, Sessions
from meshllm.mesh.view import make_view
from meshllm.model.slicing import Slice


class Node:
    """See the head of this file."""

    def __init__(self, config: NodeConfig, device: Device, model: ModelFacts | None, now: float) -> None:
        self._config = config
        self._now = now
        self._stopped = False
        self._greeted_before: tuple[LinkId, ...] = ()  # links whose Hello told of another model than the one now served
        self._out = Outbox()
        self._members = Membership()
        self._sessions = Sessions(config, self._members, self._out)
        self._epochs = EpochBook(config.node, self._out)
        self._planning = Planning(config, self._members, self._epochs, self._out)
        self._planning.model, self._planning.device = model, device
        self._routing = Routing(config, self._planning, self._members, self._epochs, self._out)
        self._roots, self._admissions = self._routing.roots, self._routing.admissions
        self._gathering = Gathering(config.node, self._planning, self._members, self._epochs, self._out)
        self._driver = Driver(
            config, self._planning, self._gathering, self._members, self._epochs, self._admissions, self._out
        )
        self._member = Member(config, self._planning, self._members, self._epochs, self._driver, self._out)
        self._sessions.greetings.free_bytes = device.usable_bytes
        self._review()

    # --- the world: addresses and links

    def addresses_found(
        self, source: AddressSource, node: NodeId | None, addresses: tuple[Address, ...], now: float
    ) -> None:
        """Somebody may listen there: "static" (configured, retried for ever) or "mdns" (its node id is known)."""
        if self._begin(now):
            self._sessions.book.found(source, node, addresses, self._now)
            self._review()

    def addresses_gone(self, node: NodeId, now: float) -> None:
        """mDNS says that a node left: it is no longer dialled there. Its link, if any, decides whether it lives."""
        if self._begin(now):
            self._sessions.book.gone(node)

    def dial_failed(self, key: str, reason: str, now: float) -> None:
        """No address of a Dial answered. It is tried again later, ever more seldom."""
        if self._begin(now):
            self._sessions.book.failed(key, self._now, reason)
            self._out.report("dial_failed", target=key, reason=reason)
            self._review()

    def link_opened(self, link: LinkId, address: Address, dialed: str | None, now: float) -> None:
        """A fresh control link, TLS done. address: the other end's. dialed: the key of the Dial, None if accepted.

        It is reported before its first message is passed to `receive`; our Hello is sent at once.
        """
        if not self._begin(now):
            self._out.add(CloseLink(link, "stopping", at_fault=False))
            return
        self._sessions.opened(link, address, dialed, self._hello(), self._now)
        self._review()

    def receive(self, link: LinkId, message: ControlMessage, now: float, network_rtt_us: float | None = None) -> None:
        """A message of a link, in order; ignored if it was closed here. network_rtt_us: see Membership.heartbeat."""
        if not self._begin(now):
            return
        if isinstance(message, Hello):
            self._follow(self._sessions.greeted(link, message, self._now))
        elif isinstance(message, Goodbye) and message.refused:
            self._follow(self._sessions.refused(link, message.reason, self._now))
        else:
            node, events = self._sessions.sender(link, self._now)
            self._follow(events)
            if node is not None:
                self._take(node, message, network_rtt_us)
        self._review()

    def link_lost(self, link: LinkId, reason: str, now: float) -> None:
        """The link ended by the other side, by the network or by a fault in its bytes."""
        if self._begin(now):
            self._follow(self._sessions.closed(link, reason, self._now))
            self._review()

    # --- this device

    def set_model(self, model: ModelFacts | None, device: Device, now: float, lost: MeshLLMError | None = None) -> None:
        """The model served here, or what this device can do, changed. lost: why the last model is no more."""
        if not self._begin(now):
            return
        self._planning.model, self._planning.device = model, device
        why = f"cannot go on with its model: {lost}" if model is None else "serves another model now"
        code = ModelFileError.code if model is None else UNAVAILABLE
        self._roots.fail_all(f"'{self._config.name}' {why}", code, but=model.hash if model else None)
        self._member.model_changed(why, self._now)
        self._greeted_before = tuple(self._sessions.all_links())
        self._sessions.greetings.tell_all(self._served_model())
        self._review()

    def set_free_bytes(self, free_bytes: int) -> None:
        """Free memory as of now, for the next heartbeats."""
        self._sessions.greetings.free_bytes = free_bytes

    def prepared(self, epoch: Epoch, now: float) -> None:
        """PrepareEpoch was carried out, all data links are up. Ignored, as the next two, if the epoch was retired."""
        if self._begin(now):
            self._member.prepared(epoch)
            self._review()

    def prepare_refused(self, epoch: Epoch, reason: str, now: float) -> None:
        """PrepareEpoch could not be carried out (memory, file). RetireEpoch follows."""
        if self._begin(now):
            self._member.refused(epoch, reason, self._now)
            self._review()

    def epoch_broken(self, epoch: Epoch, node: NodeId | None, reason: str, now: float) -> None:
        """An epoch lost a data link or a step (to `node`, if one is to blame). RetireEpoch follows."""
        if self._begin(now):
            self._member.broken(epoch, node, reason, self._now)
            self._review()

    def held(self, model: ModelHash, part: Slice, problem: str | None, now: float) -> None:
        """A Gather was carried out; problem: or cannot be, for now."""
        if self._begin(now):
            self._gathering.held(model, part, problem, self._now)
            self._review()

    # --- requests whose root is this daemon

    def submit(self, request: Submit, now: float) -> None:
        """Starts a request of a local reader; its answer comes as Deliver actions until Finished or Failed.

        Raises LocalProtocolError if the id is in use.
        """
        if not self._begin(now):
            failed = Failed(request.request, UNAVAILABLE, "this daemon is stopping")
            self._out.add(Deliver(request.request, failed))
            return
        try:
            check(request)  # what a driver would close the link for is refused here
        except RemoteProtocolError as error:
            self._out.add(Deliver(request.request, Failed(request.request, InvalidRequestError.code, str(error))))
            return
        self._roots.add(request, self._now)
        self._review()

    def cancel(self, request: RequestId, now: float) -> None:
        """The reader left: nothing more is delivered. Unknown ids are ignored."""
        if self._begin(now):
            self._routing.cancel(request)
            self._review()

    # --- the driver's data loop, of requests that were admitted

    def answered(self, epoch: Epoch, message: Tokens | Finished | Failed, now: float) -> None:
        """What came of a request in an epoch; ignored if it no longer runs in that one."""
        if self._begin(now):
            self._admissions.answered(epoch, message)
            self._review()

    # --- time and results

    def shutdown(self, reason: str, now: float) -> None:
        """A clean stop: local answers fail, epochs are retired, peers are told, links are closed."""
        if not self._begin(now):
            return
        self._driver.end_all(f"'{self._config.name}' stopped: {reason}")
        for entry in self._epochs.all():
            self._epochs.step(entry, EpochEvent.END, reason)
        self._roots.fail_all("this daemon is stopping: ask again when it runs", UNAVAILABLE)
        self._sessions.greetings.tell_all(Goodbye(reason))
        for link in self._sessions.all_links():
            self._out.add(CloseLink(link, reason, at_fault=False))
        self._stopped = True

    def wake(self, now: float) -> None:
        """A deadline has come (early is harmless)."""
        if self._begin(now):
            self._review()

    def next_deadline(self) -> float:
        """When `wake` is wanted; math.inf if never."""
        if self._stopped:
            return math.inf
        return min(self._sessions.next_deadline(), self._driver.next_deadline(), self._roots.next_deadline())

    def take_actions(self) -> list[Action]:
        """What to do, in order; each is handed out once."""
        return self._out.take()

    def view(self, now: float) -> NodeView:
        """The state for `status`."""
        return make_view(
            self._config,
            self._planning,
            self._members,
            self._sessions,
            self._epochs.in_force(),
            is_preparing=self._driver.is_busy or bool(self._epochs.all()),
            active_requests=len(self._roots),
            now=max(now, self._now),
        )

    # --- inside

    def _begin(self, now: float) -> bool:
        """Takes the time; False once stopped."""
        if self._stopped:
            return False
        gap, self._now = max(0.0, now - self._now), max(now, self._now)
        self._sessions.slept(gap)
        return True

    def _review(self) -> None:
        """Draws conclusions from whatever happened."""
        self._follow(self._sessions.tick(self._now))
        self._driver.review(self._now)
        self._routing.dispatch(self._now)
        in_force = self._epochs.in_force()
        self._sessions.greetings.epoch = in_force.epoch if in_force else None
        if self._roots.has_late(self._now):
            missing = self.view(self._now).detail or "the mesh is changing"
            reason = f"no layout came into force in {self._config.wait_s:.0f} s: {missing}"
            self._roots.expire(self._now, reason, preparing=self._driver.is_busy or self._epochs.is_preparing())

    def _served_model(self) -> ServedModel:
        hello = self._hello()
        return ServedModel(hello.model, hello.model_name, hello.device, hello.whole, hello.held)

    def _follow(self, events: list[SessionEvent]) -> None:
        for event in events:
            match event:
                case Joined(node):
                    link = self._members.link_of(node)
                    if link in self._greeted_before:
                        self._out.send(link, self._served_model())
                    self._driver.peer_joined(node)
                case Ended(node, reason):
                    self._driver.peer_ended(node, reason, self._now)
                    self._member.driver_lost(node, reason)
                    self._routing.peer_ended(node, reason, self._now)

    def _take(self, node: NodeId, message: ControlMessage, network_rtt_us: float | None) -> None:
        """A message of a peer with a bound link."""
        wrong: str | None = None
        match message:
            case Heartbeat():
                self._members.heartbeat(node, message, self._now, network_rtt_us)
                self._epochs.saw(message.epoch)
            case Filler():
                self._members.filled(node, message, self._now)
            case PeerAddresses(addresses=addresses):
                self._sessions.book.told(addresses, self._now)
            case ServedModel():
                self._members.served(node, message)
                self._driver.peer_joined(node)
            case Goodbye(reason=reason):
                self._follow(self._sessions.end(node, f"stopped: {reason}", self._now, forget=True))
            case Prepare() | Commit() | Abort() | Prepared() | Refused():
                wrong = self._member.take(node, message, self._now)
            case Need() | Held():
                self._gathering.take(node, message, self._now)
            case Submit() | Cancel() | Tokens() | Finished() | Failed():
                wrong = self._routing.take(node, message, self._now)
            case Hello():
                raise LocalProtocolError("a Hello is not a message of a bound link")
            case _:
                assert_never(message)
        if wrong is not None:
            self._follow(self._sessions.end(node, f"broke the protocol: {wrong}", self._now, at_fault=True))

    def _hello(self) -> Hello:
        config, model, device = self._config, self._planning.model, self._planning.device
        if device is None:
            raise LocalProtocolError("a node without a device")
        return make_hello(config, model, device)
