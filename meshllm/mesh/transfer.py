"""Which chunk of a model's file to ask of which device: the receiving side of one file. Pure.

Chunks are asked in the order in which they are wanted, of all sources at once, WINDOW of each under way, so that each
gives what it can. What a source owes when it leaves, or for longer than OWING_S, is asked of another. A chunk that came
damaged is not asked of its sender again on that link, and whoever sends MAX_DAMAGED of them is left alone for long.
Where all is asked and a source has nothing to do, it is asked for what another has owed for HEDGE_S: the last chunks do
not wait for the slowest. The caller has verified and stored a chunk when it says that it arrived, and asks `to_dial`,
`overdue` and `next_asks` after every event and each TICK_S.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from meshllm.layout.layout import NodeId
from meshllm.mesh.manifest import ChunkSet

TICK_S: Final = 0.5
WINDOW: Final = 4  # chunks under way from a source: 4 MiB hide a round trip at any speed that a network has
OWING_S: Final = 30.0  # a source that gives nothing for so long is let go; one that is busy gives 1 MiB in 0.25 s
HEDGE_S: Final = 5.0
MAX_DAMAGED: Final = 3
FIRST_PAUSE_S: Final = 1.0  # before a source that failed is dialled again, twice as long each time
LONGEST_PAUSE_S: Final = 30.0
REFUSED_PAUSE_S: Final = 120.0  # before one whose file is damaged is asked again: it may have been pulled anew


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this source for this chunk."""

    source: NodeId
    chunk: int


@dataclass(slots=True)
class _Source:
    """A device with a link. asked: chunks under way, and since when nothing has come for them."""

    holds: ChunkSet
    asked: dict[int, float] = field(default_factory=dict)
    gave_at: float = -math.inf


@dataclass(slots=True)
class _Record:
    """What is remembered of a device, with or without a link."""

    damaged: set[int] = field(default_factory=set)
    failures: int = 0
    dial_at: float = -math.inf
    refused: bool = False


class Transfer:
    """See the head of this file."""

    def __init__(self, here: ChunkSet) -> None:
        """here: chunks that are verified and stored; grows with each that arrives."""
        self._here = here
        self._wanted: dict[int, None] = {}  # and not here, in order
        self._sources: dict[NodeId, _Source] = {}
        self._records: dict[NodeId, _Record] = {}

    # --- what is wanted

    def want(self, chunks: Iterable[int]) -> None:
        """These are wanted, in this order, instead of what was; those that are here are not asked for."""
        self._wanted = dict.fromkeys(chunk for chunk in chunks if chunk not in self._here)

    @property
    def missing(self) -> list[int]:
        """Wanted chunks that are not here."""
        return list(self._wanted)

    # --- sources

    def to_dial(self, nodes: Iterable[NodeId], now: float) -> list[NodeId]:
        """Which of these devices, that say they have the file, a link is wanted with now."""
        if not self._wanted:
            return []
        known = ((node, self._records.get(node, _Record())) for node in nodes if node not in self._sources)
        return [node for node, record in known if now >= record.dial_at]

    def dialled(self, node: NodeId) -> None:
        """A dial is under way: it is not to be dialled again until source_left. Its file may be another one by now."""
        record = self._record(node)
        record.dial_at, record.refused = math.inf, False
        record.damaged.clear()

    def source_joined(self, node: NodeId, holds: ChunkSet) -> None:
        """A link with a device that holds these chunks, by the same manifest, is up."""
        self._sources[node] = _Source(holds)

    def source_left(self, node: NodeId, now: float) -> None:
        """Its link is gone, or could not be had; what it owes is free to be asked of others."""
        source, record = self._sources.pop(node, None), self._record(node)
        record.failures = 1 if source is not None and source.gave_at > -math.inf else record.failures + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** min(record.failures - 1, 16), LONGEST_PAUSE_S)
        record.dial_at = now + (REFUSED_PAUSE_S if record.refused else pause_s)

    def source_refused(self, node: NodeId) -> None:
        """It cannot be used for this file as it is: its link is to be closed, and it is left alone for long."""
        self._sources.pop(node, None)
        self._record(node).refused = True

    def arrived(self, node: NodeId, chunk: int, now: float, *, good: bool) -> None:
        """A chunk came. good: it was what the manifest says, and is stored."""
        source = self._sources.get(node)
        if source is not None:
            source.asked.pop(chunk, None)
            source.gave_at = now
        if good:
            self._here.add(chunk)
            self._wanted.pop(chunk, None)
            return
        record = self._record(node)
        record.damaged.add(chunk)
        if len(record.damaged) >= MAX_DAMAGED:
            self.source_refused(node)

    def absent(self, node: NodeId, chunk: int) -> None:
        """A source does not hold a chunk, after all."""
        source = self._sources.get(node)
        if source is not None:
            source.asked.pop(chunk, None)
            source.holds.discard(chunk)

    def is_refused(self, node: NodeId) -> bool:
        """Whether nothing more is asked of a device: its link is of no use."""
        record = self._records.get(node)
        return record is not None and record.refused

    # --- decisions

    def next_asks(self, now: float) -> list[Ask]:
        """What to ask now; counted as asked from here on."""
        asks: list[Ask] = []
        under_way = {chunk: since for source in self._sources.values() for chunk, since in source.asked.items()}
        asked = True
        while asked:  # one each in turn, so that few chunks are spread over all sources
            asked = False
            for node in self._sources:
                asked |= self._ask_one(node, under_way, asks, now)
        return asks

    def _ask_one(self, node: NodeId, under_way: dict[int, float], asks: list[Ask], now: float) -> bool:
        source, damaged = self._sources[node], self._record(node).damaged
        if len(source.asked) >= WINDOW:
            return False
        able = (c for c in self._wanted if c in source.holds and c not in damaged and c not in source.asked)
        late: int | None = None
        for chunk in able:
            if chunk not in under_way:
                self._asked(source, chunk, under_way, now)
                asks.append(Ask(node, chunk))
                return True
            if late is None and now - under_way[chunk] >= HEDGE_S:
                late = chunk
        if late is None or source.asked:
            return False
        self._asked(source, late, under_way, now)
        asks.append(Ask(node, late))
        return True

    def _asked(self, source: _Source, chunk: int, under_way: dict[int, float], now: float) -> None:
        source.asked[chunk] = under_way[chunk] = now

    def overdue(self, now: float) -> list[NodeId]:
        """Sources that owe chunks and have given nothing for OWING_S: their links are to be closed."""
        return [node for node, source in self._sources.items() if now >= _owing_ends(source)]

    def damaged_by(self) -> dict[NodeId, int]:
        """Devices that sent damaged chunks, and how many."""
        return {node: len(record.damaged) for node, record in self._records.items() if record.damaged}

    def unobtainable(self) -> int:
        """Wanted chunks that no source with a link can give now."""
        able = [(source.holds, self._record(node).damaged) for node, source in self._sources.items()]
        return sum(not any(chunk in holds and chunk not in bad for holds, bad in able) for chunk in self._wanted)

    def _record(self, node: NodeId) -> _Record:
        return self._records.setdefault(node, _Record())


def _owing_ends(source: _Source) -> float:
    return max(source.gave_at, min(source.asked.values())) + OWING_S if source.asked else math.inf


class Bandwidth:
    """Spreads bytes over time, so that a transfer leaves room for answers."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = -math.inf

    def delay(self, n_bytes: int, now: float) -> float:
        """Seconds to wait before sending n_bytes, which are then counted as sent."""
        start = max(now, self._free_at)
        self._free_at = start + n_bytes / self._bytes_per_s
        return start - now
