"""The systemd protocol against a socket of our own in systemd's place."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import trio
import trio.testing

from meshllm.daemon.systemd import Notifier, take_listening_sockets


@pytest.fixture
def manager(tmp_path: Path):  # type: ignore[no-untyped-def]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def test_ready_reaches_the_manager(manager: socket.socket) -> None:
    Notifier({"NOTIFY_SOCKET": manager.getsockname()}).send("READY=1", "STATUS=port 6374")
    assert manager.recv(100) == b"READY=1\nSTATUS=port 6374"


def test_an_abstract_socket_is_reached_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0meshllm-test-{os.getpid()}")
        sock.settimeout(5)
        Notifier({"NOTIFY_SOCKET": f"@meshllm-test-{os.getpid()}"}).send("STOPPING=1")
        assert sock.recv(100) == b"STOPPING=1"


async def test_the_watchdog_is_fed_twice_a_period(
    manager: socket.socket, autojump_clock: trio.testing.MockClock
) -> None:
    notifier = Notifier(
        {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    )
    assert notifier.watchdog_s == 15.0
    with trio.move_on_after(31):
        await notifier.keep_alive()
    assert [manager.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3


async def test_without_systemd_nothing_happens() -> None:
    Notifier({}).send("READY=1")
    Notifier({"NOTIFY_SOCKET": "/nowhere/notify"}).send("READY=1")
    with trio.fail_after(1):
        await Notifier({"WATCHDOG_USEC": "0"}).keep_alive()
    assert take_listening_sockets({}) == []
    assert take_listening_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == []  # meant for another process
