"""Accepting: from a port to authenticated streams. Decides nothing else.

What a stranger on the port can cost: one of MAX_STRANGERS places for OPEN_TIMEOUT_S, one frame of memory, and a share
in one log line each REPORT_INTERVAL_S.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from meshllm.errors import ConfigError, LinkLostError, RemoteProtocolError
from meshllm.mesh.framing import FrameDecoder, LinkMessage
from meshllm.mesh.messages import DataHello
from meshllm.net.link import (
    OPEN_TIMEOUT_S,
    LinkHello,
    TlsStream,
    leave_tls,
    open_tls,
    receive_hello,
    send_hello,
    send_refusal,
    within,
)

MAX_STRANGERS = 64  # connections that have not proved themselves yet
REPORT_INTERVAL_S = 10.0
BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Incoming:
    """An accepted, authenticated stream: its first message, messages that came with it, and the decoder to go on
    with.
    """

    stream: TlsStream
    hello: LinkHello
    more: list[LinkMessage]
    decoder: FrameDecoder


def bind(port: int | None, default_port: int, tries: int) -> tuple[list[socket.socket], int]:
    """Listening sockets on all addresses, IPv4 and IPv6 (where there is IPv6), and their port.

    port None: the default one, or the next free of `tries`. Raises ConfigError if a given port is taken or not allowed.
    """
    candidates = [port] if port is not None else [default_port + i for i in range(tries)]
    for candidate in candidates:
        try:
            return _bind_both(candidate)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            why = "is in use by another program" if error.errno == errno.EADDRINUSE else (error.strerror or "").lower()
            raise ConfigError(f"port {candidate} {why}; choose another one with --port") from None
    raise ConfigError(f"ports {candidates[0]} to {candidates[-1]} are in use; choose one with --port")


def _bind_both(port: int) -> tuple[list[socket.socket], int]:
    sockets: list[socket.socket] = []
    try:
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                continue  # this system has no such family
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((host, port))
            except OSError as error:
                if family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    sockets.pop().close()
                    continue  # IPv6 is switched off
                raise
            sock.listen(BACKLOG)
            port = port or int(sock.getsockname()[1])
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets, port


class Strangers:
    """Counts connections that have proved nothing yet, and tells of refused ones at most once in REPORT_INTERVAL_S."""

    def __init__(self, report: Callable[[str, str, int], None]) -> None:
        self._report = report  # address, reason, how many were not told since the last time
        self._open = 0
        self._untold = 0
        self._next_report = float("-inf")

    def enter(self) -> bool:
        """Takes a place; False if all are taken."""
        if self._open >= MAX_STRANGERS:
            return False
        self._open += 1
        return True

    def leave(self) -> None:
        """Gives the place back."""
        self._open -= 1

    def refused(self, address: str, reason: str, now: float) -> None:
        """Someone did not prove to be a peer."""
        if now < self._next_report:
            self._untold += 1
            return
        self._report(address, reason, self._untold)
        self._untold = 0
        self._next_report = now + REPORT_INTERVAL_S


async def serve(
    sockets: Sequence[socket.socket],
    context: ssl.SSLContext,
    strangers: Strangers,
    accepted: Callable[[Incoming], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Accepts until cancelled. `accepted` owns the stream and runs in a task of its own; its errors are not
    expected.
    """
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets]

    async def greet(stream: trio.SocketStream) -> None:
        incoming = await _authenticate(stream, context, strangers)
        if incoming is not None:
            await accepted(incoming)

    await trio.serve_listeners(greet, listeners, task_status=task_status)


async def _authenticate(stream: trio.SocketStream, context: ssl.SSLContext, strangers: Strangers) -> Incoming | None:
    address = _host(stream)
    if not strangers.enter():
        strangers.refused(address, "too many connections are waiting to prove themselves", trio.current_time())
        await trio.aclose_forcefully(stream)
        return None
    tls: TlsStream | None = None
    try:
        with within(OPEN_TIMEOUT_S):
            tls = await open_tls(stream, context, server_side=True)
            decoder = FrameDecoder()
            hello, more = await receive_hello(tls, decoder)
            return Incoming(tls, hello, more, decoder)
    except (LinkLostError, RemoteProtocolError) as error:
        if tls is not None and isinstance(error, RemoteProtocolError):
            await send_refusal(tls, str(error))
        strangers.refused(address, str(error), trio.current_time())
        await trio.aclose_forcefully(tls or stream)
        return None
    finally:
        strangers.leave()


def _host(stream: trio.SocketStream) -> str:
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return "a peer that has left"


async def answer_data(incoming: Incoming, hello: DataHello) -> socket.socket:
    """The acceptor's side of `dial_data`, after its DataHello was read and found good. Raises as dial_data."""
    try:
        with within(OPEN_TIMEOUT_S):
            await send_hello(incoming.stream, hello)
        return leave_tls(incoming.stream, incoming.decoder, incoming.more)
    except BaseException:
        await trio.aclose_forcefully(incoming.stream)
        raise
