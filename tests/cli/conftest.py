"""A stand-in for the daemon on a real Unix socket that keeps the requests it got; ways to run the real command."""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest


@dataclass
class StandIn:
    """What the stand-in answers, and what it was asked. `pieces` stream as deltas; `hold` keeps it before each."""

    socket: Path
    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo ", "🦙"])
    status: dict[str, Any] = field(default_factory=dict)
    error: tuple[int, dict[str, Any]] | None = None
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    hold_after: int | None = None  # pieces after which it sends nothing more until the client has gone
    break_after: int | None = None  # pieces after which it drops the connection
    error_after: int | None = None
    client_left: threading.Event = field(default_factory=threading.Event)
    holding: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    daemon: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def address_string(self) -> str:
        return "unix"

    def _json(self, status: int, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.daemon.error:
            self._json(*self.daemon.error)
        else:
            self._json(200, self.daemon.status if self.path == "/status" else {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.daemon.asked.append((self.path, body))
        if self.daemon.error:
            self._json(*self.daemon.error)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self._stream()
        self.close_connection = True

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps({"model": "stand-in", **value}).encode() + b"\n\n")
        self.wfile.flush()

    def _stream(self) -> None:
        chat, daemon = "chat" in self.path, self.daemon
        for i, piece in enumerate([*daemon.pieces, None]):
            if i == daemon.hold_after:
                daemon.holding.set()
                with contextlib.suppress(ConnectionResetError):  # it left before it had read all that we sent
                    assert self.rfile.read(1) == b""
                daemon.client_left.set()
                return
            if i == daemon.break_after:
                return
            if i == daemon.error_after:
                self._event({"error": {"message": "lost attic", "code": "unavailable"}})
                return
            if piece is not None:
                self._event({"choices": [{"index": 0, **({"delta": {"content": piece}} if chat else {"text": piece})}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 7, "completion_tokens": len(daemon.pieces), "total_tokens": 7 + len(daemon.pieces)}
        self._event({"choices": [], "usage": usage, "meshllm": {"ranks": ["kitchen", "attic"], "decode_tok_s": 61.25}})
        self.wfile.write(b"data: [DONE]\n\n")


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        assert isinstance(sys.exception(), ConnectionError)  # the client may leave at any time


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    """A listening stand-in."""
    daemon = StandIn(tmp_path / "meshllm.sock")
    handler = type("Handler", (_Handler,), {"daemon": daemon})
    with _Server(str(daemon.socket), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield daemon
        server.shutdown()
        thread.join()


def _command(*arguments: str | bytes) -> list[str | bytes]:
    """The words that run `meshllm` of this checkout."""
    return [sys.executable, "-W", "error", "-m", "meshllm.cli.main", *arguments]


@pytest.fixture
def clean_environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which no daemon, configuration or key of the person who runs the tests is seen."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("MESHLLM_", "XDG_", "LC_", "LANG"))
    }
    return {
        **kept,
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "MESHLLM_CONFIG": str(tmp_path / "meshllm.toml"),
        "LC_ALL": "C.UTF-8",
    }


Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def meshllm(clean_environment: dict[str, str], tmp_path: Path) -> Run:
    """meshllm("ask", "x", environment={...}, input=b"...") -> the finished process."""
    (tmp_path / "meshllm.toml").touch()

    def run(
        *arguments: str | bytes, environment: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        if "input" not in options:
            options.setdefault("stdin", subprocess.DEVNULL)
        env = {**clean_environment, **(environment or {})}
        return subprocess.run(_command(*arguments), env=env, capture_output=True, timeout=60, check=False, **options)

    return run


@pytest.fixture
def imported(meshllm: Run) -> Callable[..., set[str]]:
    """imported("status", ...): the packages that the command imports, which is what its start-up costs."""

    def of(*arguments: str) -> set[str]:
        done = meshllm(*arguments, environment={"PYTHONPROFILEIMPORTTIME": "1"})
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stderr.decode().splitlines() if line.startswith("import time:")]
        return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}

    return of


@pytest.fixture
def start_meshllm(clean_environment: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """start_meshllm("ask", "x", stdout=...) -> the running process."""
    (tmp_path / "meshllm.toml").touch()

    def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(_command(*arguments), env=clean_environment, **options)

    return start
