"""Several data loops in one process, wired to each other by real TCP links over loopback: what a control loop does for
one epoch, and nothing else.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import trio

from meshllm.daemon.data_loop import DataLoop
from meshllm.daemon.loop_bridge import (
    Admit,
    Answered,
    AttachDataLink,
    CommitEpoch,
    DataLoopEnded,
    EpochBroken,
    EpochPrepared,
    EpochRefused,
    Event,
    PrepareEpoch,
    StepCosts,
    Stop,
)
from meshllm.kernels.binding import Kernels
from meshllm.layout.layout import ExchangePrecision, Layout, NodeId, Prediction, Share
from meshllm.mesh.framing import encode_body
from meshllm.mesh.messages import DataHello, Epoch, Failed, Finished, ModelHash, Ready, RequestId, Submit, Tokens
from meshllm.model.model_file import ModelFile
from meshllm.model.slicing import Range, Slice
from meshllm.net.data_link import DataLink, derive_keys
from meshllm.parameters import SampledToken, SamplingParameters

E = TypeVar("E", EpochPrepared, EpochRefused, EpochBroken)

GREEDY = SamplingParameters(temperature=0.0)

# Of SmolLM2: 9 heads (3 KV heads), 1536 hidden units, 49152 words. The fourth of four has no heads, the third no words.
SMOLLM2_SLICES: dict[int, list[Slice]] = {
    1: [Slice(Range(0, 9), Range(0, 1536), Range(0, 49152))],
    2: [
        Slice(Range(0, 6), Range(0, 896), Range(0, 30000)),
        Slice(Range(6, 9), Range(896, 1536), Range(30000, 49152)),
    ],
    3: [
        Slice(Range(0, 3), Range(0, 512), Range(0, 16384)),
        Slice(Range(3, 6), Range(512, 1024), Range(16384, 40000)),
        Slice(Range(6, 9), Range(1024, 1536), Range(40000, 49152)),
    ],
    4: [
        Slice(Range(0, 3), Range(0, 512), Range(0, 20000)),
        Slice(Range(3, 6), Range(512, 800), Range(20000, 40000)),
        Slice(Range(6, 9), Range(800, 1280), Range(40000, 40000)),
        Slice(Range(9, 9), Range(1280, 1536), Range(40000, 49152)),
    ],
}


def node_id(index: int) -> NodeId:
    return NodeId(f"{index + 1:016x}")


def make_layout(
    parts: Sequence[Slice],
    nodes: Sequence[NodeId],
    *,
    exchange: ExchangePrecision = "f16",
    context: int = 256,
    slots: int = 4,
) -> Layout:
    shares = tuple(
        Share(node=node, slice=part, slice_bytes=0, cache_bytes=0) for node, part in zip(nodes, parts, strict=True)
    )
    prediction = Prediction(decode_tok_s=30.0, prefill_tok_s=300.0, wire_bytes_per_token=0)
    return Layout(shares=shares, exchange=exchange, context=context, slots=slots, prediction=prediction)


def tcp_pair(buffer_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialer = socket.create_connection(server.getsockname())
        acceptor, _ = server.accept()
    if buffer_bytes is not None:
        for sock in (dialer, acceptor):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    return dialer, acceptor


class Member:
    """One daemon's data loop; its events, sorted."""

    def __init__(self, node: NodeId, kernels: Kernels) -> None:
        self.node = node
        self.loop = DataLoop(node, kernels)
        self.events: list[Event] = []
        self.tokens: dict[RequestId, list[SampledToken]] = defaultdict(list)
        self.ends: dict[RequestId, Finished | Failed] = {}
        self.costs: list[StepCosts] = []
        self._changed = trio.Event()

    async def listen(self) -> None:
        """Takes events in until the last one."""
        while True:
            event = await self.loop.next_event()
            self.events.append(event)
            match event:
                case Answered(_, Tokens(request, start, tokens)):
                    assert start == len(self.tokens[request])
                    self.tokens[request] += tokens
                case Answered(_, end):
                    self.ends[end.request] = end
                case StepCosts():
                    self.costs.append(event)
                case _:
                    pass
            self._changed.set()
            if isinstance(event, DataLoopEnded):
                return

    def find(self, kind: type[E], epoch: Epoch) -> E | None:
        return next((e for e in self.events if isinstance(e, kind) and e.epoch == epoch), None)

    async def until(self, done: object, timeout_s: float = 30.0) -> None:
        """Until done(), asked after each event."""
        assert callable(done)
        with trio.fail_after(timeout_s):
            while not done():
                self._changed = trio.Event()
                await self._changed.wait()


