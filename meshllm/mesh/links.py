"""Fresh links and which of them becomes *the* link to a peer. Pure.

Both ends may dial at once, so a pair may have two links for a moment. The lower id decides: it binds the first link on
which a Hello comes, says so by a heartbeat on it at once, and closes the others. The higher id binds the link on which
the first message after the Hello comes. So both agree, and no message is lost on a link that the other end gave up.
(A rule by who dialled would need one end to drop a link on which the other's messages are already under way.)
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from meshllm.layout.layout import NodeId
from meshllm.mesh.actions import Address, LinkId
from meshllm.mesh.messages import PROTOCOL_MAJOR, Hello

BIND_S: Final = 5.0  # a link that is not bound by then is closed
MAX_UNBOUND: Final = 64  # fresh links at once; the oldest goes first


class Verdict(Enum):
    """What to do with a link on which a Hello came."""

    BIND = auto()
    WAIT = auto()  # the other end decides
    REPLACE = auto()  # the peer was started anew, or gave the bound link up: bind this instead
    DUPLICATE = auto()
    CLONE = auto()  # another device with the peer's id, while the peer is there
    SELF = auto()  # we dialled ourselves
    OWN_CLONE = auto()  # another device with our id
    OTHER_MAJOR = auto()


def judge_hello(own: NodeId, incarnation: int, hello: Hello, bound: int | None, retired: Collection[int]) -> Verdict:
    """What a Hello on a fresh link means.

    own, incarnation: ours. bound: the incarnation on the link bound to that peer now. retired: incarnations that gave
    way to it; one of them coming back means that two devices share the id.
    """
    if hello.node == own:
        return Verdict.SELF if hello.incarnation == incarnation else Verdict.OWN_CLONE
    if hello.major != PROTOCOL_MAJOR:
        return Verdict.OTHER_MAJOR
    if own > hello.node:
        return Verdict.WAIT
    if bound is None:
        return Verdict.BIND
    if hello.incarnation == bound:
        return Verdict.DUPLICATE
    return Verdict.CLONE if hello.incarnation in retired else Verdict.REPLACE


def judge_choice(hello: Hello, bound: int | None, retired: Collection[int]) -> Verdict:
    """What the first message after `hello` on a fresh link means, where the other end decides."""
    if bound is None:
        return Verdict.BIND
    if hello.incarnation != bound and hello.incarnation in retired:
        return Verdict.CLONE
    return Verdict.REPLACE


@dataclass(slots=True)
class FreshLink:
    """A link not bound yet."""

    address: Address  # the other end's, as dialled or as it came
    dialed: str | None
    opened_at: float
    hello: Hello | None = None


class LinkBook:
    """Fresh links in the order they were opened, and whom the bound ones lead to."""

    def __init__(self) -> None:
        self._fresh: dict[LinkId, FreshLink] = {}
        self._bound: dict[LinkId, NodeId] = {}

    def opened(self, link: LinkId, address: Address, dialed: str | None, now: float) -> LinkId | None:
        """Adds a link; returns another that has to go for it, if there are too many."""
        evicted = next(iter(self._fresh)) if len(self._fresh) >= MAX_UNBOUND else None
        self._fresh[link] = FreshLink(address, dialed, now)
        return evicted

    def fresh(self, link: LinkId) -> FreshLink | None:
        """The link, if it is not bound."""
        return self._fresh.get(link)

    def peer_of(self, link: LinkId) -> NodeId | None:
        """Whom a bound link leads to."""
        return self._bound.get(link)

    def bind(self, link: LinkId, node: NodeId) -> None:
        """It is the link to `node` from now on."""
        del self._fresh[link]
        self._bound[link] = node

    def forget(self, link: LinkId) -> FreshLink | None:
        """The link is closed; the fresh link it was, if it was one."""
        self._bound.pop(link, None)
        return self._fresh.pop(link, None)

    def all(self) -> list[LinkId]:
        """Every open link."""
        return [*self._fresh, *self._bound]

    def overdue(self, now: float) -> list[LinkId]:
        """Fresh links that took too long."""
        return [link for link, fresh in self._fresh.items() if now >= fresh.opened_at + BIND_S]

    def next_deadline(self) -> float:
        """When one will have."""
        return min((fresh.opened_at + BIND_S for fresh in self._fresh.values()), default=math.inf)
