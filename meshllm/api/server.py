"""The sockets of the API: a Unix socket, TCP where asked for, or what the service manager hands over; and serving them.

The Unix socket's permissions are the access control. Its file has its final mode and group before anything can
connect; a lock file beside it says whether its daemon lives: a dead one's socket is replaced, a living one's never.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import shutil
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import trio

from meshllm.api.app import make_app
from meshllm.api.connections import serve_connections
from meshllm.daemon.generation import Generator
from meshllm.errors import ConfigError
from meshllm.log import Logger

BACKLOG: Final = 128
MAX_PATH_BYTES: Final = 107  # of sun_path, without its zero
GRACE_S: Final = 2.0  # for open streams when stopping


@contextmanager
def open_sockets(
    path: Path, mode: int, group: str | None, tcp: tuple[str, int] | None, inherited: Sequence[socket.socket]
) -> Iterator[list[socket.socket]]:
    """Listening sockets. inherited: from the service manager, used instead of a Unix socket of our own.

    The socket file and its lock go at the end. Raises ConfigError that names the path or address.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(given) for given in inherited]
        if not sockets:
            sockets.append(stack.enter_context(_unix_socket(path, mode, group)))
        if tcp is not None:
            sockets.append(stack.enter_context(_tcp_socket(tcp)))
        yield sockets


async def serve(
    generator: Generator,
    sockets: Sequence[socket.socket],
    stopping: trio.Event,
    log: Logger,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until `stopping` is set and open streams have ended, at most GRACE_S after it."""
    host = socket.gethostname().partition(".")[0].lower()
    app = make_app(generator, log, (host, f"{host}.local"))
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in sockets]
    await serve_connections(app, listeners, stopping, GRACE_S, task_status=task_status)


def open_to_others(sockets: Sequence[socket.socket]) -> list[str]:
    """Addresses of those sockets that other machines may reach: all on TCP but those of loopback."""
    places = [made.getsockname() for made in sockets if made.family in (socket.AF_INET, socket.AF_INET6)]
    return [
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for host, port, *_ in places
        if not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    ]


@contextmanager
def _unix_socket(path: Path, mode: int, group: str | None) -> Iterator[socket.socket]:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"{path}: longer than the {MAX_PATH_BYTES} bytes of a Unix socket's path: choose a shorter --socket"
        )
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise _unusable(path, error) from None
    with lock, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _in_use(path) from None
        try:
            _remove_stale(path)
        except OSError as error:
            raise _unusable(path, error) from None
        try:
            try:
                _bind(made, path, mode, group)
            except OSError as error:
                raise _unusable(path, error) from None
            yield made
        finally:
            path.unlink(missing_ok=True)  # the lock file stays: removing it would let two daemons hold two locks


def _bind(made: socket.socket, path: Path, mode: int, group: str | None) -> None:
    """Nobody else may connect between bind and chmod: the file is born with no permission for others."""
    before = os.umask(0o177)
    try:
        made.bind(str(path))
    finally:
        os.umask(before)
    if group is not None:
        try:
            shutil.chown(path, group=group)
        except LookupError:
            raise ConfigError(f"--socket-group: no group {group} on this device: choose one of /etc/group") from None
    path.chmod(mode)
    made.listen(BACKLOG)


def _remove_stale(path: Path) -> None:
    """Removes the socket of a dead daemon. Raises ConfigError if something answers there, or it is no socket."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path}: exists and is no socket: choose another --socket, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise _in_use(path)


def _tcp_socket(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with ExitStack() as undo:
            made = undo.enter_context(socket.socket(kind, socket.SOCK_STREAM))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
            made.listen(BACKLOG)
            undo.pop_all()
    except OSError as error:
        raise ConfigError(f"tcp {host}:{port}: {error.strerror or error}: choose another address with --tcp") from None
    return made


def _in_use(path: Path) -> ConfigError:
    return ConfigError(f"{path}: a daemon serves this socket already: stop it, or choose another with --socket")


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be made ({error.strerror}): choose another place with --socket")
