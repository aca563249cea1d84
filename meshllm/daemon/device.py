"""Facts of this device that a daemon finds out at its start: who it is, how fast it is, how much memory it may give.

Speed is measured at the first few starts with a build, an instruction set and a number of threads, and the best is
kept in the state folder, so that later starts are quick. What the system does not tell is unknown, never zero.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from meshllm.engine.benchmark import measure_device
from meshllm.errors import ConfigError
from meshllm.kernels.binding import Kernels
from meshllm.kernels.cpu import free_memory, usable_memory
from meshllm.layout.layout import Device, NodeId

UNKNOWN_BYTES: Final = 1 << 50  # stands for memory that the system tells nothing of: no limit to a plan
SHARE_OF_FREE: Final = 0.8  # of free memory is given where nothing was configured
SHARE_OF_ALL: Final = 0.9  # of all memory at most
MEASUREMENTS: Final = 5  # at so many starts; a device that was busy at one is not taken for a slow one for ever
_ID = re.compile(r"[0-9a-f]{16}")


class _Speed(msgspec.Struct, frozen=True):
    """The best of the measurements so far; `of` says what was measured."""

    of: str
    read_gbps: float
    matmul_gops: float
    times: int  # it was measured


def load_node_id(state_dir: Path) -> NodeId:
    """This state folder's node id, made at its first use. Raises ConfigError if the folder cannot be written."""
    path = state_dir / "node-id"
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            text = path.read_text("ascii", "replace").strip()
        except FileNotFoundError:
            text = ""
        if not _ID.fullmatch(text):
            text = secrets.token_hex(8)
            _replace(path, text.encode("ascii") + b"\n")
    except OSError as error:
        where = error.filename or state_dir
        raise ConfigError(
            f"{where}: cannot be used ({error.strerror}); choose another folder with --state-dir"
        ) from None
    return NodeId(text)


def default_name() -> str:
    """The host's name, without what no terminal should show."""
    name = "".join(letter for letter in socket.gethostname() if letter.isprintable())
    return name.encode()[:100].decode("utf-8", "ignore") or "meshllm"


def describe_device(node: NodeId, kernels: Kernels, build: str, state_dir: Path, memory: int | None) -> Device:
    """What the planner may know of this device. Takes up to half a second the first time; nobody else may run
    kernels.
    """
    speed = _measure(kernels, f"{build} {kernels.isa} {kernels.n_threads} threads", state_dir / "speed.json")
    return Device(
        node=node,
        read_gbps=speed.read_gbps,
        matmul_gops=speed.matmul_gops,
        usable_bytes=memory or usable_bytes(usable_memory(), free_memory()),
    )


def usable_bytes(total: int | None, free: int | None) -> int:
    """Memory to give where nothing was configured: most of what is free. Unknown is no limit."""
    limits = [int(total * SHARE_OF_ALL)] if total else []
    limits += [int(free * SHARE_OF_FREE)] if free else []
    return min(limits, default=UNKNOWN_BYTES)


def free_bytes() -> int:
    """Free memory as of now; UNKNOWN_BYTES if the system does not tell."""
    free = free_memory()
    return UNKNOWN_BYTES if free is None else free


def _measure(kernels: Kernels, of: str, cache: Path) -> _Speed:
    try:
        kept = msgspec.json.decode(cache.read_bytes(), type=_Speed)
    except (OSError, msgspec.MsgspecError):
        kept = _Speed(of, 0.0, 0.0, 0)
    if kept.of != of:
        kept = _Speed(of, 0.0, 0.0, 0)
    if kept.times >= MEASUREMENTS:
        return kept
    read_gbps, matmul_gops = measure_device(kernels)
    speed = _Speed(of, max(read_gbps, kept.read_gbps), max(matmul_gops, kept.matmul_gops), kept.times + 1)
    try:
        _replace(cache, msgspec.json.encode(speed))
    except OSError:
        return speed  # a full disk does not keep a daemon from starting
    return speed


def prefers_aes() -> bool:
    """Whether AES-GCM is the faster cipher here: it is where the CPU has AES instructions. Measured, about 2 ms."""
    body, nonce, key = bytes(1 << 16), bytes(12), bytes(32)
    seconds: list[float] = []
    for cipher in (AESGCM(key), ChaCha20Poly1305(key)):
        times = []
        for _ in range(4):
            start = time.perf_counter()
            cipher.encrypt(nonce, body, None)
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    return seconds[0] <= seconds[1]


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
