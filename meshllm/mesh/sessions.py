"""Control links from dial to loss: whom to dial, which link is bound to whom, heartbeats, silence. Pure.

What comes out besides actions are Joined and Ended: between the two a peer has exactly one link, in which order holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

from meshllm.layout.layout import NodeId
from meshllm.mesh.actions import Address, CloseLink, LinkId
from meshllm.mesh.addresses import AddressBook
from meshllm.mesh.facts import NodeConfig
from meshllm.mesh.greetings import Greetings
from meshllm.mesh.links import LinkBook, Verdict, judge_choice, judge_hello
from meshllm.mesh.membership import HEARTBEAT_S, LOST_S, PAUSED_S, Membership
from meshllm.mesh.messages import PROTOCOL_MAJOR, Goodbye, Hello
from meshllm.mesh.outbox import Outbox

CLONE_REPORT_S: Final = 60.0  # between two reports of the same pair
REFUSED_PAUSE_S: Final = 30.0  # before dialling a device again that will not have us, or that we will not have
MAX_RETIRED: Final = 8  # incarnations remembered of a peer

CLONE_REASON: Final = (
    "another device uses the same node id, as after copying a disk: remove the state folder on one, restart it"
)


@dataclass(frozen=True, slots=True)
class Joined:
    """A link was bound to a peer."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Ended:
    """A peer has no link any more. reason: one line that names it."""

    node: NodeId
    reason: str


SessionEvent: TypeAlias = Joined | Ended


