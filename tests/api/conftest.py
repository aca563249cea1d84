"""One real daemon with the real model for all API tests, and a client that shows every byte of an answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.system.mesh import Daemon, Mesh, free_port

CONTEXT = 256


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The JSON of each event; the stream is nothing but `data:` lines, and ends with [DONE]."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]


class UnixClient(http.client.HTTPConnection):
    """HTTP on the daemon's socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("meshllm", timeout=60)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self.path))


class Api:
    """Requests to one daemon."""

    def __init__(self, daemon: Daemon, tcp_port: int) -> None:
        self.daemon = daemon
        self.tcp_port = tcp_port  # of the same API

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        client = UnixClient(self.daemon.socket)
        try:
            client.request(method, path, body, headers or {"Content-Type": "application/json"})
            got = client.getresponse()
            return Answer(got.status, got.read(), {k.lower(): v for k, v in got.getheaders()})
        finally:
            client.close()

    def post(self, path: str, **fields: Any) -> Answer:
        return self.request("POST", path, json.dumps(fields).encode())

    def chat(self, text: str = "Name one red fruit.", **fields: Any) -> Answer:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8, **fields}
        return self.post("/v1/chat/completions", **body)

    def complete(self, prompt: object = "The sky is", **fields: Any) -> Answer:
        return self.post("/v1/completions", **{"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})

    def raw(self, data: bytes, *, timeout_s: float = 30) -> bytes:
        """Bytes as they are, and all that comes back until the daemon closes, resets or falls silent."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(self.daemon.socket))
            got = b""
            with contextlib.suppress(ConnectionError):  # it may close before it has read all
                sock.sendall(data)
            try:
                while part := sock.recv(1 << 16):
                    got += part
            except (TimeoutError, ConnectionError):
                pass
            return got

    def wait_idle(self, within_s: float = 5) -> None:
        """Until no request runs."""
        deadline = time.monotonic() + within_s
        while self.request("GET", "/status").json["requests"]["active"]:
            assert time.monotonic() < deadline, "the generation goes on without its reader"


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Api]:
    """One daemon that serves alone."""
    with Mesh(tmp_path_factory.mktemp("api")) as mesh:
        port = free_port()
        flags = ("--context", str(CONTEXT), "--interface", "lo", "--tcp", f"127.0.0.1:{port}")
        daemon = mesh.start("solo", *flags, model=smollm2_path)
        mesh.wait_ranks(1, daemon)
        yield Api(daemon, port)


@pytest.fixture(autouse=True)
def _daemon_lives_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, the daemon must still answer."""
    yield
    if "api" in request.fixturenames:
        api = request.getfixturevalue("api")
        assert api.daemon.process.poll() is None
        assert api.request("GET", "/health").status == 200
