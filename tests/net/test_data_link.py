"""Sealed frames over real sockets."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from meshllm.errors import LinkLostError, RemoteProtocolError
from meshllm.layout.layout import NodeId
from meshllm.mesh.messages import DataHello, Epoch
from meshllm.net.data_link import DataKeys, DataLink, derive_keys
from meshllm.net.link_group import LinkFaultError, LinkGroup

LIMIT = 1 << 20
A, B = NodeId("a" * 16), NodeId("b" * 16)


def hellos(aes: bool = True) -> tuple[DataHello, DataHello]:
    epoch = Epoch(3, A)
    return DataHello(epoch, A, os.urandom(32), True), DataHello(epoch, B, os.urandom(32), aes)


def keys(aes: bool = True) -> tuple[DataKeys, DataKeys]:
    a, b = hellos(aes)
    return derive_keys(a, b, dialed=True), derive_keys(b, a, dialed=False)


class Pair:
    """Two ends of a link; the raw sockets beside them."""

    def __init__(self, aes: bool = True, limit: int = LIMIT) -> None:
        self.raw_a, self.raw_b = socket.socketpair()
        key_a, key_b = keys(aes)
        self.a, self.b = DataLink(self.raw_a, key_a, limit), DataLink(self.raw_b, key_b, limit)

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def drain(sender: DataLink, receiver: DataLink, n_bodies: int) -> list[bytes]:
    bodies: list[bytes] = []
    deadline = time.monotonic() + 10
    while len(bodies) < n_bodies and time.monotonic() < deadline:
        sender.flush()
        body = receiver.receive()
        if body is not None:
            bodies.append(body)
    return bodies


def test_both_ends_find_the_same_keys_and_each_direction_its_own() -> None:
    a, b = keys()
    assert (a.send, a.receive) == (b.receive, b.send)
    assert a.send != a.receive


def test_cipher_is_the_one_that_both_are_fast_at() -> None:
    assert keys(aes=True)[0].aes
    assert not any(key.aes for key in keys(aes=False))


def test_keys_do_not_show_themselves() -> None:
    key, _ = keys()
    assert key.send.hex() not in repr(key)
    assert "send" not in repr(key)


@pytest.mark.parametrize("aes", [True, False], ids=["aes", "chacha"])
def test_bodies_arrive_whole_and_in_order(aes: bool) -> None:
    pair = Pair(aes)
    sent = [os.urandom(n) for n in (0, 1, 4096, 70_000, 3, 1_000_000, 12)]
    for body in sent:
        pair.a.send(body)
    assert drain(pair.a, pair.b, len(sent)) == sent
    assert pair.a.bytes_sent == pair.b.bytes_received == sum(len(body) + 20 for body in sent)
    pair.close()


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=8), st.lists(st.integers(1, 50), min_size=1))
def test_frames_cut_anywhere_arrive_as_whole_ones_do(bodies: list[bytes], cuts: list[int]) -> None:
    """What A sends passes a relay that hands it on piece by piece."""
    (from_a, relay_in), (relay_out, to_b) = socket.socketpair(), socket.socketpair()
    key_a, key_b = keys()
    a, b = DataLink(from_a, key_a, LIMIT), DataLink(to_b, key_b, LIMIT)
    for body in bodies:
        a.send(body)
    wire, found = relay_in.recv(1 << 20), []
    while wire:
        size = cuts[len(wire) % len(cuts)]
        relay_out.send(wire[:size])
        wire = wire[size:]
        while (body_or_none := b.receive()) is not None:
            found.append(body_or_none)
    assert found == bodies
    for sock in (a, b, relay_in, relay_out):
        sock.close()


def test_nothing_to_read_is_no_error(pair: Pair) -> None:
    assert pair.b.receive() is None


def test_wire_does_not_show_the_body(pair: Pair) -> None:
    pair.a.send(b"what is the capital of France")
    assert b"capital" not in pair.raw_b.recv(4096)


@pytest.mark.parametrize("position", [4, 20, -1])
def test_changed_frame_is_refused(pair: Pair, position: int) -> None:
    pair.a.send(b"x" * 50)
    wire = bytearray(pair.raw_b.recv(4096))
    wire[position] ^= 1
    pair.raw_a.send(wire)
    with pytest.raises(RemoteProtocolError, match="sealed"):
        pair.b.receive()


def test_doubled_frame_is_refused(pair: Pair) -> None:
    pair.a.send(b"once")
    wire = pair.raw_b.recv(4096)
    pair.raw_a.send(wire * 2)
    assert pair.b.receive() == b"once"
    with pytest.raises(RemoteProtocolError, match="sealed"):
        pair.b.receive()


def test_frame_sent_back_is_refused(pair: Pair) -> None:
    pair.a.send(b"mine")
    pair.raw_b.send(pair.raw_b.recv(4096))
    with pytest.raises(RemoteProtocolError, match="sealed"):
        pair.a.receive()


@pytest.mark.parametrize("length", [0, 15, LIMIT + 17, 2**32 - 1])
def test_length_is_checked_before_memory_is_taken(pair: Pair, length: int) -> None:
    pair.raw_a.send(struct.pack("<I", length))
    with pytest.raises(RemoteProtocolError, match=str(length)):
        pair.b.receive()


def test_closed_end_is_a_lost_link(pair: Pair) -> None:
    pair.a.send(b"last words")
    pair.a.close()
    assert pair.b.receive() == b"last words"
    with pytest.raises(LinkLostError, match="closed"):
        pair.b.receive()


def test_sending_to_a_closed_end_is_a_lost_link(pair: Pair) -> None:
    pair.b.close()
    with pytest.raises(LinkLostError, match="data link failed"):
        pair.a.send(b"anyone there?")


def test_unsent_rest_is_kept_and_sent_later(pair: Pair) -> None:
    body = os.urandom(LIMIT)
    pair.a.send(body)
    assert pair.a.unsent
    assert drain(pair.a, pair.b, 1) == [body]
    assert not pair.a.unsent


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(pair: Pair) -> Iterator[LinkGroup]:
    made = LinkGroup()
    made.add(B, pair.a)
    yield made
    made.close()


async def wait_once(group: LinkGroup, timeout_s: float, *, waited_s: float) -> float:
    """One wait of someone who has waited for so long already; how long it took."""
    began = time.perf_counter()
    await group.wait(began - waited_s, began + timeout_s, may_sleep=True)
    return time.perf_counter() - began


@pytest.mark.parametrize("waited_s", [60e-6, 1.0], ids=["asleep", "parked"])
async def test_wait_ends_when_something_comes(group: LinkGroup, pair: Pair, waited_s: float) -> None:
    pair.b.send(b"hello")
    assert await wait_once(group, 5.0, waited_s=waited_s) < 1.0
    assert group.pump() == [(B, b"hello")]


async def test_wait_ends_at_the_deadline(group: LinkGroup) -> None:
    assert 0.04 < await wait_once(group, 0.05, waited_s=1.0) < 2.0


async def test_parked_wait_ends_when_woken_and_only_once(group: LinkGroup) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_until_woken, group)
        await trio.testing.wait_all_tasks_blocked(0.01)
        group.wake()
    assert await wait_once(group, 0.05, waited_s=1.0) > 0.04


async def wait_until_woken(group: LinkGroup) -> None:
    assert await wait_once(group, 5.0, waited_s=1.0) < 4.0


async def test_wait_for_room_to_send_ends_when_there_is(group: LinkGroup, pair: Pair) -> None:
    body = os.urandom(LIMIT)
    group.send([B], body)
    received = None
    with trio.fail_after(10):
        while received is None:
            received = pair.b.receive()
            if group.has_unsent:
                await wait_once(group, 5.0, waited_s=1.0)
                group.pump()
    assert received == body


def test_fault_names_the_node(group: LinkGroup, pair: Pair) -> None:
    pair.b.close()
    with pytest.raises(LinkFaultError) as caught:
        group.pump()
    assert caught.value.node == B
