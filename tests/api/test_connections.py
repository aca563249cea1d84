"""The API's connections: no client keeps the server from stopping, from working, or from serving others."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
import trio

from meshllm.api import connections, http1
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
    monkeypatch.setattr(http1, "WRITE_TIMEOUT_S", 0.5)
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
async def serving(
    path: Path, model_file: ModelFile, tcp: tuple[str, int] | None = None, control: EmittingControl | None = None
) -> AsyncIterator[None]:
    """The API with a model that answers one token, or as `control` says; what is done within it has 20 s."""
    stopping = trio.Event()
    generator = (control or EmittingControl(model_file, (1,))).generator(1 << 20)
    with open_sockets(path, 0o660, None, tcp, ()) as sockets:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, generator, sockets, stopping, structlog.get_logger())
            with trio.fail_after(20):
                yield
            stopping.set()


async def connected(path: Path, tcp: tuple[str, int] | None) -> trio.SocketStream:
    return await trio.open_tcp_stream(*tcp) if tcp else await trio.open_unix_socket(str(path))


async def read_all(stream: trio.SocketStream) -> bytes:
    """Until the server closes."""
    got = b""
    while part := await stream.receive_some(1 << 16):
        got += part
    return got


async def health(stream: trio.SocketStream) -> bytes:
    """A whole answer; the connection stays."""
    await stream.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return await read_whole(stream)


async def read_whole(stream: trio.SocketStream) -> bytes:
    """An answer that says its length."""
    got, n_bytes = b"", math.inf
    while len(got) < n_bytes:
        part = await stream.receive_some(4096)
        assert part, "closed within an answer"
        got += part
        if length := re.search(rb"content-length: (\d+)\r\n", got):
            n_bytes = got.find(b"\r\n\r\n") + 4 + int(length[1])
    return got


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and code of an answer that is an error in OpenAI's shape."""
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(content)["error"]["code"]


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
    monkeypatch.setattr(http1, "HEAD_TIMEOUT_S", 0.5)
    async with serving(path, model_file), await trio.open_unix_socket(str(path)) as slow:
        if before:
            await slow.send_all(before)
            assert (await slow.receive_some(4096)).startswith(b"HTTP/1.1 200")
        await slow.send_all(b"GET /health HTTP/1.1\r\nHo")
        assert error_of(await read_all(slow)) == (408, "request_timeout")


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "further"])
async def test_an_idle_connection_is_closed_without_a_word(
    before: bytes, path: Path, model_file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1, "HEAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http1, "KEEP_ALIVE_S", 0.5)
    async with serving(path, model_file), await trio.open_unix_socket(str(path)) as idle:
        await idle.send_all(before)
        assert (await read_all(idle)).count(b"HTTP/1.1") == bool(before)


BEHIND = {  # a request's further headers, and what lies behind it
    "a request": (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "much": (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nLong: " + b"x" * 500_000),
    "h2c": (b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b""),
    "websocket": (b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"x"),
    "unknown": (b"Upgrade: new/1\r\n", b""),
}


@pytest.mark.parametrize("over_tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("way", ["close", "half-close"])
@pytest.mark.parametrize("behind", BEHIND)
async def test_a_client_that_leaves_is_noticed_whatever_it_left_behind(
    behind: str, way: str, stream: bool, over_tcp: bool, path: Path, model_file: ModelFile
) -> None:
    control = EmittingControl(model_file, (19556,))
    control.endless, control.first_after_s = stream, 0.0 if stream else 3600.0
    headers, further = BEHIND[behind]
    body = json.dumps({"prompt": [1], "stream": stream}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n%b"
    tcp = ("127.0.0.1", free_port()) if over_tcp else None
    async with serving(path, model_file, tcp, control), await connected(path, tcp) as client:
        await client.send_all(request % (headers, len(body), body))
        if stream:
            assert (await client.receive_some(4096)).startswith(b"HTTP/1.1 200")
        while not control.submits:  # noqa: ASYNC110
            await trio.sleep(0.01)
        await client.send_all(further)
        await (client.aclose() if way == "close" else client.send_eof())
        while not control.left:  # noqa: ASYNC110
            await trio.sleep(0.01)


@pytest.mark.parametrize("over_tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize(
    ("request_line", "answer"),
    [("POST /nowhere", (404, "not_found")), ("POST /health", (405, "method_not_allowed"))],
    ids=["path", "method"],
)
async def test_a_body_that_nobody_takes_ends_its_connection_after_the_answer(
    request_line: str, answer: tuple[int, str], over_tcp: bool, path: Path, model_file: ModelFile
) -> None:
    tcp = ("127.0.0.1", free_port()) if over_tcp else None
    head = f"{request_line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {8 << 20}\r\n\r\n".encode()
    async with serving(path, model_file, tcp):
        async with await connected(path, tcp) as one_that_sends_all:
            await one_that_sends_all.send_all(head + b"x" * (8 << 20))
            assert error_of(await read_all(one_that_sends_all)) == answer
        async with await connected(path, tcp) as one_that_stays:
            await one_that_stays.send_all(head + b"x" * 100)
            got = await read_all(one_that_stays)
            assert error_of(got) == answer
            assert b"connection: close" in got.lower()


async def test_a_small_body_that_nobody_takes_leaves_its_connection_open(path: Path, model_file: ModelFile) -> None:
    async with serving(path, model_file), await connected(path, None) as client:
        for _ in range(2):
            await client.send_all(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello")
            got = await read_whole(client)
            assert error_of(got) == (404, "not_found")
            assert b"connection: close" not in got.lower()


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
async def test_a_body_that_ends_early_is_told(framing: str, path: Path, model_file: ModelFile) -> None:
    async with serving(path, model_file), await connected(path, None) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n"
        await client.send_all(head.encode() + b'9\r\n{"model')
        await client.send_eof()
        got = await read_all(client)
        assert error_of(got) == (400, "incomplete_request")
        assert b"ended early" in got


async def test_a_full_socket_takes_a_new_client_for_the_longest_idle_one(
    path: Path, model_file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    async with serving(path, model_file):
        silent = await connected(path, None)
        idle = [await connected(path, None) for _ in range(2)]
        for stream in idle:
            assert (await health(stream)).startswith(b"HTTP/1.1 200")
            await trio.testing.wait_all_tasks_blocked(0.05)
        newest = await connected(path, None)
        assert (await health(newest)).startswith(b"HTTP/1.1 200")
        assert await idle[0].receive_some(1) == b""
        for stream in (idle[1], newest):
            await stream.send_all(b"GET /health HTTP/1.1\r\n")  # idle no more
        await trio.testing.wait_all_tasks_blocked(0.05)
        async with await connected(path, None) as one_more:
            assert (await one_more.receive_some(4096)).startswith(b"HTTP/1.1 503")
        await idle[1].send_all(b"Host: localhost\r\n\r\n")
        assert (await read_whole(idle[1])).startswith(b"HTTP/1.1 200")
        for stream in (silent, newest, *idle):
            await stream.aclose()
