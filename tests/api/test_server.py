"""The API's sockets: whose they are, who may use them, when they go; and that no reader keeps a server alive."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
import trio

from meshllm.api import connections
from meshllm.api.server import GRACE_S, open_sockets, serve
from meshllm.errors import ConfigError
from meshllm.model.model_file import ModelFile
from tests.emitting_control import EmittingControl
from tests.system.mesh import free_port


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "s"


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


# --- the socket's file ------------------------------------------------------------------------------------------------


def test_sock_01_stale_socket_is_replaced_and_the_own_one_removed(path: Path) -> None:
    path.parent.mkdir()
    listening(path).close()  # a daemon that was killed leaves its file
    with open_sockets(path, 0o660, None, None, ()) as (made,), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert made.getsockname() == str(path)
    assert not path.exists()


def test_sock_01_second_daemon_is_told_and_the_first_goes_on(path: Path) -> None:
    with open_sockets(path, 0o660, None, None, ()):
        inode = path.stat().st_ino
        with pytest.raises(ConfigError, match="serves this socket already"), open_sockets(path, 0o660, None, None, ()):
            pytest.fail("two daemons on one socket")
        assert path.stat().st_ino == inode


def test_sock_01_somebody_who_answers_without_our_lock_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with (
        listening(path),
        pytest.raises(ConfigError, match="serves this socket already"),
        open_sockets(path, 0o660, None, None, ()),
    ):
        pytest.fail("took a living socket over")
    assert path.exists()


def test_sock_01_what_is_no_socket_is_never_removed(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is no socket"), open_sockets(path, 0o660, None, None, ()):
        pytest.fail("took a file over")
    assert path.read_text() == "precious"


def test_sock_01_race_for_one_socket_has_one_winner(path: Path) -> None:
    path.parent.mkdir()
    listening(path).close()
    start, end, won = threading.Barrier(20), threading.Barrier(20), []

    def run() -> None:
        start.wait()
        try:
            with open_sockets(path, 0o660, None, None, ()):
                won.append(True)
                end.wait()
        except ConfigError:
            end.wait()

    threads = [threading.Thread(target=run) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(won) == 1


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_sock_03_mode_is_right_before_anybody_can_connect(
    path: Path, mode: int, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen at every system call that makes it: never wider than the mode, and exact when it listens."""
    seen: list[tuple[str, int]] = []

    class Watched(socket.socket):
        def bind(self, address: str) -> None:  # type: ignore[override]
            super().bind(address)
            seen.append(("bind", stat.S_IMODE(os.stat(address).st_mode)))

        def listen(self, backlog: int = 0, /) -> None:
            seen.append(("listen", stat.S_IMODE(path.stat().st_mode)))
            super().listen(backlog)

    monkeypatch.setattr(socket, "socket", Watched)
    before = os.umask(mask)
    try:
        with open_sockets(path, mode, None, None, ()):
            assert stat.S_IMODE(path.stat().st_mode) == mode
            assert not path.parent.stat().st_mode & stat.S_IWOTH
    finally:
        os.umask(before)
    assert seen[0][1] & ~mode == 0
    assert seen[-1] == ("listen", mode)


def test_sock_03_group_is_the_configured_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(shutil, "chown", lambda _, group: given.append(group))
    with open_sockets(path, 0o660, "users", None, ()):
        assert given == ["users"]


def test_sock_03_unknown_group_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="no group nosuchgroup"), open_sockets(path, 0o660, "nosuchgroup", None, ()):
        pytest.fail("no such group")
    assert not path.exists()


def test_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for bad, words in ((tmp_path / "file" / "s", "cannot be made"), (tmp_path / ("x" * 120), "107 bytes")):
        with pytest.raises(ConfigError, match=words), open_sockets(bad, 0o660, None, None, ()):
            pytest.fail("impossible path")


def test_address_in_use_is_named(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"tcp 127.0.0.1:{port}"),
            open_sockets(path, 0o660, None, ("127.0.0.1", port), ()),
        ):
            pytest.fail("port in use")
    assert not path.exists()


def test_inherited_sockets_replace_our_own(path: Path, tmp_path: Path) -> None:
    given = listening(tmp_path / "given")
    with open_sockets(path, 0o660, None, None, [given]) as sockets:
        assert sockets == [given]
        assert not path.exists()


# --- connections ------------------------------------------------------------------------------------------------------


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
