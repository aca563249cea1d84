"""What can be set, and how each value is read from text or TOML: the one list of settings.

Commands make their flags of `SETTINGS`; config/meshllm.toml is compared with it by a test. A reader raises ValueError
that says what it expected; whoever calls it knows where the value came from (config.py). Reads no file and no
environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from meshllm.addresses import split_address

DEFAULT_PORT = 6374  # "MESH" on a telephone's keys; nothing is registered there
PORT_TRIES = 16  # ports after the default one that are tried where none was asked for
MAX_CONTEXT = 1 << 20
MAX_SLOTS = 64
MAX_THREADS = 256
MAX_PEERS = 64

LayoutMode = Literal["auto", "all"] | int


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set. `read` takes text or a TOML value to what Config holds, or raises ValueError."""

    name: str  # key in TOML and field of Config
    metavar: str
    help: str
    read: Callable[[object], object]
    flag: str = ""
    repeatable: bool = False

    @property
    def option(self) -> str:
        """The flag of `meshllm daemon`."""
        return self.flag or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable; several values are separated by commas."""
        return "MESHLLM_" + self.name.upper()


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected text")
    return value.strip()


def _optional_text(value: object) -> str | None:
    return None if value == "" else _text(value)


def _any_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value.strip()


def _path(value: object) -> Path:
    return Path(_text(value)).expanduser().absolute()


def _texts(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ValueError('expected a list of texts, like ["a", "b"]')
    if value is parts and not all(part.strip() for part in parts):  # in a variable's text nothing is no item
        raise ValueError("expected text")
    return tuple(part.strip() for part in parts if part.strip())


def _number(low: int, high: int, *, zero: Literal["refused", "none"] = "refused") -> Callable[[object], int | None]:
    def read(value: object) -> int | None:
        if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,12}\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("expected a whole number")
        if value == 0 and zero == "none":
            return None
        if not low <= value <= high:
            raise ValueError(f"expected {low} to {high}")
        return value

    return read


def _choice(*allowed: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError("expected " + ", ".join(f'"{choice}"' for choice in allowed))
        return value

    return read


def _layout(value: object) -> LayoutMode:
    if value in ("auto", "all"):
        return cast(LayoutMode, value)
    try:
        return cast(int, _number(1, MAX_PEERS)(value))
    except ValueError:
        raise ValueError(f'expected "auto", "all" or a number of ranks, 1 to {MAX_PEERS}') from None


def _mode(value: object) -> int:
    text = f"{value:o}" if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(r"(0o)?[0-7]{3,4}", text):
        raise ValueError('expected an octal mode, like "0660"')
    mode = int(text.removeprefix("0o"), 8)
    if mode & ~0o777 or mode & 0o111 or mode & 0o600 != 0o600:
        raise ValueError('expected read and write for the owner and no execution, like "0660"')
    return mode


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def read_bytes(value: object) -> int | None:
    """Bytes of "6G", "512M" (powers of 1024), a number, or None for 0 or "auto". ValueError otherwise."""
    if value in (0, "", "auto", "0"):
        return None
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?)\s*([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or found is None:
        raise ValueError('expected bytes, like "6G" or "512M"')
    size = int(float(found[1]) * _UNITS[found[2].upper()])
    if not 64 << 20 <= size <= 1 << 50:
        raise ValueError("expected at least 64M")
    return size


def _address(value: object) -> str | None:
    if value == "":
        return None
    split_address(_text(value))
    return _text(value)


class ItemError(ValueError):
    """One item of a list cannot be: it is to be shown, not the list."""

    def __init__(self, expected: str, item: str) -> None:
        super().__init__(expected)
        self.item = item


def _addresses(value: object) -> tuple[str, ...]:
    addresses = _texts(value)
    if len(addresses) > MAX_PEERS:
        raise ValueError(f"expected at most {MAX_PEERS} addresses")
    for address in addresses:
        try:
            split_address(address, default_port=DEFAULT_PORT)
        except ValueError as error:
            raise ItemError(str(error), address) from None
    return addresses


def _patterns(value: object) -> tuple[str, ...]:
    patterns = _texts(value)
    for pattern in patterns:
        if not re.fullmatch(r"!?[^\s/!]{1,40}", pattern):
            raise ItemError('expected patterns of interface names, like "eth*" or "!wlan0"', pattern)
    return patterns


def _name(value: object) -> str | None:
    text = _optional_text(value)
    if text is not None and (len(text.encode()) > 200 or not text.isprintable()):
        raise ValueError("expected at most 200 bytes of printable text")
    return text


SETTINGS: tuple[Setting, ...] = (
    Setting("name", "NAME", "name shown to people; the host's name if not given", _name),
    Setting("state_dir", "DIR", "models, identity and caches of this daemon", _path),
    Setting("key_file", "FILE", "file with the mesh secret; made at the first start if missing", _path),
    Setting("socket", "PATH", "Unix socket of the local API", _path),
    Setting("socket_mode", "MODE", "access mode of the socket, octal", _mode),
    Setting("socket_group", "GROUP", "group that owns the socket", _optional_text),
    Setting("tcp", "HOST:PORT", "serve the API on TCP too (no authentication: keep it on 127.0.0.1)", _address),
    Setting(
        "port",
        "PORT",
        f"port for peers; {DEFAULT_PORT} or the next free one if 0 or not given",
        _number(1, 65535, zero="none"),
    ),
    Setting(
        "peers", "ADDR", "address of a peer, for networks without multicast; repeatable", _addresses, "--peer", True
    ),
    Setting(
        "interfaces",
        "PATTERN",
        "network interfaces to use, like eth*, or !wlan0 to leave one out; repeatable",
        _patterns,
        "--interface",
        True,
    ),
    Setting(
        "threads", "N", "threads that compute; the usable CPUs if 0 or not given", _number(1, MAX_THREADS, zero="none")
    ),
    Setting("memory", "SIZE", "memory this device gives, like 6G; most of what is free if not given", read_bytes),
    Setting("model", "MODEL", "name or file of the model; the only or last pulled one if not given", _optional_text),
    Setting("context", "N", "positions of a sequence, at most the model's own", _number(16, MAX_CONTEXT)),
    Setting("slots", "N", "sequences answered at once", _number(1, MAX_SLOTS)),
    Setting("layout", "auto|all|N", "devices that share the model: the planner's choice, all, or exactly N", _layout),
    Setting("exchange", "q8_0|f16|f32", "precision of partial sums between devices", _choice("q8_0", "f16", "f32")),
    Setting("isa", "ISA", "instruction set of the kernels; the best that runs here if not given", _any_text),
    Setting("log_format", "console|json", "how log lines are written to stderr", _choice("console", "json")),
    Setting("log_level", "LEVEL", "least severe event that is logged", _choice("debug", "info", "warning", "error")),
)
