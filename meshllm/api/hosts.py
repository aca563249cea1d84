"""On TCP, only requests for this machine by name or address, and none that a foreign web page makes.

A page that points a name of its own at a local address (DNS rebinding) must not reach the API through a browser: Host.
A page may also post to an address without reading the answer, which would still run a model: Origin. On the Unix
socket its permissions decide.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from meshllm.api.openai import error_object
from meshllm.api.streams import json_response


class HostCheck:
    """Wraps an application. names: of this machine; a name with a dot is one that others may own, so only .local ones
    belong here.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _over_tcp(scope) and (refusal := self._refusal(scope)) is not None:
            await json_response(error_object(refusal, 403, "host_refused", None), 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        if not self._is_ours(_header(scope, b"host") or ""):
            return "the Host header names another machine: use this machine's address itself"
        origin = _header(scope, b"origin")
        if origin is not None and not self._is_ours(origin.partition("://")[2]):
            return "requests from web pages of other machines are refused"
        return None

    def _is_ours(self, authority: str) -> bool:
        name = _without_port(authority).lower()
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _over_tcp(scope: Scope) -> bool:
    server = scope.get("server")
    return server is not None and server[1] is not None


def _header(scope: Scope, wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)


def _without_port(authority: str) -> str:
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.rpartition(":")[0] if authority.count(":") == 1 else authority
