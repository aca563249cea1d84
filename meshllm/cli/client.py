"""HTTP over the daemon's Unix socket, with the standard library: 34 ms of start-up where httpx takes 110.

Answers are checked as untrusted input; the API's error objects become the error tree again, so that a command exits
with the right code. Leaving a stream closes its connection, which stops the generation.
"""

from __future__ import annotations

import http.client
import json
import socket
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from meshllm import errors

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 30.0  # for what the daemon answers at once; a generation has no limit
MAX_LINE = 16 << 20  # one event of a stream
MAX_ANSWER = 64 << 20

_ERRORS: dict[str, type[errors.MeshLLMError]] = {
    error.code: error
    for error in (
        errors.InvalidRequestError,
        errors.ContextLengthError,
        errors.NoModelError,
        errors.ModelFileError,
        errors.UnavailableError,
    )
}


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("meshllm", timeout=CONNECT_TIMEOUT_S)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_TIMEOUT_S)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self._timeout_s)


class DaemonClient:
    """Talks to the first daemon that answers on one of `sockets`."""

    def __init__(self, sockets: Sequence[Path]) -> None:
        self._sockets = tuple(sockets)

    def get(self, path: str) -> bytes:
        """The body of a successful answer. NoDaemonError, or the error that the daemon names."""
        with self._answer("GET", path, None, ANSWER_TIMEOUT_S) as answer:
            return answer.read(MAX_ANSWER)

    def post(self, path: str, body: Mapping[str, Json]) -> Json:
        """The decoded JSON of a successful answer, however long it takes."""
        with self._answer("POST", path, body, None) as answer:
            decoded: Json = json.loads(answer.read(MAX_ANSWER))
            return decoded

    def stream(self, path: str, body: Mapping[str, Json]) -> Generator[dict[str, Json], None, None]:
        """The JSON object of each event until the stream ends; an error in it is raised."""
        with self._answer("POST", path, body, None) as answer:
            for event in _events(answer):
                if "error" in event:
                    raise _error_of(event, 500)
                yield event

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Json] | None, timeout_s: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect(timeout_s)
        try:
            content = None if body is None else json.dumps(body).encode("ascii")
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise _error_of(_object_of(answer.read(MAX_ANSWER)), answer.status)
            yield answer
        except TimeoutError:
            raise errors.NoDaemonError(f"the daemon did not answer {path} within {timeout_s:g} s") from None
        except (http.client.HTTPException, ConnectionError, json.JSONDecodeError) as error:
            what = "broke off" if isinstance(error, ConnectionError | http.client.IncompleteRead) else "is not HTTP"
            raise errors.NoDaemonError(f"the daemon's answer {what}; is it still running? (meshllm status)") from None
        finally:
            connection.close()

    def _connect(self, timeout_s: float | None) -> _UnixConnection:
        """An open connection to the first socket that takes one; NoDaemonError says what each lacked."""
        refused: list[str] = []
        for path in self._sockets:
            connection = _UnixConnection(path, timeout_s)
            try:
                connection.connect()
                return connection
            except PermissionError:
                connection.close()
                raise errors.NoDaemonError(_no_permission(path)) from None
            except OSError as error:
                connection.close()
                refused.append(f"{path}: {_why(error)}")
        raise errors.NoDaemonError(
            f"no daemon answers ({'; '.join(refused)}); start one with: meshllm daemon, or name its socket: --socket"
        )


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such socket"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))


def _no_permission(path: Path) -> str:
    try:
        group, may_write = path.group(), path.stat().st_mode & stat.S_IWGRP
    except (OSError, KeyError):
        group, may_write = "root", 0
    if group == "root" or not may_write:  # nobody should join that group for this
        return f"{path}: no permission; use sudo, or start the daemon with --socket-group GROUP, one of yours"
    return f"{path}: no permission; join its group (sudo usermod -aG {group} $USER, then log in again) or use sudo"


def _object_of(content: bytes) -> dict[str, Json]:
    try:
        decoded = json.loads(content)
    except ValueError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _error_of(answer: Mapping[str, Json], status: int) -> errors.MeshLLMError:
    """The error that an OpenAI-shaped error object stands for."""
    detail = answer.get("error")
    fields = detail if isinstance(detail, dict) else {}
    message = fields.get("message") or f"the daemon answered with HTTP status {status}"
    kind = _ERRORS.get(str(fields.get("code")), errors.MeshLLMError)
    if kind is errors.MeshLLMError and status == 404 and fields.get("param") == "model":
        kind = errors.NoModelError
    return kind(str(message))


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Json]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    while line := answer.readline(MAX_LINE):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event
    raise errors.NoDaemonError("the daemon's answer broke off; is it still running? (meshllm status)")
