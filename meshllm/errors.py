"""The one tree of errors. The class says whose fault it is, and what a command or the API answers.

A message names the thing, what was found, what was expected and what to do, in one line. A leaf: imports nothing of
ours.
"""

from __future__ import annotations

from typing import ClassVar


class MeshLLMError(Exception):
    """Base of all errors that a user may see. `exit_code` is a command's, `http_status` and `code` the API's."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    @property
    def param(self) -> str | None:
        """The request's field at fault, for the API's error object."""
        return None


class UsageError(MeshLLMError):
    """A command was called wrongly."""

    exit_code = 2
    http_status = 400
    code = "usage"


class ConfigError(UsageError):
    """A flag, variable or configuration file holds something that cannot be; names the file and key."""

    code = "config"


class InvalidRequestError(MeshLLMError):
    """A request that can never be answered as it stands (HTTP 400)."""

    http_status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self._param = param

    @property
    def param(self) -> str | None:
        return self._param


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit the context (HTTP 400, code context_length_exceeded)."""

    code = "context_length_exceeded"


class NoDaemonError(MeshLLMError):
    """No daemon answers on the socket, or it may not be used."""

    exit_code = 3
    http_status = 503
    code = "no_daemon"


class NoModelError(MeshLLMError):
    """No model of that name here (HTTP 404, code model_not_found)."""

    exit_code = 4
    http_status = 404
    code = "model_not_found"


class ModelFileError(MeshLLMError):
    """A model file is truncated, foreign or holds what this version cannot run; names the file and the place."""

    exit_code = 4
    http_status = 500
    code = "model_file"


class UnavailableError(MeshLLMError):
    """The mesh cannot serve this now: no layout yet, a rank was lost, all slots are taken (HTTP 503)."""

    http_status = 503
    code = "unavailable"


class RemoteProtocolError(MeshLLMError):
    """A peer broke the protocol. Its link is closed; nothing else suffers."""

    code = "peer_protocol"


class LocalProtocolError(MeshLLMError):
    """We used the protocol wrongly: a bug."""


class LinkLostError(MeshLLMError):
    """A link to a peer ended: the world's fault. Dial again."""

    code = "link_lost"


class KernelError(MeshLLMError):
    """A native call refused its arguments or ran out of memory."""

    code = "kernel"


class SliceError(MeshLLMError):
    """A layout gives this rank a part that cannot be cut from the model: it was made for another one."""

    code = "slice"
