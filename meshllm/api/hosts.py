"""On TCP, only requests for this machine by name or address: a web page that points a name of its own at a local
address (DNS rebinding) must not reach the API through a browser. On the Unix socket its permissions decide.
"""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from meshllm.api.openai import error_object
from meshllm.api.streams import json_response


class HostCheck:
    """Wraps an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _over_tcp(scope) and not _is_local_name(_host_of(scope)):
            refusal = error_object(
                "the Host header names another machine: use the address itself", 403, "host_refused", None
            )
            await json_response(refusal, 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _over_tcp(scope: Scope) -> bool:
    server = scope.get("server")
    return server is not None and server[1] is not None


def _host_of(scope: Scope) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")


def _is_local_name(host: str) -> bool:
    """localhost, or an address: a rebinding page has a name of its own."""
    name = host.rsplit(":", 1)[0] if host.count(":") == 1 or "]" in host else host
    name = name.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
