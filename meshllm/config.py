"""Configuration: flags over MESHLLM_* variables over one TOML file over defaults, read once into a frozen Config.

A fault is a ConfigError that names where the value came from (file and line, variable or flag) and, for a key that is
not there, the nearest that is. What can be set is in settings.py. Nothing here reads the environment by itself: the
caller passes it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from meshllm.errors import ConfigError
from meshllm.settings import SETTINGS, ItemError, LayoutMode, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a daemon was asked to be. None: found out at start, or not wanted."""

    name: str | None = None  # shown to people; the host's name if None
    state_dir: Path
    key_file: Path
    socket: Path
    socket_mode: int = 0o660
    socket_group: str | None = None
    tcp: str | None = None  # host:port on which the API is served too
    port: int | None = None  # None: DEFAULT_PORT or the next free one after it
    peers: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    threads: int | None = None
    memory: int | None = None  # bytes
    model: str | None = None
    context: int = 4096
    slots: int = 4
    layout: LayoutMode = "auto"
    exchange: Literal["q8_0", "f16", "f32"] = "f16"
    isa: str = ""
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


_BY_NAME = {setting.name: setting for setting in SETTINGS}


def load_config(
    flags: Mapping[str, str | Sequence[str] | None],
    environment: Mapping[str, str],
    *,
    config_file: Path | None = None,
    uid: int | None = None,
) -> Config:
    """The configuration of a daemon.

    flags: by Setting.name, text as written on the command line, None or () where not given. config_file: of --config;
    else MESHLLM_CONFIG, else the default place, which may be absent. Raises ConfigError.
    """
    root = os.geteuid() if uid is None else uid
    values: dict[str, object] = {}
    explicit = config_file or (Path(environment["MESHLLM_CONFIG"]) if environment.get("MESHLLM_CONFIG") else None)
    values.update(_from_file(explicit or default_config_file(environment, root), required=explicit is not None))
    values.update(_from_environment(environment))
    values.update(_from_flags(flags))
    return _with_defaults(values, environment, root)


def _read(setting: Setting, value: object, where: str) -> object:
    try:
        return setting.read(value)
    except ValueError as error:
        found = error.item if isinstance(error, ItemError) else value
        raise ConfigError(f"{where}: {error}, found {_shown(found)}") from None


def _shown(value: object) -> str:
    if isinstance(value, tuple | list) and len(value) == 1:  # of a repeatable flag
        return _shown(value[0])
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 60 else text[:57] + '..."'