class Sessions:
    """The links of one node."""

    def __init__(self, config: NodeConfig, members: Membership, out: Outbox) -> None:
        self._config = config
        self._own = config.node
        self._members = members
        self._out = out
        self.book = AddressBook(config.node)
        self._links = LinkBook()
        self._retired: dict[NodeId, dict[int, None]] = {}
        self._cloned_at: dict[NodeId, float] = {}
        self.greetings = Greetings(members, out)

    def is_cloned(self, node: NodeId, now: float) -> bool:
        """Whether two devices were seen with this id lately."""
        return now - self._cloned_at.get(node, -math.inf) < CLONE_REPORT_S

    # --- links

    def opened(self, link: LinkId, address: Address, dialed: str | None, hello: Hello, now: float) -> None:
        """A fresh link: greets."""
        evicted = self._links.opened(link, address, dialed, now)
        if evicted is not None:
            self._close_fresh(evicted, "too many links are opening", now)
        self._out.send(link, hello)

    def greeted(self, link: LinkId, hello: Hello, now: float) -> list[SessionEvent]:
        """A Hello came on a link."""
        fresh = self._links.fresh(link)
        if fresh is None or fresh.hello is not None:
            return self._at_fault(link, "said Hello twice", now)
        fresh.hello = hello
        self.book.reached(fresh.dialed, hello.node)
        bound, retired = self._members.incarnation_of(hello.node), self._retired.get(hello.node, {})
        verdict = judge_hello(self._own, self._config.incarnation, hello, bound, retired)
        return self._obey(verdict, link, hello, now)

    def sender(self, link: LinkId, now: float) -> tuple[NodeId | None, list[SessionEvent]]:
        """Whose message this is, after binding the link if the other end just chose it. None: ignore the message."""
        node = self._links.peer_of(link)
        events: list[SessionEvent] = []
        if node is None:
            fresh = self._links.fresh(link)
            if fresh is None:
                return None, []  # closed here, or lost
            if fresh.hello is None:
                return None, self._at_fault(link, "did not say Hello first", now)
            bound, retired = self._members.incarnation_of(fresh.hello.node), self._retired.get(fresh.hello.node, {})
            events = self._obey(judge_choice(fresh.hello, bound, retired), link, fresh.hello, now)
            node = self._links.peer_of(link)
        if node is not None:
            self._members.heard(node, now)
        return node, events

    def closed(self, link: LinkId, reason: str, now: float) -> list[SessionEvent]:
        """The other side or the network ended a link."""
        node = self._links.peer_of(link)
        if node is not None:
            return self.end(node, reason, now, is_open=False)
        fresh = self._links.forget(link)
        if fresh is not None and fresh.dialed is not None and fresh.hello is None:
            self.book.failed(fresh.dialed, now)
        return []

    def end(
        self,
        node: NodeId,
        reason: str,
        now: float,
        *,
        forget: bool = False,
        at_fault: bool = False,
        is_open: bool = True,
    ) -> list[SessionEvent]:
        """Ends what we have with a peer. forget: it said goodbye. is_open: its link is still to be closed."""
        link = self._members.link_of(node)
        if link is None:
            return []
        name = self._members.name_of(node)
        whole = f"{name} {reason}" if forget else f"lost {name}: {reason}"
        self._links.forget(link)
        if is_open:
            if at_fault:
                self._out.send(link, Goodbye(reason, refused=True))
            self._out.add(CloseLink(link, reason, at_fault))
        self._members.ended(node, reason, now, forget=forget)
        self._retired.pop(node, None)
        self.book.lost(node, now)
        self._out.report(
            "peer_left" if forget else "peer_lost", peer=self._members.plain_name(node), node=node, reason=reason
        )
        self.greetings.beat(now)
        return [Ended(node, whole)]

    def refused(self, link: LinkId, reason: str, now: float) -> list[SessionEvent]:
        """The other side will not have us and says why: no use in dialling it again at once."""
        node, words = self._links.peer_of(link), f"refuses this device: {reason}"
        if node is None:
            self._out.report("link_refused", reason=words)
            fresh = self._links.fresh(link)
            self._close_fresh(link, words, now)
            if fresh is not None and fresh.hello is not None and not self._is_linked(fresh.hello.node):
                self._members.mismatched(fresh.hello, fresh.address, words, now)
                self.book.lost(fresh.hello.node, now, pause=REFUSED_PAUSE_S)
            return []
        events = self.end(node, words, now)
        self.book.lost(node, now, pause=REFUSED_PAUSE_S)
        return events

    def all_links(self) -> list[LinkId]:
        """Every open link."""
        return self._links.all()

    # --- time

    def slept(self, gap: float) -> None:
        """Time went on by `gap` since the last event: if we did not run for long, nobody is to blame for silence."""
        if gap > PAUSED_S:
            self._members.excuse(gap - HEARTBEAT_S)

    def tick(self, now: float) -> list[SessionEvent]:
        """Dials, heartbeats, silence."""
        events: list[SessionEvent] = []
        for node in self._members.check_silence(now):
            events += self.end(node, f"no message for {LOST_S:.1f} s", now)
        for link in self._links.overdue(now):
            self._close_fresh(link, "no Hello, or not chosen, in time", now)
        if now >= self.greetings.next_at:
            self.greetings.beat(now)
        for dial in self.book.due(self._is_linked, now):
            self._out.add(dial)
        return events

    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        return min(
            self.greetings.next_at,
            self._members.next_deadline(),
            self._links.next_deadline(),
            self.book.next_deadline(self._is_linked),
        )

    # --- inside

    def _is_linked(self, node: NodeId) -> bool:
        return self._members.link_of(node) is not None

    def _obey(self, verdict: Verdict, link: LinkId, hello: Hello, now: float) -> list[SessionEvent]:
        match verdict:
            case Verdict.WAIT:
                return []
            case Verdict.BIND:
                return self._bind(link, hello, now)
            case Verdict.REPLACE:
                return self._replace(link, hello, now)
            case Verdict.DUPLICATE | Verdict.SELF:
                self._close_fresh(link, "another link is in use, or this is ourselves", now)
            case Verdict.CLONE | Verdict.OWN_CLONE:
                self._note_clone(hello, now)
                self._close_fresh(link, CLONE_REASON, now, tell=True)
            case Verdict.OTHER_MAJOR:
                self._note_other_major(link, hello, now)
        return []

    def _bind(self, link: LinkId, hello: Hello, now: float) -> list[SessionEvent]:
        fresh = self._links.fresh(link)
        if fresh is None:
            return []
        address = fresh.address if fresh.dialed is not None else (fresh.address[0], hello.port)
        self._links.bind(link, hello.node)
        peer = self._members.joined(hello, link, address, now)
        place = f"{address[0]}:{address[1]}"
        self._out.report("peer_joined", peer=self._members.plain_name(hello.node), node=hello.node, address=place)
        self.greetings.introduce(hello.node, peer, now)
        self.greetings.beat(now)
        return [Joined(hello.node)]

    def _replace(self, link: LinkId, hello: Hello, now: float) -> list[SessionEvent]:
        bound = self._members.incarnation_of(hello.node)
        retired = dict(self._retired.get(hello.node, {}))
        restarted = bound is not None and bound != hello.incarnation
        events = self.end(hello.node, "it was started anew" if restarted else "it opened another link", now)
        if bound is not None and restarted:
            retired[bound] = None
            self._retired[hello.node] = dict.fromkeys(list(retired)[-MAX_RETIRED:])
        return events + self._bind(link, hello, now)

    def _note_clone(self, hello: Hello, now: float) -> None:
        if not self.is_cloned(hello.node, now):
            self._out.report("node_id_cloned", node=hello.node, name=hello.name, reason=CLONE_REASON)
        self._cloned_at[hello.node] = now

    def _note_other_major(self, link: LinkId, hello: Hello, now: float) -> None:
        reason = f"speaks protocol {hello.major}, this device {PROTOCOL_MAJOR}: bring both to one version"
        fresh = self._links.fresh(link)
        if fresh is not None and not self._is_linked(hello.node):
            self._members.mismatched(hello, fresh.address, reason, now)
        self._close_fresh(link, reason, now, tell=True)
        self.book.lost(hello.node, now, pause=REFUSED_PAUSE_S)

    def _close_fresh(
        self, link: LinkId, reason: str, now: float, *, at_fault: bool = False, tell: bool = False
    ) -> None:
        fresh = self._links.forget(link)
        if fresh is not None:
            if tell or at_fault:
                self._out.send(link, Goodbye(reason, refused=True))
            self._out.add(CloseLink(link, reason, at_fault))
            if fresh.dialed is not None:
                self.book.failed(fresh.dialed, now)

    def _at_fault(self, link: LinkId, what: str, now: float) -> list[SessionEvent]:
        node = self._links.peer_of(link)
        if node is not None:
            return self.end(node, f"broke the protocol: {what}", now, at_fault=True)
        self._close_fresh(link, f"the other side {what}", now, at_fault=True)
        return []