class DataMesh:
    """Members in order of node id."""

    def __init__(self, members: list[Member], buffer_bytes: int | None = None) -> None:
        self.members = members
        self.buffer_bytes = buffer_bytes  # of sockets
        self.puppets: list[NodeId] = []
        self.sockets: dict[tuple[int, int], socket.socket] = {}  # (dialer, acceptor): the acceptor's, a duplicate

    def nodes(self) -> list[NodeId]:
        return [member.node for member in self.members]

    async def prepare(self, epoch: Epoch, layout: Layout, model: Path, *, commit: bool = True) -> None:
        """Prepares an epoch on all members and commits it; the driver is the epoch's."""
        self.post_prepare(epoch, layout, model)
        self.wire(epoch)
        for member in self.members:
            await member.until(lambda m=member: m.find(EpochPrepared, epoch) or m.find(EpochRefused, epoch))
            assert member.find(EpochRefused, epoch) is None, member.find(EpochRefused, epoch)
            if commit:
                member.loop.post(CommitEpoch(epoch))

    def post_prepare(self, epoch: Epoch, layout: Layout, model: Path | ModelFile) -> None:
        file = ModelFile.open(model) if isinstance(model, Path) else model
        for member in self.members:
            others = tuple(node for node in [*self.nodes(), *self.puppets] if node != member.node)
            rank, driver = layout.rank_of(member.node), member.node == epoch.driver
            member.loop.post(
                PrepareEpoch(epoch=epoch, layout=layout, rank=rank, is_driver=driver, model_file=file, members=others)
            )

    def wire(self, epoch: Epoch) -> None:
        """A data link between every two."""
        for i in range(len(self.members)):
            for j in range(i + 1, len(self.members)):
                self.connect(epoch, i, j)

    def connect(self, epoch: Epoch, i: int, j: int) -> None:
        dialer, acceptor = tcp_pair(self.buffer_bytes)
        if (i, j) in self.sockets:
            self.sockets[i, j].close()
        self.sockets[i, j] = acceptor.dup()
        ends = [DataHello(epoch=epoch, node=self.members[k].node, random=os.urandom(32), aes=True) for k in (i, j)]
        self.members[i].loop.post(
            AttachDataLink(epoch, ends[1].node, dialer, derive_keys(ends[0], ends[1], dialed=True))
        )
        self.members[j].loop.post(
            AttachDataLink(epoch, ends[0].node, acceptor, derive_keys(ends[1], ends[0], dialed=False))
        )

    @asynccontextmanager
    async def puppet(self, epoch: Epoch, node: NodeId, layout: Layout, model: Path) -> AsyncIterator[list[DataLink]]:
        """Prepares an epoch with one more member, which is the test: its links, proved, one to each of the others.

        Its id is larger than all others, so they dial.
        """
        self.puppets = [node]
        self.post_prepare(epoch, layout, model)
        self.wire(epoch)
        links = []
        for member in self.members:
            dialer, acceptor = tcp_pair(self.buffer_bytes)
            theirs, ours = (
                DataHello(epoch=epoch, node=n, random=os.urandom(32), aes=True) for n in (member.node, node)
            )
            keys = derive_keys(theirs, ours, dialed=True)
            member.loop.post(AttachDataLink(epoch, node, dialer, keys))
            links.append(DataLink(acceptor, derive_keys(ours, theirs, dialed=False), 1 << 20))
        for link in links:
            while link.receive() is None:
                await trio.lowlevel.wait_readable(link.fileno())
            link.send(encode_body(Ready()))
        for member in self.members:
            await member.until(lambda m=member: m.find(EpochPrepared, epoch))
        try:
            yield links
        finally:
            for link in links:
                link.close()

    def driver(self, epoch: Epoch) -> Member:
        return next(member for member in self.members if member.node == epoch.driver)

    async def ask(self, epoch: Epoch, submits: Sequence[Submit], timeout_s: float = 120.0) -> list[list[int]]:
        """Runs requests side by side; the tokens of each."""
        driver = self.driver(epoch)
        for submit in submits:
            driver.loop.post(Admit(epoch, submit))
        await driver.until(lambda: all(submit.request in driver.ends for submit in submits), timeout_s)
        return [[token.token for token in driver.tokens[submit.request]] for submit in submits]

    def broken(self, epoch: Epoch) -> dict[NodeId, EpochBroken]:
        found = {member.node: member.find(EpochBroken, epoch) for member in self.members}
        return {node: event for node, event in found.items() if event is not None}


@asynccontextmanager
async def open_mesh(n_members: int, *, buffer_bytes: int | None = None) -> AsyncIterator[DataMesh]:
    """n running data loops of one thread each; they are stopped and joined at the end."""
    members = [Member(node_id(i), Kernels("", 1)) for i in range(n_members)]
    mesh = DataMesh(members, buffer_bytes)
    async with trio.open_nursery() as nursery:
        for member in members:
            member.loop.start()
            nursery.start_soon(member.listen)
        try:
            yield mesh
        finally:
            for member in members:
                member.loop.post(Stop())
                member.loop.interrupt()
            for sock in mesh.sockets.values():
                sock.close()
            with trio.CancelScope(shield=True):
                for member in members:
                    assert await trio.to_thread.run_sync(member.loop.join, 10.0)
    assert all(isinstance(member.events[-1], DataLoopEnded) for member in members)


def submit_of(
    prompt: Sequence[int],
    *,
    request: int = 1,
    max_tokens: int = 16,
    end_tokens: tuple[int, ...] = (),
    sampling: SamplingParameters = GREEDY,
    generated: tuple[int, ...] = (),
) -> Submit:
    return Submit(
        RequestId(f"{request:032x}"),
        ModelHash("0" * 64),
        tuple(prompt),
        generated,
        max_tokens,
        end_tokens,
        sampling,
    )
