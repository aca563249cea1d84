"""A simulated network under one seeded scheduler: ordered links that are slow, stall, or break, as TCP with TLS does.

What the world does to a link is delay it, stall one or both ways (the bytes come when the cut heals, if the link still
lives), and end it. In some worlds it also loses, doubles and reorders messages *within* a link, which TLS never does:
what must be safe is safe without that promise. Such a link ends when the network heals: nobody knows what it lost.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count


class Scheduler:
    """Events by virtual time; equal times in the order they were asked for."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), event))

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self.at(self.now + delay, event)

    def run_one(self, until: float) -> bool:
        """Runs the next event before `until`; False, with the clock at `until`, if there is none."""
        if not self._events or self._events[0][0] > until:
            self.now = until
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass
class Way:
    """One direction of a link."""

    receive: Callable[[object], None]
    lost: Callable[[str], None]
    last_at: float = 0.0
    held: list[Callable[[], None]] = field(default_factory=list)  # while the way is cut


class Link:
    """Between two processes, by index; `send(side, item)` goes to the other side."""

    def __init__(self, network: Network, ends: tuple[int, int], ways: tuple[Way, Way]) -> None:
        self.network, self.ends, self.ways = network, ends, ways
        self.open = [True, True]  # by side: still held there
        self.is_faulty = False  # a message was lost, doubled or reordered

    def send(self, side: int, item: object) -> None:
        """Queues an item from a side to the other."""
        other = 1 - side
        if self.open[side]:
            for delay in self._delays():
                self._carry(side, lambda: self.ways[other].receive(item) if self.open[other] else None, delay)

    def break_down(self) -> None:
        """Both sides hear of its end."""
        for side in (0, 1):
            self._hear_end(side, "connection reset")

    def close(self, side: int, reason: str, *, silent: bool = False) -> None:
        """Ends the link at a side; the other hears of it, after what was sent, unless `silent` (its power went)."""
        if not self.open[side]:
            return
        self.open[side] = False
        if not silent:
            self._carry(side, lambda: self._hear_end(1 - side, reason))

    def _hear_end(self, side: int, reason: str) -> None:
        if self.open[side]:
            self.open[side] = False
            self.ways[side].lost(reason)

    def _delays(self) -> tuple[float | None, ...]:
        """One for each copy of a message that arrives: None for in its turn, else seconds, whatever was sent before."""
        rng, faults = self.network.scheduler.rng, self.network.faults
        if faults == 0.0 or rng.random() >= faults:
            return (None,)
        self.is_faulty = True
        late = rng.choice((0.001, 0.05, 1.0)) * rng.uniform(0.5, 1.5)
        return rng.choice(((), (None, None), (late,), (None, late)))

    def _carry(self, side: int, arrival: Callable[[], None], delay: float | None = None) -> None:
        way, scheduler = self.ways[1 - side], self.network.scheduler
        if self.network.is_cut(self.ends[side], self.ends[1 - side]):
            way.held.append(lambda: self._carry(side, arrival, delay))
            return
        if delay is not None:
            scheduler.after(delay, arrival)
            return
        way.last_at = max(way.last_at, scheduler.now + self.network.delay())
        scheduler.at(way.last_at, arrival)

    def healed(self) -> None:
        """A cut ended: what was held goes on in order, or is held again by another cut."""
        for way in self.ways:
            held, way.held = way.held, []
            for carry in held:
                carry()


class Network:
    """Who can reach whom, and how fast."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slow = 0.001  # typical one-way delay, seconds
        self.faults = 0.0  # share of messages that are lost, doubled or reordered
        self._cuts: dict[tuple[int, int], None] = {}
        self._links: list[Link] = []

    def delay(self) -> float:
        rng = self.scheduler.rng
        return self.slow * rng.choice((0.3, 1.0, 1.0, 3.0)) * rng.uniform(0.5, 1.5)

    def is_cut(self, a: int, b: int) -> bool:
        """Whether nothing comes from a to b."""
        return (a, b) in self._cuts

    def cut(self, a: int, b: int) -> None:
        self._cuts[(a, b)] = None

    def split(self, sides: Sequence[bool]) -> None:
        """Cuts those on one side off from those on the other. sides[i]: of process i."""
        for a, one in enumerate(sides):
            for b, other in enumerate(sides):
                if one is not other:
                    self.cut(a, b)

    def heal(self, a: int | None = None, b: int | None = None) -> None:
        """Ends a cut, or all."""
        if a is None or b is None:
            self._cuts.clear()
        else:
            self._cuts.pop((a, b), None)
        self._links = [link for link in self._links if any(link.open) or any(way.held for way in link.ways)]
        for link in list(self._links):
            link.healed()

    def mend(self) -> None:
        """Messages are carried as they should be from now on; links that lost some end."""
        self.faults = 0.0
        for link in [link for link in self._links if link.is_faulty]:
            link.break_down()

    def connect(self, ends: tuple[int, int], ways: tuple[Way, Way]) -> Link:
        link = Link(self, ends, ways)
        self._links.append(link)
        return link
