"""Dialling: from the addresses of a peer to an authenticated stream, or to the raw socket of a data link.

Attempts run side by side, the first that completes a handshake wins. An address that leads back here is passed over.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

import trio

from meshllm.errors import LinkLostError, RemoteProtocolError
from meshllm.mesh.framing import FrameDecoder
from meshllm.mesh.messages import DataHello
from meshllm.net.link import (
    OPEN_TIMEOUT_S,
    Address,
    LinkHello,
    TlsStream,
    leave_tls,
    open_tls,
    receive_hello,
    send_hello,
    within,
)

CONNECT_TIMEOUT_S = 5.0
STAGGER_S = 0.25  # between attempts on the addresses of one peer, as RFC 8305 has it


async def dial(addresses: Sequence[Address], context: ssl.SSLContext, own_certificate: bytes) -> TlsStream:
    """The first of these addresses that completes a handshake. Attempts start STAGGER_S apart and run side by side.

    An address that leads back to this daemon is passed over: bridges of containers have one address on every host.
    Raises LinkLostError with the reason of the last attempt to fail.
    """
    reasons: list[str] = []
    winners: list[TlsStream] = []
    async with trio.open_nursery() as nursery:

        async def attempt(address: Address, failed: trio.Event) -> None:
            try:
                stream = await _dial_one(address, context, own_certificate)
            except LinkLostError as error:
                reasons.append(f"{shown_address(address)}: {error}")
                failed.set()
                return
            if winners:
                await trio.aclose_forcefully(stream)
                return
            winners.append(stream)
            nursery.cancel_scope.cancel()

        for address in addresses:
            failed = trio.Event()
            nursery.start_soon(attempt, address, failed)
            with trio.move_on_after(STAGGER_S):
                await failed.wait()
    if not winners:
        raise LinkLostError("; ".join(reasons) or "no address to try")
    return winners[0]


async def _dial_one(address: Address, context: ssl.SSLContext, own_certificate: bytes) -> TlsStream:
    with within(CONNECT_TIMEOUT_S):
        stream = await trio.open_tcp_stream(*address)
        tls = await open_tls(stream, context, server_side=False)
    if tls.getpeercert(True) == own_certificate:
        await trio.aclose_forcefully(tls)
        raise LinkLostError("leads back to this daemon")
    return tls


def shown_address(address: Address) -> str:
    """host:port as a person writes it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def dial_data(
    addresses: Sequence[Address], context: ssl.SSLContext, own_certificate: bytes, hello: DataHello
) -> tuple[socket.socket, DataHello]:
    """Opens a data link: handshake, DataHello each way; the raw socket is then ours and TLS is left.

    The acceptor sends nothing after its DataHello until our first frame on the raw socket. Raises LinkLostError or
    RemoteProtocolError.
    """
    stream = await dial(addresses, context, own_certificate)
    try:
        with within(OPEN_TIMEOUT_S):
            await send_hello(stream, hello)
            decoder = FrameDecoder()
            answer, more = await receive_hello(stream, decoder)
        return leave_tls(stream, decoder, more), _expect_data(answer)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise


def _expect_data(hello: LinkHello) -> DataHello:
    if not isinstance(hello, DataHello):
        raise RemoteProtocolError("answered a data link with a control link's first message")
    return hello
