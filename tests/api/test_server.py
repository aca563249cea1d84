"""The API's sockets: whose they are, who may use them, when they go."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import threading
from pathlib import Path

import pytest

from meshllm.api.server import open_sockets
from meshllm.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "s"


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


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