def _from_flags(flags: Mapping[str, str | Sequence[str] | None]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in flags.items():
        if value is not None and value != ():
            setting = _BY_NAME[name]
            values[name] = _read(setting, value, setting.option)
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    _refuse_slips(environment)
    known = {setting.variable: setting for setting in SETTINGS}
    return {
        known[variable].name: _read(known[variable], text, variable)
        for variable, text in sorted(environment.items())
        if variable in known
    }


def _refuse_slips(environment: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable that is one slip away from one of ours. Others are those of tests and tools."""
    known = ["MESHLLM_CONFIG", *(setting.variable for setting in SETTINGS)]
    for variable in sorted(environment):
        if variable.upper().startswith("MESHLLM") and variable not in known:
            near = _nearest(variable.upper(), known, cutoff=0.85)
            if near:
                raise ConfigError(f'{variable}: unknown variable; did you mean "{near}"?')


def _nearest(word: str, known: Iterable[str], cutoff: float) -> str | None:
    import difflib  # only where there is a fault: it costs a command's start some milliseconds

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def _from_file(path: Path, *, required: bool) -> dict[str, object]:
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path}: no such configuration file") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 at byte {error.start}") from None
    return parse_toml(text, str(path))


def parse_toml(text: str, file: str) -> dict[str, object]:
    """Values by Setting.name of a file's text; `file` is its name for messages. Raises ConfigError with file and
    line.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1  # else it says "at end of document"
        content = "".join(text.splitlines()[line - 1 : line]).strip()
        raise ConfigError(f"{file}:{line}: {str(error).partition(' (at ')[0]}, found {_shown(content)}") from None
    values: dict[str, object] = {}
    for key, value in document.items():
        where = f"{file}:{_line_of(text, key)}: {key}"
        setting = _BY_NAME.get(key)
        if setting is None:
            if isinstance(value, dict):
                raise ConfigError(f"{where}: unknown table; all keys stand at the top, without one")
            near = _nearest(key.replace("-", "_"), _BY_NAME, cutoff=0.5)
            hint = f'; did you mean "{near}"?' if near else "; known keys are in config/meshllm.toml"
            raise ConfigError(f"{where}: unknown key{hint}")
        values[key] = _read(setting, value, where)
    return values


def _line_of(text: str, key: str) -> int:
    """The line on which a top-level key or table stands."""
    pattern = re.compile(rf"""^\s*\[{{0,2}}\s*["']?{re.escape(key)}["']?\s*[\].=]""")
    return next((n for n, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)


# --- defaults that depend on who runs it ------------------------------------------------------------------------------


def is_system(environment: Mapping[str, str], uid: int) -> bool:
    """Whether this is the device's daemon (of root, or of systemd with a state folder), not a user's own."""
    return uid == 0 or "STATE_DIRECTORY" in environment


def default_config_file(environment: Mapping[str, str], uid: int) -> Path:
    """/etc/meshllm/meshllm.toml, or ~/.config/meshllm/meshllm.toml for a user's own daemon."""
    if is_system(environment, uid):
        return Path(environment.get("CONFIGURATION_DIRECTORY", "/etc/meshllm").split(":")[0]) / "meshllm.toml"
    return Path(environment.get("XDG_CONFIG_HOME") or Path(_home(environment)) / ".config") / "meshllm" / "meshllm.toml"


def default_state_dir(environment: Mapping[str, str], uid: int) -> Path:
    """/var/lib/meshllm, or $XDG_STATE_HOME/meshllm."""
    if is_system(environment, uid):
        return Path(environment.get("STATE_DIRECTORY", "/var/lib/meshllm").split(":")[0])
    return Path(environment.get("XDG_STATE_HOME") or Path(_home(environment)) / ".local" / "state") / "meshllm"


def default_socket(environment: Mapping[str, str], uid: int) -> Path:
    """/run/meshllm/meshllm.sock, or $XDG_RUNTIME_DIR/meshllm/meshllm.sock, or in the state folder if that is unset."""
    if is_system(environment, uid):
        return Path(environment.get("RUNTIME_DIRECTORY", "/run/meshllm").split(":")[0]) / "meshllm.sock"
    runtime = environment.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "meshllm" if runtime else default_state_dir(environment, uid)) / "meshllm.sock"


def client_sockets(environment: Mapping[str, str], uid: int | None = None) -> tuple[Path, ...]:
    """Where a command looks for the daemon: MESHLLM_SOCKET alone if set, else that of MESHLLM_STATE_DIR, else the
    user's own, then the system's.

    Raises ConfigError for a variable that is nearly one of ours: the answer would be another daemon's.
    """
    _refuse_slips(environment)
    if environment.get("MESHLLM_SOCKET"):
        return (Path(environment["MESHLLM_SOCKET"]).expanduser().absolute(),)
    if environment.get("MESHLLM_STATE_DIR"):  # as a daemon with this variable
        return (Path(environment["MESHLLM_STATE_DIR"]).expanduser().absolute() / "meshllm.sock",)
    own = default_socket(environment, os.geteuid() if uid is None else uid)
    return tuple(dict.fromkeys((own, Path("/run/meshllm/meshllm.sock"))))


def _home(environment: Mapping[str, str]) -> str:
    return environment.get("HOME") or os.path.expanduser("~")


def _with_defaults(values: dict[str, object], environment: Mapping[str, str], uid: int) -> Config:
    state_dir = cast(Path, values.setdefault("state_dir", default_state_dir(environment, uid)))
    moved = state_dir != default_state_dir(
        environment, uid
    )  # a second daemon of this user keeps all it has in its own folder
    values.setdefault("socket", state_dir / "meshllm.sock" if moved else default_socket(environment, uid))
    values.setdefault("socket_mode", 0o660 if is_system(environment, uid) else 0o600)
    credential = Path(environment.get("CREDENTIALS_DIRECTORY", "")) / "mesh-key"
    has_credential = "CREDENTIALS_DIRECTORY" in environment and credential.exists()
    values.setdefault("key_file", credential if has_credential else state_dir / "mesh-key")
    return Config(**values)  # type: ignore[arg-type]  # each value was read by the Setting of its field
