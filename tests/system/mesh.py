"""Real daemons for tests: processes on this machine, or each in a network namespace of its own on one bridge.

    with Mesh(folder) as mesh:
        kitchen = mesh.start("kitchen", model=path)
        mesh.wait(lambda status: len(status.layout.ranks) == 2, kitchen)

A daemon's log is shown when a test that used it fails. What a Mesh started it stops, by its own process handle.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from meshllm.cli.client import DaemonClient
from meshllm.errors import MeshLLMError, NoDaemonError
from meshllm.net.identity import MeshSecret
from meshllm.status import Status

START_TIMEOUT_S = 60.0  # two cores, and maybe a compiler beside us
STOP_TIMEOUT_S = 15.0
POLL_S = 0.05


def free_port() -> int:
    """A TCP port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Daemon:
    """One running daemon."""

    name: str
    folder: Path
    port: int
    words: list[str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.run()

    def run(self) -> None:
        """Starts the process (again, after it has ended)."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def socket(self) -> Path:
        """Of its local API."""
        return self.folder / "s"

    @property
    def client(self) -> DaemonClient:
        return DaemonClient((self.socket,))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8", "replace")

    def status(self) -> Status:
        """What it says of itself; NoDaemonError if it does not answer."""
        return msgspec.json.decode(self.client.get("/status"), type=Status)

    def complete(self, prompt: Sequence[int] | str, n: int, **fields: Any) -> dict[str, Any]:
        """The choice of a greedy completion of n tokens."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": n, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True, **fields}  # fmt: skip
        answer = self.client.post("/v1/completions", body)
        assert isinstance(answer, dict)
        (choice,) = answer["choices"]  # type: ignore[misc,union-attr]
        return choice  # type: ignore[no-any-return]

    def signal(self, number: signal.Signals) -> None:
        """To this process alone."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """As a power cut: SIGKILL."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """Ends it politely and returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end within {STOP_TIMEOUT_S} s of SIGTERM\n{self.log}") from None


class Mesh:
    """Daemons that share one secret, and what is needed to end them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = MeshSecret.generate()
        self.daemons: dict[str, Daemon] = {}

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for daemon in self.daemons.values():
            if daemon.process.poll() is None:
                daemon.signal(signal.SIGCONT)
                daemon.process.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
        if kind is not None:
            for daemon in self.daemons.values():
                print(f"--- log of {daemon.name}\n{daemon.log[-6000:]}", file=sys.stderr)

    def start(
        self,
        name: str,
        *flags: str,
        model: Path | None,
        host: str | None = None,
        secret: MeshSecret | None = None,
        layout: str = "all",
        threads: int = 1,
        wait: bool = True,
        program: Sequence[str] = ("-m", "meshllm.cli.main"),
    ) -> Daemon:
        """Starts a daemon, in the network namespace `host` if given, and waits until its API answers."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "mesh-key").write_text((secret or self.secret).to_text() + "\n")
        (folder / "mesh-key").chmod(0o600)
        port = free_port()
        words = [sys.executable, *program, "daemon", "--name", name, "--state-dir", str(folder)]
        words += ["--socket", str(folder / "s"), "--port", str(port), "--layout", layout, "--threads", str(threads)]
        words += [] if model is None else ["--model", str(model)]
        daemon = Daemon(name, folder, port, run_in(host, [*words, *flags]), self._environment())
        self.daemons[name] = daemon
        if wait:
            self.wait(lambda status: True, daemon)
        return daemon

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MESHLLM_", "XDG_"))}
        empty = self.folder / "empty.toml"
        empty.touch()
        return {**kept, "HOME": str(self.folder), "MESHLLM_CONFIG": str(empty)}

    def wait(
        self, holds: Callable[[Status], object], *daemons: Daemon, within_s: float = START_TIMEOUT_S
    ) -> list[Status]:
        """Waits until `holds` is true of the status of each daemon and returns the statuses."""
        end = time.monotonic() + within_s
        last: object = None
        while time.monotonic() < end:
            try:
                statuses = [daemon.status() for daemon in daemons]
                if all(holds(status) for status in statuses):
                    return statuses
                last = statuses
            except NoDaemonError as error:
                last = error
                dead = [daemon for daemon in daemons if daemon.process.poll() is not None]
                assert not dead, f"{dead[0].name} has ended with {dead[0].process.returncode}:\n{dead[0].log}"
            time.sleep(POLL_S)
        raise AssertionError(f"not within {within_s:g} s; last: {last}")

    def wait_ranks(self, n: int, *daemons: Daemon, within_s: float = START_TIMEOUT_S) -> list[Status]:
        """Waits until each daemon serves one and the same layout of n ranks."""
        end = time.monotonic() + within_s
        while True:
            statuses = self.wait(lambda status: serves(status, n), *daemons, within_s=end - time.monotonic())
            if len({(status.layout.epoch, status.layout.driver) for status in statuses if status.layout}) == 1:
                return statuses


def run_in(host: str | None, words: Sequence[str]) -> list[str]:
    """The command as it runs in the network namespace `host`; as it is where that is None."""
    return [*([] if host is None else ["ip", "netns", "exec", host]), *words]


def serves(status: Status, n: int) -> bool:
    """Whether it serves a layout of n ranks."""
    return status.state == "serving" and status.layout is not None and len(status.layout.ranks) == n


def error_of(call: Callable[[], object]) -> MeshLLMError:
    """The error that a call ends with."""
    try:
        result = call()
    except MeshLLMError as error:
        return error
    raise AssertionError(f"no error but {result}")


@contextmanager
def bridged_hosts(n: int) -> Any:
    """Names of n network namespaces, each with eth0 (10.77.0.x) on one bridge: n computers on a switch. Root only."""
    tag = f"mt{os.getpid() % 100000}"
    switch, hosts = f"{tag}sw", [f"{tag}h{i}" for i in range(n)]
    with ExitStack() as stack:
        for name in (switch, *hosts):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        _ip("-n", switch, "link", "set", "br0", "up")
        for i, host in enumerate(hosts):
            _ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", f"p{i}", "netns", switch)
            _ip("-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            _ip("-n", host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
        yield hosts


def set_link(host: str, state: str) -> None:
    """Plugs the cable of a namespace in ("up") or out ("down")."""
    _ip("-n", host, "link", "set", "eth0", state)


def why_no_namespaces() -> str | None:
    """Why bridged_hosts cannot work here; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with bridged_hosts(1):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces do not work here: {getattr(error, 'stderr', b'') or error}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
