"""Fresh data links whose end and use come in one tick: whatever the order, the loop lives and the right link counts."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from meshllm.daemon.epoch_links import EpochLinks
from meshllm.daemon.loop_bridge import AttachDataLink
from meshllm.errors import LinkLostError
from meshllm.layout.layout import NodeId
from meshllm.mesh.framing import encode_body
from meshllm.mesh.messages import Epoch, Leave, Ready
from meshllm.net.data_link import DataKeys, DataLink

LOW, HIGH = NodeId("a" * 16), NodeId("b" * 16)
EPOCH = Epoch(1, LOW)
OURS, THEIRS = DataKeys(b"a" * 32, b"b" * 32, True), DataKeys(b"b" * 32, b"a" * 32, True)
TRIES = 20  # the scheduler shuffles tasks that are runnable at once


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for sock in made:
        sock.close()


def attach(links: EpochLinks, node: NodeId, nursery: trio.Nursery, sockets: list[socket.socket]) -> DataLink:
    """A fresh link; returns the peer's end."""
    ours, theirs = socket.socketpair()
    sockets += [theirs]
    links.attach(AttachDataLink(EPOCH, node, ours, OURS), nursery)
    return DataLink(theirs, THEIRS, 1 << 14)


@pytest.mark.parametrize("own", [LOW, HIGH], ids=["dialer", "acceptor"])
async def test_epoch_that_ends_at_once_leaves_its_fresh_links(own: NodeId, sockets: list[socket.socket]) -> None:
    other = HIGH if own == LOW else LOW
    for _ in range(TRIES):
        links = EpochLinks(own, [other])
        async with trio.open_nursery() as nursery:
            attach(links, other, nursery, sockets)
            links.close(Leave(None, "ended"))


async def test_peer_that_leaves_in_the_tick_in_which_the_epoch_ends_harms_nothing(sockets: list[socket.socket]) -> None:
    for _ in range(TRIES):
        links = EpochLinks(HIGH, [LOW])
        here, there = socket.socketpair()
        here.setblocking(False)
        sockets += [here, there]

        async def end(links: EpochLinks = links, here: socket.socket = here) -> None:
            await trio.lowlevel.wait_readable(here.fileno())
            links.close(Leave(None, "ended"))

        async with trio.open_nursery() as nursery:
            peer = attach(links, LOW, nursery, sockets)
            nursery.start_soon(end)
            await trio.testing.wait_all_tasks_blocked()
            peer.close()
            there.send(b"x")


async def test_link_that_replaces_another_is_the_one_that_counts(sockets: list[socket.socket]) -> None:
    for _ in range(TRIES):
        links = EpochLinks(HIGH, [LOW])
        async with trio.open_nursery() as nursery:
            old = attach(links, LOW, nursery, sockets)
            await trio.testing.wait_all_tasks_blocked()
            old.send(encode_body(Ready()))
            new = attach(links, LOW, nursery, sockets)
            new.send(encode_body(Ready()))
            await links.wait_all()
            await trio.testing.wait_all_tasks_blocked()
        links.group.send([LOW], b"to the new one")
        bodies = [new.receive(), new.receive()]
        assert bodies[1] == b"to the new one"
        links.close(Leave(None, "ended"))


async def test_closed_link_touches_no_descriptor() -> None:
    ours, theirs = socket.socketpair()
    link = DataLink(ours, OURS, 1 << 14)
    number = link.fileno()
    link.close()
    other = socket.fromfd(theirs.fileno(), theirs.family, theirs.type)
    assert other.fileno() == number  # as it goes: the lowest free one
    other.close()
    with pytest.raises(LinkLostError, match="bad file descriptor"):
        link.send(b"not for others")
    theirs.close()
