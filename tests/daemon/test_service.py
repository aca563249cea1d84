"""The composition root as a process: what keeps it from starting is one line and an exit code; a signal ends it
cleanly.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf_files import tiny_model

from meshllm.net.identity import MeshSecret


def words(state: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "meshllm", "daemon", "--state-dir", str(state), "--threads", "1", *flags]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MESHLLM_", "XDG_"))}
    return {**kept, "HOME": str(tmp_path), **more}


def run(tmp_path: Path, *flags: str, **more: str) -> tuple[int, str]:
    done = subprocess.run(
        words(tmp_path / "state", *flags),
        env=environment(tmp_path, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("meshllm: ")]
    assert "Traceback" not in done.stderr
    assert len(lines) == 1, done.stderr
    return done.returncode, lines[0]


def taken_port() -> socket.socket:
    sock = socket.socket()
    sock.bind(("0.0.0.0", 0))
    sock.listen()
    return sock


def broken_key(tmp_path: Path) -> list[str]:
    (tmp_path / "key").write_text("mesh1-nonsense\n")
    return ["--key-file", str(tmp_path / "key")]


def broken_config(tmp_path: Path) -> list[str]:
    (tmp_path / "x.toml").write_text('slots = 2\ncontxt = "5"\n')
    return ["--config", str(tmp_path / "x.toml")]


def foreign_socket(tmp_path: Path) -> list[str]:
    (tmp_path / "file").write_text("")
    return ["--socket", str(tmp_path / "file")]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (broken_key, "key: the mesh secret"),
        (broken_config, 'x.toml:2: contxt: unknown key; did you mean "context"?'),
        (foreign_socket, "file: exists and is no socket"),
        (lambda _: ["--isa", "vax"], "--isa: instruction set 'vax' cannot run here; these can: "),
        (lambda _: ["--slots", "0"], "--slots: expected 1 to 64"),
        (lambda folder: ["--socket", f"{folder}/no/such/folder/s"], "/no/such/folder/s: cannot be made"),
        (lambda _: ["--socket-group", "no-such-group"], "no group no-such-group"),
    ],
)
def test_what_keeps_a_daemon_from_starting_is_one_line(
    tmp_path: Path, make: Callable[[Path], list[str]], said: str
) -> None:
    code, line = run(tmp_path, *make(tmp_path))
    assert said in line
    assert code == 2


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with taken_port() as sock:
        port = sock.getsockname()[1]
        code, line = run(tmp_path, "--port", str(port))
    assert f"port {port} is in use" in line
    assert code in (1, 2)
    assert not (tmp_path / "state" / "meshllm.sock").exists()


def test_too_few_file_descriptors_are_one_line(tmp_path: Path) -> None:
    command = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *words(tmp_path / "state")]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "only 64 files may be open at once, 128 are needed: raise ulimit -n" in line


class Manager:
    """systemd's side of the notify socket."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(str(path))
        self.sock.settimeout(60)
        self.path = str(path)

    def wait(self, line: bytes) -> None:
        while line not in self.sock.recv(1000).split(b"\n"):
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_is_ready_then_stops_on_a_signal_and_removes_its_socket(
    tmp_path: Path, number: signal.Signals
) -> None:
    manager = Manager(tmp_path / "notify")
    state = tmp_path / "state"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            words(state), env=environment(tmp_path, NOTIFY_SOCKET=manager.path), stdout=log, stderr=log
        )
    try:
        manager.wait(b"READY=1")
        assert (state / "meshllm.sock").exists()
        assert MeshSecret.from_text((state / "mesh-key").read_text())
        second = run(tmp_path)  # the same state folder
        assert "another daemon uses this state folder" in second[1]
        at = time.monotonic()
        process.send_signal(number)
        manager.wait(b"STOPPING=1")
        while process.poll() is None and time.monotonic() - at < 10:
            process.send_signal(number)  # heard the first time
            time.sleep(0.001)
        assert process.wait(10) == 0, (tmp_path / "log").read_text()
        assert time.monotonic() - at < 10
        assert not (state / "meshllm.sock").exists()
    finally:
        process.kill()
        process.wait()
        manager.sock.close()
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    assert (state / "mesh-key").read_text().strip() not in text


@contextmanager
def daemon(tmp_path: Path, *flags: str) -> Iterator[Callable[[str], str]]:
    """A running daemon. What it gives waits for an event in its log, and returns the log up to its line."""
    process = subprocess.Popen(
        words(tmp_path / "state", *flags), env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    seen = ""

    def wait(event: str) -> str:
        nonlocal seen
        while event not in seen:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line, seen
            seen += line
        return seen

    try:
        yield wait
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("host", "is_open"), [("0.0.0.0", True), ("[::]", True), ("127.0.0.1", False), ("localhost", False)]
)
def test_api_that_other_machines_may_reach_is_warned_of(tmp_path: Path, host: str, is_open: bool) -> None:
    with taken_port() as sock:
        port = sock.getsockname()[1]
    with daemon(tmp_path, "--tcp", f"{host}:{port}") as wait:
        lines = [line for line in wait(" started ").splitlines() if "api_open_to_network" in line]
    assert len(lines) == is_open
    assert all(f"address={host}:{port}" in line and "--tcp 127.0.0.1:PORT" in line for line in lines)


@pytest.mark.parametrize(("context", "limited"), [(100_000, True), (64, False), (16, False)])
def test_context_beyond_the_model_is_said_with_what_is_used(tmp_path: Path, context: int, limited: bool) -> None:
    (tmp_path / "tiny.gguf").write_bytes(tiny_model())
    with daemon(tmp_path, "--model", str(tmp_path / "tiny.gguf"), "--context", str(context)) as wait:
        log = wait("layout_offered")
    said = [line for line in log.splitlines() if "context_limited" in line]
    assert len(said) == limited
    assert all(f"asked={context}" in line and "used=64" in line for line in said)


def test_model_that_cannot_be_opened_is_logged_once(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(tiny_model()[:-100])
    with daemon(tmp_path, "--model", str(tmp_path / "bad.gguf")) as wait:
        wait("model_failed")
        wait("interfaces_chosen")  # much later than a second look
        (tmp_path / "bad.gguf").write_bytes(b"")  # another fault is told again
        log = wait("is empty")
    assert log.count("model_failed") == 2, log
