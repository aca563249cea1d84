"""Control loops with real links, mDNS on loopback and a real model file; the data loop is a fake that computes
nothing.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
import trio

from meshllm.daemon import loop_bridge as bridge
from meshllm.daemon.control_loop import ControlLoop
from meshllm.daemon.model_store import ModelStore
from meshllm.errors import KernelError, ModelFileError, NoModelError
from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.actions import Delivery, Resuming
from meshllm.mesh.facts import NodeConfig
from meshllm.mesh.messages import Epoch, Finished, ModelHash, RequestId, Submit, Tokens
from meshllm.net.identity import Identity, MeshSecret
from meshllm.net.listener import bind
from meshllm.parameters import SampledToken, SamplingParameters
from meshllm.status import Status

SECRET = MeshSecret(bytes(32))


class FakeDataLoop:
    """Prepares an epoch once a socket with each member is there; answers with a hash of the prompt."""

    def __init__(self) -> None:
        self.send, self.events = trio.open_memory_channel[bridge.Event](1000)
        self.commands: list[bridge.Command] = []
        self.links: dict[Epoch, dict[NodeId, socket.socket]] = {}
        self.wanted: dict[Epoch, set[NodeId]] = {}
        self.hold = False  # admit, but answer nothing

    def start(self) -> None: ...

    def interrupt(self) -> None: ...

    def join(self, timeout_s: float) -> bool:
        return True

    async def next_event(self) -> bridge.Event:
        return await self.events.receive()

    def post(self, command: bridge.Command) -> None:
        self.commands.append(command)
        match command:
            case bridge.PrepareEpoch():
                self.wanted[command.epoch] = set(command.members)
                self._check(command.epoch)
            case bridge.AttachDataLink(epoch, node, sock, _):
                self.links.setdefault(epoch, {})[node] = sock
                self._check(epoch)
            case bridge.RetireEpoch(epoch, _):
                self._close(epoch)
            case bridge.Admit(epoch, submit) if not self.hold:
                drawn = tuple(SampledToken(token) for token in expected(submit))
                for message in (Tokens(submit.request, 0, drawn), Finished(submit.request, "length", len(drawn))):
                    self.send.send_nowait(bridge.Answered(epoch, message))
            case bridge.Stop():
                for epoch in list(self.links):
                    self._close(epoch)
            case _:
                pass

    def _check(self, epoch: Epoch) -> None:
        if epoch in self.wanted and self.wanted[epoch] <= set(self.links.get(epoch, {})):
            self.send.send_nowait(bridge.EpochPrepared(epoch, 1, 1))

    def _close(self, epoch: Epoch) -> None:
        for sock in self.links.pop(epoch, {}).values():
            sock.close()


def expected(submit: Submit) -> list[int]:
    return list(hashlib.sha256(repr(submit.prompt).encode()).digest()[: submit.max_tokens])


@dataclass
class Daemon:
    control: ControlLoop
    data: FakeDataLoop
    port: int
    node: NodeId
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def status(self) -> Status:
        return self.control.status()

    def submit(self, model: str, prompt: tuple[int, ...] = (1, 2, 3)) -> Submit:
        request = RequestId(secrets.token_hex(16))
        return Submit(request, ModelHash(model), prompt, (), 8, (), SamplingParameters(temperature=0.0))


@asynccontextmanager
async def daemon(
    nursery: trio.Nursery,
    state: Path,
    number: int,
    *,
    model: Path | None,
    peers: tuple[int, ...] = (),
    secret: MeshSecret = SECRET,
    interfaces: tuple[str, ...] = ("none",),
) -> AsyncIterator[Daemon]:
    node = NodeId(f"{number:016x}")
    sockets, port = bind(0, 0, 1)
    data = FakeDataLoop()
    control = ControlLoop(
        config=NodeConfig(
            node=node,
            incarnation=secrets.randbits(32),
            name=f"device {number}",
            port=port,
            build="test",
            threads=1,
            isa="scalar",
            layout_mode="all",
            context=512,
        ),
        device=Device(node=node, read_gbps=10.0, matmul_gops=50.0, usable_bytes=4 << 30),
        identity=Identity.create(secret, node),
        data=data,  # type: ignore[arg-type]  # a fake with the same face
        sockets=sockets,
        peers=[("127.0.0.1", peer) for peer in peers],
        interfaces=interfaces,
        store=ModelStore(state / str(number)),
        wanted_model=str(model) if model is not None else None,
        log=structlog.get_logger(),
    )
    one = Daemon(control, data, port, node)

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        with one.scope:
            await control.run(task_status=task_status)

    await nursery.start(run)
    yield one
    with trio.move_on_after(3, shield=True):
        await control.stop("the test is over")
    one.scope.cancel()


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110  # states of several loops: no one event tells of them
            await trio.sleep(0.01)


def serves(n: int, *daemons: Daemon) -> Callable[[], bool]:
    """Whether all serve one layout of n ranks."""

    def check() -> bool:
        layouts = [one.status.layout for one in daemons]
        epochs = {(layout.epoch, layout.driver) for layout in layouts if layout is not None}
        full = all(layout is not None and len(layout.ranks) == n for layout in layouts)
        return full and len(epochs) == 1 and all(one.status.state == "serving" for one in daemons)

    return check


async def answer(one: Daemon, submit: Submit) -> list[Delivery]:
    with trio.fail_after(20):
        async with one.control.open_request(submit) as channel:
            return [message async for message in channel]


def token_ids(messages: list[Delivery]) -> list[int]:
    return [token.token for message in messages if isinstance(message, Tokens) for token in message.tokens]


async def test_two_daemons_commit_one_layout_and_each_can_be_root(tmp_path: Path, smollm2_path: Path) -> None:
    async with (
        trio.open_nursery() as nursery,
        daemon(nursery, tmp_path, 1, model=smollm2_path) as one,
        daemon(nursery, tmp_path, 2, model=smollm2_path, peers=(one.port,)) as two,
    ):
        await until(serves(2, one, two))
        sha256 = one.control.model().sha256
        for root in (one, two):
            submit = root.submit(sha256)
            messages = await answer(root, submit)
            assert token_ids(messages) == expected(submit)
            assert isinstance(messages[-1], Finished)
            assert root.status.requests.answered == 1
        names = {peer.name: peer.state for peer in one.status.peers}
        assert names == {"device 1": "self", "device 2": "connected"}
        assert [peer.slice is not None for peer in two.status.peers] == [True, True]


async def test_three_daemons_of_which_one_knows_the_others_learn_addresses(tmp_path: Path, smollm2_path: Path) -> None:
    async with (
        trio.open_nursery() as nursery,
        daemon(nursery, tmp_path, 1, model=smollm2_path) as one,
        daemon(nursery, tmp_path, 2, model=smollm2_path, peers=(one.port,)) as two,
        daemon(nursery, tmp_path, 3, model=smollm2_path, peers=(one.port,)) as three,
    ):
        await until(serves(3, one, two, three))
        submit = three.submit(one.control.model().sha256)
        assert token_ids(await answer(three, submit)) == expected(submit)


async def test_daemons_find_each_other_by_multicast_on_loopback(tmp_path: Path, smollm2_path: Path) -> None:
    async with (
        trio.open_nursery() as nursery,
        daemon(nursery, tmp_path, 1, model=smollm2_path, interfaces=("lo",)) as one,
        daemon(nursery, tmp_path, 2, model=smollm2_path, interfaces=("lo",)) as two,
    ):
        await until(serves(2, one, two))


async def test_a_running_answer_outlives_a_lost_peer(tmp_path: Path, smollm2_path: Path) -> None:
    async with trio.open_nursery() as nursery, daemon(nursery, tmp_path, 1, model=smollm2_path) as one:
        async with daemon(nursery, tmp_path, 2, model=smollm2_path, peers=(one.port,)) as two:
            await until(serves(2, one, two))
            one.data.hold = True
            submit = one.submit(one.control.model().sha256)
            async with one.control.open_request(submit) as channel:
                two.scope.cancel()  # dies without a word
                with trio.fail_after(10):
                    message = await channel.receive()
                    assert isinstance(message, Resuming)
                    assert "device 2" in message.reason
                    one.data.hold = False  # the survivor plans again by itself
                    rest = [message async for message in channel]
        assert token_ids(rest) == expected(submit)
        assert serves(1, one)()
        assert one.status.requests.failed == 0


async def test_a_reader_that_leaves_cancels_its_request_conc_03(tmp_path: Path, smollm2_path: Path) -> None:
    async with (
        trio.open_nursery() as nursery,
        daemon(nursery, tmp_path, 1, model=smollm2_path) as one,
        daemon(nursery, tmp_path, 2, model=smollm2_path, peers=(one.port,)) as two,
    ):
        await until(serves(2, one, two))
        driver = one if one.status.layout and one.status.layout.driver == one.node else two
        root = two if driver is one else one
        driver.data.hold = True
        submit = root.submit(one.control.model().sha256)
        async with root.control.open_request(submit):
            await until(lambda: any(isinstance(c, bridge.Admit) for c in driver.data.commands))
        await until(lambda: bridge.CancelAdmitted(submit.request) in driver.data.commands, 2)
        assert root.status.requests.active == 0


async def test_another_secret_never_joins(tmp_path: Path, smollm2_path: Path) -> None:
    async with (
        trio.open_nursery() as nursery,
        daemon(nursery, tmp_path, 1, model=smollm2_path) as one,
        daemon(nursery, tmp_path, 2, model=smollm2_path, peers=(one.port,), secret=MeshSecret.generate()) as two,
    ):
        await until(serves(1, one))
        await until(serves(1, two))
        await trio.sleep(0.5)
        assert [peer.state for peer in one.status.peers] == ["self"]
        assert one.status.mesh_tag != two.status.mesh_tag


async def test_no_model_is_a_normal_state_and_one_that_comes_is_served(tmp_path: Path, smollm2_path: Path) -> None:
    async with trio.open_nursery() as nursery, daemon(nursery, tmp_path, 1, model=None) as one:
        await until(lambda: one.status.state == "no-model")
        assert "meshllm pull" in (one.status.detail or "")
        with pytest.raises(NoModelError, match="meshllm pull"):
            one.control.model()
        await trio.to_thread.run_sync(ModelStore(tmp_path / "1").add, smollm2_path, "smol")
        await until(serves(1, one))
        assert one.status.model is not None
        assert one.status.model.name == "smol"


async def test_a_file_that_is_no_model_is_named_and_the_daemon_lives(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"not a model" * 100)
    async with trio.open_nursery() as nursery, daemon(nursery, tmp_path, 1, model=foreign) as one:
        await until(lambda: one.status.state == "failed")
        with pytest.raises(ModelFileError, match=r"foreign\.gguf"):
            one.control.model()


async def test_the_daemon_ends_when_its_data_loop_died(tmp_path: Path, smollm2_path: Path) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(KernelError, match="the data loop died: boom"), flatten_subgroups=True):
        async with trio.open_nursery() as nursery, daemon(nursery, tmp_path, 1, model=smollm2_path) as one:
            one.data.send.send_nowait(bridge.DataLoopEnded("boom"))
            await trio.sleep(5)
