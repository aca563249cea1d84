"""The control loop's face of the mesh: what happened goes in with the time, what to do comes out as actions. Pure.

One Node a daemon, owned by its control loop. After every call: run `take_actions()` in order, and sleep until
`next_deadline()` at most, then `wake`. Time is any monotonic clock in seconds. Nothing here raises because of a peer or
the world; LocalProtocolError means that the caller used it wrongly.
"""

from __future__ import annotations

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.actions import Action, Address, CloseLink, Deliver, LinkId
from meshllm.mesh.driver import Driver
from meshllm.mesh.epoch import EpochBook, EpochEvent, MemberEpoch, allows, members_of
from meshllm.mesh.facts import AddressSource, ModelFacts, NodeConfig, NodeView
from meshllm.mesh.membership import Membership
from meshllm.mesh.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    Cancel,
    Commit,
    ControlMessage,
    Epoch,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
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
from meshllm.mesh.planning import Planning, same_placement
from meshllm.mesh.request import MOVED, UNAVAILABLE, Admissions, RootRequests
from meshllm.mesh.sessions import Ended, Joined, SessionEvent, Sessions
from meshllm.mesh.view import make_view
from meshllm.parameters import SampledToken

RETRY_S = 0.25  # after a driver said that it does not drive


class Node:
    """See the head of this file."""

    def __init__(self, config: NodeConfig, device: Device, model: ModelFacts | None, now: float) -> None:
        self._config = config
        self._own = config.node
        self._now = now
        self._stopped = False
        self._out = Outbox()
        self._members = Membership()
        self._sessions = Sessions(config, self._members, self._out)
        self._epochs = EpochBook(config.node, self._out)
        self._planning = Planning(config, self._members, self._out)
        self._planning.model, self._planning.device = model, device
        self._roots = RootRequests(self._out)
        self._admissions = Admissions(self._out, self._answer)
        self._driver = Driver(
            self._own, config.incarnation, self._planning, self._members, self._epochs, self._admissions, self._out
        )
        self._sessions.free_bytes = device.usable_bytes
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
            self._sessions.book.failed(key, self._now)
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

    def receive(self, link: LinkId, message: ControlMessage, now: float) -> None:
        """A message of a link, in order. A message of a link that was closed here is ignored."""
        if not self._begin(now):
            return
        if isinstance(message, Hello):
            self._follow(self._sessions.greeted(link, message, self._now))
        else:
            node, events = self._sessions.sender(link, self._now)
            self._follow(events)
            if node is not None:
                self._take(node, message)
        self._review()

    def link_lost(self, link: LinkId, reason: str, now: float) -> None:
        """The link ended by the other side, by the network or by a fault in its bytes."""
        if self._begin(now):
            self._follow(self._sessions.closed(link, reason, self._now))
            self._review()

    # --- this device

    def set_model(self, model: ModelFacts | None, device: Device, now: float) -> None:
        """The model served here, or what this device can do, changed."""
        if not self._begin(now):
            return
        self._planning.model, self._planning.device = model, device
        for entry in self._epochs.all():
            if model is None or entry.model != model.hash:
                self._break(entry, None, "serves another model now")
        served = ServedModel(model.hash if model else None, model.name if model else None, device)
        for _, peer in self._members.alive():
            self._out.send(peer.link, served)
        self._review()

    def set_free_bytes(self, free_bytes: int) -> None:
        """Free memory as of now, for the next heartbeats."""
        self._sessions.free_bytes = free_bytes

    def prepared(self, epoch: Epoch, now: float) -> None:
        """PrepareEpoch was carried out, all data links are up. Ignored, as the next two, if the epoch was retired."""
        entry = self._epochs.get(epoch) if self._begin(now) else None
        if entry is None or not allows(entry, EpochEvent.READY):
            return
        self._epochs.step(entry, EpochEvent.READY)
        if epoch.driver == self._own:
            self._driver.prepared(epoch, self._own)
        else:
            self._send(epoch.driver, Prepared(epoch))
        self._review()

    def prepare_refused(self, epoch: Epoch, reason: str, now: float) -> None:
        """PrepareEpoch could not be carried out (memory, file). RetireEpoch follows."""
        entry = self._epochs.get(epoch) if self._begin(now) else None
        if entry is None:
            return
        if epoch.driver == self._own:
            self._driver.refused(epoch, self._own, reason, None, self._now)
        else:
            self._epochs.step(entry, EpochEvent.END, reason)
            self._send(epoch.driver, Refused(epoch, reason, None))
        self._review()

    def epoch_broken(self, epoch: Epoch, node: NodeId | None, reason: str, now: float) -> None:
        """An epoch lost a data link or a step (to `node`, if one is to blame). RetireEpoch follows."""
        entry = self._epochs.get(epoch) if self._begin(now) else None
        if entry is None:
            return
        self._break(entry, node, f"lost {self._members.name_of(node)}: {reason}" if node else reason)
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
        self._roots.add(request, self._now + self._config.wait_s)
        self._review()

    def cancel(self, request: RequestId, now: float) -> None:
        """The reader left: nothing more is delivered. Unknown ids are ignored."""
        if not self._begin(now):
            return
        driver = self._roots.cancel(request)
        if driver == self._own:
            self._admissions.cancel(request, self._own)
        elif driver is not None:
            self._send(driver, Cancel(request))
        self._review()

    # --- the driver's data loop, of requests that were admitted

    def tokens_drawn(self, request: RequestId, start: int, tokens: tuple[SampledToken, ...], now: float) -> None:
        """Tokens from index `start` of the whole answer on."""
        if self._begin(now) and tokens:
            self._admissions.tokens(request, start, tokens)

    def request_finished(self, request: RequestId, reason: str, n_tokens: int, now: float) -> None:
        """reason: "stop" or "length"; n_tokens: of the whole answer."""
        if self._begin(now):
            self._admissions.ended(request, Finished(request, reason, n_tokens))
            self._review()

    def request_failed(self, request: RequestId, code: str, reason: str, now: float) -> None:
        """It ended without a finish; code as of errors.py."""
        if self._begin(now):
            self._admissions.ended(request, Failed(request, code, reason))
            self._review()

    # --- time and results

    def shutdown(self, reason: str, now: float) -> None:
        """A clean stop: local answers fail, epochs are retired, peers are told, links are closed."""
        if not self._begin(now):
            return
        self._driver.end_all(f"'{self._config.name}' stopped: {reason}")
        for entry in self._epochs.all():
            self._epochs.step(entry, EpochEvent.END, reason)
        self._roots.fail_all(f"this daemon is stopping: {reason}")
        for _, peer in self._members.alive():
            self._out.send(peer.link, Goodbye(reason))
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
            return float("inf")
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
        in_force = self._epochs.in_force()
        self._sessions.epoch = in_force.epoch if in_force else None
        for request in self._roots.waiting(self._now) if in_force else ():
            if in_force and request.submit.model == in_force.model:
                self._roots.dispatched(request, in_force.epoch.driver)
                self._dispatch(request.submit, in_force)
        if self._roots.has_late(self._now):
            self._roots.expire(
                self._now, f"no layout came into force in {self._config.wait_s:.0f} s: {self._missing()}"
            )

    def _missing(self) -> str:
        return self.view(self._now).detail or "the mesh is changing"

    def _dispatch(self, submit: Submit, in_force: MemberEpoch) -> None:
        if in_force.epoch.driver == self._own:
            self._admissions.take(self._own, submit, in_force.epoch)
        else:
            self._send(in_force.epoch.driver, submit)

    def _follow(self, events: list[SessionEvent]) -> None:
        for event in events:
            match event:
                case Joined(node):
                    self._driver.peer_joined(node)
                case Ended(node, reason):
                    self._driver.peer_ended(node, reason, self._now)
                    for entry in self._epochs.all():
                        if entry.epoch.driver == node:
                            self._epochs.step(entry, EpochEvent.END, reason)
                    self._admissions.root_lost(node)
                    self._roots.fail_driver(node, reason)

    def _take(self, node: NodeId, message: ControlMessage) -> None:
        """A message of a peer with a bound link."""
        match message:
            case Heartbeat():
                self._members.heartbeat(node, message, self._now)
                self._epochs.saw(message.epoch)
            case PeerAddresses(addresses=addresses):
                for other, places in addresses:
                    self._sessions.book.found("peer", other, places, self._now)
            case ServedModel():
                self._members.served(node, message)
                self._driver.peer_joined(node)
            case Goodbye(reason=reason):
                self._follow(self._sessions.end(node, f"stopped: {reason}", self._now, forget=True))
            case Prepare() | Commit() | Abort() | Prepared() | Refused():
                self._take_epoch(node, message)
            case Submit() | Cancel():
                self._take_request(node, message)
            case Tokens() | Finished() | Failed():
                self._take_answer(node, message)
            case Hello():
                raise LocalProtocolError("a Hello is not a peer's message")

    def _take_epoch(self, node: NodeId, message: Prepare | Commit | Abort | Prepared | Refused) -> None:
        entry = self._epochs.get(message.epoch)
        match message:
            case Prepare():
                self._take_prepare(node, message)
            case Commit() if entry is not None and message.epoch.driver == node:
                if allows(entry, EpochEvent.COMMIT):
                    self._epochs.step(entry, EpochEvent.COMMIT)
                else:
                    self._fault(node, f"committed epoch {message.epoch.counter} before it was prepared here")
            case Abort(reason=reason) if entry is not None and message.epoch.driver == node:
                self._epochs.step(entry, EpochEvent.END, reason)
            case Abort(reason=reason) if message.epoch.driver == self._own:
                self._driver.broken(message.epoch, None, reason, self._now)
            case Prepared() if message.epoch.driver == self._own:
                self._driver.prepared(message.epoch, node)
            case Refused() if message.epoch.driver == self._own:
                self._driver.refused(message.epoch, node, message.reason, message.seen, self._now)
            case _:
                pass  # of an epoch that is over: late, harmless

    def _take_prepare(self, node: NodeId, message: Prepare) -> None:
        known = self._epochs.get(message.epoch)
        if message.epoch.driver != node:
            self._fault(node, "offered an epoch of another driver")
        elif known is not None:  # the same placement with other reasons for those left out
            if same_placement(known.layout, message.layout):
                known.layout = message.layout
            else:
                self._fault(node, f"changed the layout of epoch {message.epoch.counter}")
        elif (reason := self._why_not(message)) is not None:
            self._send(node, Refused(message.epoch, reason, self._epochs.taken))
        else:
            addresses = {other: peer.address for other, peer in self._members.alive()}
            self._epochs.begin(message.epoch, message.model, message.layout, addresses)

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

    def _take_request(self, node: NodeId, message: Submit | Cancel) -> None:
        if isinstance(message, Cancel):
            self._admissions.cancel(message.request, node)
            return
        in_force, model = self._epochs.in_force(), self._planning.model
        if in_force is None or in_force.epoch.driver != self._own or model is None or message.model != in_force.model:
            self._send(node, Failed(message.request, MOVED, "another device drives now, or none does"))
        elif max(message.prompt + message.generated) >= model.shape.vocab_size:
            self._send(node, Failed(message.request, "invalid_request_error", "a token id is beyond the vocabulary"))
        else:
            self._admissions.take(node, message, in_force.epoch)

    def _take_answer(self, node: NodeId, message: Tokens | Finished | Failed) -> None:
        match message:
            case Tokens():
                wrong = self._roots.tokens(message, node)
            case Finished():
                wrong = self._roots.finished(message, node)
            case Failed():
                self._roots.failed(message, node, self._now + RETRY_S)
                wrong = None
        if wrong is not None and node != self._own:
            self._fault(node, wrong)
        elif wrong is not None:
            raise LocalProtocolError(wrong)

    def _answer(self, root: NodeId, message: Tokens | Finished | Failed) -> None:
        """Takes a driver's message to a root."""
        if root == self._own:
            self._take_answer(self._own, message)
        else:
            self._send(root, message)

    def _break(self, entry: MemberEpoch, blame: NodeId | None, reason: str) -> None:
        if entry.epoch.driver == self._own:
            self._driver.broken(entry.epoch, blame, reason, self._now)
        else:
            self._epochs.step(entry, EpochEvent.END, reason)
            self._send(entry.epoch.driver, Abort(entry.epoch, reason))

    def _fault(self, node: NodeId, what: str) -> None:
        self._follow(self._sessions.end(node, f"broke the protocol: {what}", self._now, at_fault=True))

    def _send(self, node: NodeId, message: ControlMessage) -> None:
        self._out.send(self._members.link_of(node), message)

    def _hello(self) -> Hello:
        config, model = self._config, self._planning.model
        device = self._planning.device
        if device is None:
            raise LocalProtocolError("a node without a device")
        return Hello(
            PROTOCOL_MAJOR,
            PROTOCOL_MINOR,
            config.build,
            config.node,
            config.incarnation,
            config.name,
            config.port,
            device,
            model.hash if model else None,
            model.name if model else None,
            config.threads,
            config.isa,
        )
