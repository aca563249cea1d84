"""The API's connections: no client keeps the server from stopping, from working, or from serving others."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
import trio

from meshllm.api import connections
from meshllm.api.server import GRACE_S, open_sockets, serve
from meshllm.model.model_file import ModelFile
from tests.emitting_control import EmittingControl
from tests.system.mesh import free_port


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "s"


@pytest.fixture(scope="module")
def model_file(smollm2_path: Path) -> Iterator[ModelFile]:
    with ModelFile.open(smollm2_path) as file:
        yield file


async def ask_and_read_nothing(path: Path) -> socket.socket:
    """A stream whose reader takes nothing: the server's writes get stuck when the buffers are full."""
    body = json.dumps({"prompt": [1], "stream": True, "return_token_ids": True}).encode()
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return client


async def until_stuck(control: EmittingControl) -> None:
    steps = -1
    while control.steps != steps or not steps:
        steps = control.steps
        await trio.sleep(0.3)


async def test_reader_that_takes_nothing_does_not_keep_the_server_from_stopping(
    path: Path, model_file: ModelFile
) -> None:
    control = EmittingControl(model_file, (19556,))
    control.endless = True
    stopping, ended = trio.Event(), trio.Event()

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        await serve(control.generator(1 << 20), sockets, stopping, structlog.get_logger(), task_status=task_status)
        ended.set()

    with open_sockets(path, 0o660, None, None, ()) as sockets:
        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            with await ask_and_read_nothing(path):
                await until_stuck(control)
                assert not control.left
                stopping.set()
                nursery.cancel_scope.deadline = trio.current_time() + GRACE_S + 5
                await ended.wait()
    assert not nursery.cancel_scope.cancelled_caught
    assert len(control.left) == 1


async def test_reader_that_takes_nothing_is_given_up(
    path: Path, model_file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WRITE_TIMEOUT_S", 0.5)
    control = EmittingControl(model_file, (19556,))
    control.endless = True
    stopping = trio.Event()
    with open_sockets(path, 0o660, None, None, ()) as sockets:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, control.generator(1 << 20), sockets, stopping, structlog.get_logger())
            with await ask_and_read_nothing(path), trio.fail_after(20):
                while not control.left:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            stopping.set()


@asynccontextmanager
async def serving(path: Path, model_file: ModelFile, tcp: tuple[str, int] | None = None) -> AsyncIterator[None]:
    """The API with a model that answers one token; what is done within it has 20 s."""
    stopping = trio.Event()
    with open_sockets(path, 0o660, None, tcp, ()) as sockets:
        async with trio.open_nursery() as nursery:
            generator = EmittingControl(model_file, (1,)).generator()
            await nursery.start(serve, generator, sockets, stopping, structlog.get_logger())
            with trio.fail_after(20):
                yield
            stopping.set()


async def test_connections_are_bounded(path: Path, model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    async with serving(path, model_file):
        open_ones = [await trio.open_unix_socket(str(path)) for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked(0.05)
        async with await trio.open_unix_socket(str(path)) as one_more:
            assert (await one_more.receive_some(4096)).startswith(b"HTTP/1.1 503")
            assert await one_more.receive_some(1) == b""
        await open_ones.pop().aclose()
        await trio.testing.wait_all_tasks_blocked(0.05)
        async with await trio.open_unix_socket(str(path)) as again:
            await again.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await again.receive_some(20)).startswith(b"HTTP/1.1 200")
        for stream in open_ones:
            await stream.aclose()


async def test_a_full_tcp_socket_keeps_no_local_client_out(
    path: Path, model_file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    port = free_port()
    async with serving(path, model_file, ("127.0.0.1", port)):
        open_ones = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        assert (await open_ones[2].receive_some(4096)).startswith(b"HTTP/1.1 503")
        async with await trio.open_unix_socket(str(path)) as local:
            await local.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await local.receive_some(20)).startswith(b"HTTP/1.1 200")
        for stream in open_ones:
            await stream.aclose()


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "further"])
async def test_a_head_that_never_ends_ends_its_connection(
    before: bytes, path: Path, model_file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connections._Handler, "_limit_s", 0.5)
    async with serving(path, model_file), await trio.open_unix_socket(str(path)) as slow:
        if before:
            await slow.send_all(before)
            assert (await slow.receive_some(4096)).startswith(b"HTTP/1.1 200")
        await slow.send_all(b"GET /health HTTP/1.1\r\nHo")
        while await slow.receive_some(4096):
            continue
