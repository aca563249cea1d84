"""Where to dial and when: addresses by source, one dial a key at a time, growing pauses after failures. Pure.

Both ends of a pair dial, since only one of them may be reachable; the higher id waits HIGHER_WAITS_S so that one link
is the rule and two the exception. An address says nothing about who is alive: links do.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from meshllm.layout.layout import NodeId
from meshllm.mesh.actions import Address, Dial
from meshllm.mesh.facts import AddressSource

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 8.0  # a device that comes back is dialled within this
HIGHER_WAITS_S: Final = 1.0
MAX_KEYS: Final = 256  # devices that anyone can make us dial
MAX_ADDRESSES: Final = 32  # of one device
LONG_PAUSES: Final = 6  # failures in a row after which a learnt device is forgotten; static ones never are


@dataclass(slots=True)
class _Target:
    """One device to dial. Static addresses have their own targets, whose node only a Hello tells."""

    key: str
    static: bool
    node: NodeId | None
    addresses: dict[Address, AddressSource] = field(default_factory=dict)
    failures: int = 0
    reason: str | None = None  # of the last one
    dialing: bool = False
    next_at: float = 0.0


class AddressBook:
    """Targets by key: the node id, or "host:port" for static addresses."""

    def __init__(self, own: NodeId) -> None:
        self._own = own
        self._targets: dict[str, _Target] = {}
        self._self_keys: dict[str, None] = {}  # static addresses that turned out to be ours

    def found(self, source: AddressSource, node: NodeId | None, addresses: tuple[Address, ...], now: float) -> None:
        """Adds addresses. A device that was given up is tried again at once; beyond the limits they are ignored."""
        if node == self._own:
            return
        if source == "static" or node is None:
            for address in addresses:
                self._add(f"{address[0]}:{address[1]}", None, (address,), "static", now)
        else:
            self._add(node, node, addresses, source, now)

    def told(self, addresses: tuple[tuple[NodeId, tuple[Address, ...]], ...], now: float) -> None:
        """What a peer says of others."""
        for node, places in addresses:
            self.found("peer", node, places, now)

    def _add(
        self, key: str, node: NodeId | None, addresses: tuple[Address, ...], source: AddressSource, now: float
    ) -> None:
        if key in self._self_keys:
            return
        target = self._targets.get(key)
        if target is None:
            if len(self._targets) >= MAX_KEYS:
                return
            wait = HIGHER_WAITS_S if node is not None and self._own > node else 0.0
            target = self._targets[key] = _Target(key, source == "static", node, next_at=now + wait)
        new = [address for address in addresses if address not in target.addresses]
        if source == "mdns" and addresses:  # what it announces now replaces what it announced before
            kept: dict[Address, AddressSource] = {a: s for a, s in target.addresses.items() if s != "mdns"}
            target.addresses = kept
        for address in addresses[: MAX_ADDRESSES - len(target.addresses)]:
            target.addresses[address] = source
        if new and target.failures:
            target.failures, target.next_at = 0, min(target.next_at, now)

    def gone(self, node: NodeId) -> None:
        """Forgets what mDNS said of it."""
        target = self._targets.get(node)
        if target is not None:
            target.addresses = {a: s for a, s in target.addresses.items() if s != "mdns"}
            if not target.addresses:
                del self._targets[node]

    def reached(self, key: str | None, node: NodeId) -> None:
        """A Hello came from `node` over a dial of `key`."""
        target = self._targets.get(key) if key is not None else None
        if target is None:
            return
        target.dialing, target.failures = False, 0
        if node == self._own:
            del self._targets[target.key]
            self._self_keys[target.key] = None
        elif target.static:
            target.node = node

    def failed(self, key: str, now: float, reason: str | None = None) -> None:
        """The dial of `key` ended without a Hello."""
        target = self._targets.get(key)
        if target is None:
            return
        target.dialing = False
        target.failures += 1
        target.reason = reason or target.reason
        target.next_at = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(target.failures - 1, 10))
        learnt = all(source == "peer" for source in target.addresses.values())
        if learnt and not target.static and target.failures >= LONG_PAUSES:
            del self._targets[key]

    def lost(self, node: NodeId, now: float, pause: float = FIRST_PAUSE_S) -> None:
        """The link to `node` ended: dial it again after the pause."""
        for target in self._targets.values():
            if target.node == node:
                target.next_at = max(target.next_at, now + pause)

    def due(self, linked: Callable[[NodeId], bool], now: float) -> list[Dial]:
        """The dials to start now; each is under way until `reached` or `failed`."""
        dials: list[Dial] = []
        for target in self._targets.values():
            if target.next_at <= now and self._wanted(target, linked):
                target.dialing = True
                dials.append(Dial(target.key, target.node, tuple(target.addresses)))
        return dials

    def next_deadline(self, linked: Callable[[NodeId], bool]) -> float:
        """When `due` has something next."""
        return min((t.next_at for t in self._targets.values() if self._wanted(t, linked)), default=math.inf)

    def _wanted(self, target: _Target, linked: Callable[[NodeId], bool]) -> bool:
        known = target.node is not None and linked(target.node)
        return not target.dialing and not known and bool(target.addresses)

    def known(self) -> list[tuple[NodeId, Address, str | None]]:
        """Devices known by address, for `status`: ids with one address each, and why the last dial failed."""
        nodes = {t.node: (next(iter(t.addresses)), t.reason) for t in self._targets.values() if t.node and t.addresses}
        return [(node, *nodes[node]) for node in sorted(nodes)]

    def unreached(self) -> list[tuple[str, Address, str | None]]:
        """Static addresses behind which nobody was found yet: keys, addresses, why not."""
        found = [t for t in self._targets.values() if t.static and t.node is None and t.failures]
        return [(target.key, next(iter(target.addresses)), target.reason) for target in found]


def may_pass_on(address: Address, receiver: Address) -> bool:
    """Whether an address may be told to a peer at `receiver`: not a link-local one, a loopback one only on loopback."""
    try:
        ip = ipaddress.ip_address(address[0].partition("%")[0])
        other = ipaddress.ip_address(receiver[0].partition("%")[0])
    except ValueError:
        return False
    return not ip.is_link_local and not ip.is_unspecified and (not ip.is_loopback or other.is_loopback)
