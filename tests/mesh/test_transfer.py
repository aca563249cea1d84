"""Which chunk is asked of whom: all sources at once, each chunk once, none lost with the device that owed it."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.layout.layout import NodeId
from meshllm.mesh.manifest import CHUNK_BYTES, ChunkSet, Manifest
from meshllm.mesh.transfer import HEDGE_S, MAX_DAMAGED, OWING_S, REFUSED_PAUSE_S, WINDOW, Ask, Bandwidth, Transfer

A, B, C = (NodeId(letter * 16) for letter in "abc")


def transfer_of(n: int, *sources: NodeId, here: tuple[int, ...] = ()) -> Transfer:
    held = ChunkSet(n)
    for chunk in here:
        held.add(chunk)
    transfer = Transfer(held)
    transfer.want(range(n))
    for source in sources:
        transfer.source_joined(source, ChunkSet.whole(n))
    return transfer


def test_sources_are_asked_side_by_side_for_different_chunks() -> None:
    asks = transfer_of(20, A, B).next_asks(0.0)
    assert len(asks) == 2 * WINDOW
    assert len({ask.chunk for ask in asks}) == len(asks)
    assert sorted(ask.source for ask in asks) == [A] * WINDOW + [B] * WINDOW


def test_chunks_that_are_here_are_not_asked_for_again() -> None:
    transfer = transfer_of(6, A, here=(0, 2, 4))
    assert [ask.chunk for ask in transfer.next_asks(0.0)] == [1, 3, 5]


def test_what_a_lost_source_owed_is_asked_of_another() -> None:
    transfer = transfer_of(2 * WINDOW, A, B)
    owed = {ask.chunk for ask in transfer.next_asks(0.0) if ask.source == A}
    for ask_chunk in set(range(2 * WINDOW)) - owed:
        transfer.arrived(B, ask_chunk, 1.0, good=True)
    transfer.source_left(A, 1.0)
    assert {ask.chunk for ask in transfer.next_asks(1.0)} == owed


def test_damaged_chunk_is_asked_of_another_source_and_never_of_its_sender() -> None:
    transfer = transfer_of(1, A, B)
    (first,) = transfer.next_asks(0.0)
    transfer.arrived(first.source, 0, 0.1, good=False)
    (second,) = transfer.next_asks(0.1)
    assert {first.source, second.source} == {A, B}
    assert transfer.damaged_by() == {first.source: 1}
    transfer.arrived(second.source, 0, 0.2, good=False)
    assert transfer.next_asks(1e6) == []
    assert transfer.unobtainable() == 1


def test_source_that_keeps_sending_damage_is_given_up() -> None:
    transfer = transfer_of(10, A)
    for ask in transfer.next_asks(0.0)[:MAX_DAMAGED]:
        assert not transfer.is_refused(A)
        transfer.arrived(A, ask.chunk, 0.1, good=False)
    assert transfer.is_refused(A)
    assert transfer.next_asks(1e6) == []
    transfer.source_left(A, 1.0)
    assert transfer.to_dial([A, B], REFUSED_PAUSE_S) == [B]
    assert transfer.to_dial([A, B], REFUSED_PAUSE_S + 1.0) == [A, B]
    transfer.dialled(A)
    assert not transfer.is_refused(A)


def test_source_that_gives_nothing_is_let_go_and_one_that_gives_is_not() -> None:
    transfer = transfer_of(20, A, B)
    asks = transfer.next_asks(0.0)
    (of_b,) = [ask.chunk for ask in asks if ask.source == B][:1]
    assert transfer.overdue(OWING_S - 0.1) == []
    transfer.arrived(B, of_b, OWING_S - 0.1, good=True)
    assert transfer.overdue(OWING_S) == [A]


def test_last_chunk_does_not_wait_for_the_slowest() -> None:
    transfer = transfer_of(2, A, B)
    asks = {ask.source: ask.chunk for ask in transfer.next_asks(0.0)}
    transfer.arrived(B, asks[B], 1.0, good=True)
    assert transfer.next_asks(1.0) == []
    assert transfer.next_asks(HEDGE_S) == [Ask(B, asks[A])]
    transfer.arrived(B, asks[A], HEDGE_S + 1, good=True)
    assert transfer.missing == []


def test_source_is_asked_only_for_what_it_holds() -> None:
    transfer = transfer_of(8)
    part = ChunkSet(8)
    part.add(3)
    part.add(5)
    transfer.source_joined(A, part)
    assert [ask.chunk for ask in transfer.next_asks(0.0)] == [3, 5]
    transfer.absent(A, 5)
    assert transfer.next_asks(1e6) == []
    assert transfer.unobtainable() == 7


def test_source_that_failed_is_dialled_again_ever_more_seldom() -> None:
    transfer = transfer_of(4)
    now, pauses = 0.0, []
    for _ in range(8):
        transfer.dialled(A)
        assert transfer.to_dial([A], 1e9) == []
        transfer.source_left(A, now)
        pauses.append(next(pause for pause in range(1000) if transfer.to_dial([A], now + pause)))
        now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 4))
def test_every_chunk_comes_once_whatever_the_sources_do(seed: int, n: int, n_sources: int) -> None:
    rng = random.Random(seed)
    nodes = [NodeId(f"{i:016x}") for i in range(n_sources)]
    bad = {(node, chunk) for node in nodes[1:] for chunk in range(n) if rng.random() < 0.1}
    transfer, under_way, stored, now = transfer_of(n), [], [], 0.0
    for _ in range(200 * n):
        now += rng.choice((0.0, 0.1, 1.0, 7.0))
        for node in transfer.to_dial(nodes, now):
            transfer.dialled(node)
            transfer.source_joined(node, ChunkSet.whole(n))
        under_way += transfer.next_asks(now)
        for node in transfer.overdue(now):
            transfer.source_left(node, now)
        if under_way and rng.random() < 0.8:
            ask = under_way.pop(rng.randrange(len(under_way)))
            if rng.random() < 0.1:
                transfer.source_left(ask.source, now)
                under_way = [other for other in under_way if other.source != ask.source]
            else:
                good = (ask.source, ask.chunk) not in bad
                stored += [ask.chunk] * (good and ask.chunk in transfer.missing)
                transfer.arrived(ask.source, ask.chunk, now, good=good)
        if not transfer.missing:
            break
    assert sorted(stored) == list(range(n))


def test_manifest_knows_its_chunks() -> None:
    data = random.Random(1).randbytes(2 * CHUNK_BYTES + 5)
    parts = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
    manifest = Manifest(len(data), 10, b"".join(hashlib.sha256(part).digest() for part in parts))
    assert manifest.fault is None
    assert [manifest.is_good(i, part) for i, part in enumerate(parts)] == [True] * 3
    assert not manifest.is_good(1, parts[0])
    assert not manifest.is_good(2, parts[2] + b"\0")
    assert manifest.chunks_of([(0, 1), (CHUNK_BYTES - 1, CHUNK_BYTES + 1), (5, 5)]) == [0, 1]
    assert manifest.bytes_of([1, 2]) == CHUNK_BYTES + 5


@pytest.mark.parametrize(
    "manifest",
    [Manifest(0, 1, b""), Manifest(1 << 60, 1, b""), Manifest(10, 11, bytes(32)), Manifest(10, 1, bytes(31))],
)
def test_manifest_that_cannot_be_is_refused(manifest: Manifest) -> None:
    assert manifest.fault is not None


@given(st.sets(st.integers(0, 99)))
def test_set_of_chunks_is_what_was_put_into_it(chunks: set[int]) -> None:
    held = ChunkSet(100)
    for chunk in chunks:
        held.add(chunk)
    again = ChunkSet(100, held.bits)
    assert list(again) == sorted(chunks)
    assert len(again) == len(chunks)


def test_bandwidth_spreads_bytes_over_time() -> None:
    bandwidth = Bandwidth(1000.0)
    delays = [bandwidth.delay(100, 5.0) for _ in range(4)]
    assert delays == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert bandwidth.delay(100, 50.0) == 0.0
