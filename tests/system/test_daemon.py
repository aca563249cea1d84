"""One daemon as a process: its socket, its signals, a start that needs nothing."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshllm.errors import MeshLLMError, NoDaemonError
from tests.system.mesh import Daemon, Mesh, error_of

PROMPT = (1, 4093, 198)


def test_start_needs_no_model_no_peers_and_no_network(need_namespaces: None, tmp_path: Path) -> None:
    from tests.system.mesh import bridged_hosts, set_link

    with bridged_hosts(1) as (host,), Mesh(tmp_path) as mesh:
        set_link(host, "down")
        daemon = mesh.start("alone", model=None, host=host)
        (status,) = mesh.wait(lambda status: status.state == "no-model", daemon)
        assert "meshllm pull" in (status.detail or "")
        error = error_of(lambda: daemon.complete("x", 1))
        assert error.exit_code == 4
        chat = subprocess.run(
            [sys.executable, "-m", "meshllm.cli.main", "chat", "--socket", str(daemon.socket)],
            input="hello\n", capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert chat.returncode == 4
        assert "meshllm pull" in chat.stderr
        assert daemon.stop() == 0


# --- SOCK-01, SOCK-03 -------------------------------------------------------------------------------------------------


def test_sock_01_socket_of_a_killed_daemon_is_replaced(mesh: Mesh) -> None:
    daemon = mesh.start("one", model=None)
    daemon.kill()
    assert daemon.socket.exists()
    daemon.run()
    mesh.wait(lambda status: True, daemon)


def test_sock_01_of_twenty_starts_at_once_on_one_socket_one_wins(mesh: Mesh) -> None:
    first = mesh.start("d0", model=None)
    first.kill()  # its socket is left behind: all others race for it
    others = [
        mesh.start(f"d{i}", "--socket", str(first.socket), "--threads", "1", model=None, wait=False)
        for i in range(1, 21)
    ]
    end = time.monotonic() + 90
    while sum(daemon.process.poll() is None for daemon in others) > 1 and time.monotonic() < end:
        time.sleep(0.1)
    alive = [daemon for daemon in others if daemon.process.poll() is None]
    assert len(alive) == 1
    mesh.wait(lambda status: status.name == alive[0].name, first)  # who answers on it is who lives
    for daemon in others:
        if daemon is not alive[0]:
            assert daemon.process.returncode in (1, 2, 3)
            assert str(first.socket) in daemon.log
            assert "Traceback" not in daemon.log


def test_sock_01_socket_of_a_living_daemon_is_left_alone(mesh: Mesh) -> None:
    first = mesh.start("first", model=None)
    second = mesh.start("second", "--socket", str(first.socket), model=None, wait=False)
    assert second.process.wait(30) != 0
    assert first.status().name == "first"


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_sock_03_mode_is_the_configured_one_whatever_the_umask(mesh: Mesh, mask: int) -> None:
    before = os.umask(mask)
    try:
        daemon = mesh.start("one", "--socket-mode", "0660", model=None)
    finally:
        os.umask(before)
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
    assert stat.S_IMODE((daemon.folder / "mesh-key").stat().st_mode) == 0o600


# --- CLI-05, the daemon's side ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_cli_05_signal_during_an_answer_ends_it_with_an_error_event(
    mesh: Mesh, smollm2_path: Path, number: signal.Signals
) -> None:
    daemon = mesh.start("one", model=smollm2_path)
    mesh.wait_ranks(1, daemon)
    ended: list[MeshLLMError | None] = []
    began = threading.Event()

    def read() -> None:
        body = {"prompt": list(PROMPT), "max_tokens": 3500, "ignore_eos": True, "stream": True}
        try:
            for i, _ in enumerate(daemon.client.stream("/v1/completions", body)):
                if i == 3:
                    began.set()
            ended.append(None)
        except MeshLLMError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert began.wait(30)
    start = time.monotonic()
    daemon.signal(number)
    assert daemon.process.wait(15) == 0
    assert time.monotonic() - start < 10
    reader.join(5)
    (error,) = ended
    assert error is not None
    assert not isinstance(error, NoDaemonError), "the stream broke off without a word"
    assert not daemon.socket.exists()
    assert "Traceback" not in daemon.log


def test_signal_while_it_starts_ends_it_cleanly(mesh: Mesh, smollm2_path: Path) -> None:
    for delay in (0.3, 0.6, 1.0):
        name = f"d{delay}"
        daemon = mesh.start(name, model=smollm2_path, wait=False)
        time.sleep(delay)
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(15) in (0, 143, -signal.SIGTERM)
        assert "Traceback" not in daemon.log, daemon.log


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_host_05_locked_memory_and_huge_pages_may_be_missing(mesh: Mesh, smollm2_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10 if hard == -1 else min(64 << 10, hard), hard))
    try:
        daemon = mesh.start("one", model=smollm2_path)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    mesh.wait_ranks(1, daemon)
    assert daemon.complete(PROMPT, 2)["token_ids"]


def test_memory_of_a_rank_is_slice_and_cache_and_little_more(mesh: Mesh, smollm2_path: Path) -> None:
    daemon = mesh.start("one", model=smollm2_path)
    (status,) = mesh.wait_ranks(1, daemon)
    daemon.complete(PROMPT, 16)
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines())
    resident = int(fields["RssAnon"].split()[0]) * 1024
    part = status.peers[0].slice
    assert part is not None
    assert status.layout is not None
    cache = 30 * 2 * 3 * 64 * 2 * status.layout.context * status.layout.slots  # layers, k and v, heads, width, f16
    assert resident < part.bytes + cache + 150e6


def _get_raw(daemon: Daemon, request: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(10)
        end.connect(str(daemon.socket))
        end.sendall(request)
        answer = b""
        while part := end.recv(65536):
            answer += part
        return answer


def test_local_api_answers_at_once_whatever_the_state(mesh: Mesh) -> None:
    daemon = mesh.start("one", model=None)
    answer = _get_raw(daemon, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 ")
    assert b"no-model" in _get_raw(daemon, b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
