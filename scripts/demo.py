"""`make demo`: two daemons on this machine find each other, share the default model and answer a prompt together.

Uses the command `meshllm` as anyone would. All it makes is under .demo/; a second run reuses the model. What it starts
it stops, by process id, also when interrupted or when something fails; then it says what failed, in one line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from meshllm.cli.client import DaemonClient
from meshllm.daemon.model_store import ModelStore
from meshllm.errors import MeshLLMError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".demo"
MESHLLM = str(Path(sys.executable).parent / "meshllm")
NAMES = ("kitchen", "attic")
MODEL = "smollm2"
PROMPT = "Explain in two sentences why the sky is blue."
MAX_TOKENS = 96
LAYOUT_TIMEOUT_S = 120
STOP_TIMEOUT_S = 12
MAX_SOCKET_PATH = 107  # bytes, sun_path


class DemoError(Exception):
    """What went wrong, in one line."""


def main() -> int:
    """Runs the demo; the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    try:
        _say(f"Getting the model ({MODEL}, 98 MB, kept in {FOLDER.relative_to(ROOT)}/)")
        _prepare()
        _say(f"Starting two daemons: {' and '.join(NAMES)}, one thread each, one mesh secret; they meet through mDNS")
        for name in NAMES:
            daemons[name] = _start(name)
        _wait_for_layout(daemons)
        _show("status")
        _say(f'meshllm ask "{PROMPT}"')
        _show("ask", PROMPT, "--max-tokens", str(MAX_TOKENS))
        _say("Done. Next: meshllm daemon on each of your devices (README.md, section Install).")
        return 0
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        _stop(daemons)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}{line}{plain}", flush=True)


def _environment() -> dict[str, str]:
    """Without what a person has set for daemons of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MESHLLM_")}
    return {**kept, "MESHLLM_CONFIG": str(FOLDER / "meshllm.toml")}


def _run(*words: str) -> str:
    """What a command prints on stdout; DemoError with its own words if it fails."""
    done = subprocess.run([MESHLLM, *words], env=_environment(), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise DemoError(f"meshllm {words[0]} failed (exit {done.returncode}); see above")
    return done.stdout


def _show(command: str, *words: str) -> None:
    """Runs a command against the first daemon, with what it prints shown."""
    sys.stdout.flush()
    full = [MESHLLM, command, "--socket", _socket(NAMES[0]), *words]
    if subprocess.run(full, env=_environment(), stdin=subprocess.DEVNULL, check=False).returncode:
        raise DemoError(f"meshllm {command} failed; logs are in {FOLDER.relative_to(ROOT)}/*/log")


def _socket(name: str) -> str:
    path = FOLDER / name / "meshllm.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:  # checkouts may lie deep
        path = Path(tempfile.gettempdir()) / f"meshllm-demo-{os.getuid()}" / f"{name}.sock"
        path.parent.mkdir(mode=0o700, exist_ok=True)
    return str(path)


def _prepare() -> None:
    """Makes the state folders and the secret, and gets the model."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "meshllm.toml").touch()
    for name in NAMES:
        (FOLDER / name).mkdir(exist_ok=True)
    secret = FOLDER / "mesh-key"
    if not secret.exists():
        _run("key", "new", "--key-file", str(secret))
    first, *others = (ModelStore(FOLDER / name) for name in NAMES)
    if not _has_model(first):
        _run("pull", MODEL, "--state-dir", str(FOLDER / NAMES[0]))
    path = first.resolve(MODEL).path
    for name, store in zip(NAMES[1:], others, strict=True):
        if not _has_model(store):
            _run("pull", str(path), "--name", MODEL, "--state-dir", str(FOLDER / name))


def _has_model(store: ModelStore) -> bool:
    try:
        return store.resolve(MODEL).path.exists()
    except MeshLLMError:
        return False


def _start(name: str) -> subprocess.Popen[bytes]:
    folder = FOLDER / name
    words = [MESHLLM, "daemon", "--name", name, "--state-dir", str(folder), "--key-file", str(FOLDER / "mesh-key")]
    words += ["--socket", _socket(name), "--port", str(_free_port()), "--threads", "1"]
    words += ["--layout", "all", "--model", MODEL]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(words, env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _wait_for_layout(daemons: dict[str, subprocess.Popen[bytes]]) -> None:
    """Until every daemon serves one layout of all of them."""
    end, said = time.monotonic() + LAYOUT_TIMEOUT_S, ""
    while time.monotonic() < end:
        for name, process in daemons.items():
            if process.poll() is not None:
                last = (FOLDER / name / "log").read_text("utf-8", "replace").strip().splitlines()[-1:]
                raise DemoError(f"the daemon {name} ended with {process.returncode}: {''.join(last)}")
        statuses = [_status(name) for name in daemons]
        layouts = {str(status.get("layout") and status["layout"]["epoch"]) for status in statuses}
        if len(layouts) == 1 and all(_serves(status, len(daemons)) for status in statuses):
            return
        now = "; ".join(
            f"{name}: {status.get('state', 'starting')}" for name, status in zip(daemons, statuses, strict=True)
        )
        if now != said:
            print(f"  {now}", flush=True)
            said = now
        time.sleep(0.1)
    details = [f"{name}: {_status(name).get('detail') or 'no answer'}" for name in daemons]
    raise DemoError(
        f"no layout of both daemons within {LAYOUT_TIMEOUT_S} s ({'; '.join(details)}); does multicast work here?"
    )


def _status(name: str) -> dict[str, Any]:
    """What a daemon says of itself; {} if it does not answer yet."""
    try:
        status = json.loads(DaemonClient((Path(_socket(name)),)).get("/status"))
    except MeshLLMError:
        return {}
    return status if isinstance(status, dict) else {}


def _serves(status: dict[str, Any], n: int) -> bool:
    return status.get("state") == "serving" and len((status.get("layout") or {}).get("ranks", ())) == n


def _stop(daemons: dict[str, subprocess.Popen[bytes]]) -> None:
    """Ends what was started, politely, then not."""
    for process in daemons.values():
        if process.poll() is None:
            process.terminate()
    for process in daemons.values():
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
