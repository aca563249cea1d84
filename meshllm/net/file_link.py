"""A file link: TLS with FileHello first, then messages both ways. Decides nothing about chunks.

It is a connection of its own, so that megabytes never stand before a heartbeat or a step. What is sent goes in pieces,
before each of which the caller may wait: that is how a transfer leaves room.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable

import trio

from meshllm.errors import LinkLostError, RemoteProtocolError
from meshllm.mesh.file_messages import FileHello, FileMessage
from meshllm.mesh.framing import LENGTH_BYTES, decode_file, encode_frame, frame_length
from meshllm.net.dialer import dial
from meshllm.net.link import OPEN_TIMEOUT_S, READ_BYTES, Address, TlsStream, mapped_errors, send_hello, within
from meshllm.net.listener import Incoming

PIECE_BYTES = 64 * 1024
STALL_S = 10.0  # a peer that takes no piece for so long is lost


class FileLink:
    """See the head of this file. Owns its stream."""

    def __init__(self, stream: TlsStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def send(self, message: FileMessage, before: Callable[[int], Awaitable[None]] | None = None) -> None:
        """Sends a message; before: awaited with the size of each piece that is about to go. Raises LinkLostError."""
        frame = memoryview(encode_frame(message))
        for start in range(0, len(frame), PIECE_BYTES):
            piece = frame[start : start + PIECE_BYTES]
            if before is not None:
                await before(len(piece))
            with within(STALL_S):
                await self._stream.send_all(piece)

    async def receive(self) -> FileMessage:
        """The next message, however long it takes. Raises LinkLostError or RemoteProtocolError."""
        await self._fill(LENGTH_BYTES)
        end = LENGTH_BYTES + frame_length(self._buffer[:LENGTH_BYTES])
        await self._fill(end)
        with memoryview(self._buffer) as view:
            message = decode_file(view[LENGTH_BYTES:end])
        del self._buffer[:end]
        return message

    async def _fill(self, n_bytes: int) -> None:
        while len(self._buffer) < n_bytes:
            with mapped_errors():
                data = await self._stream.receive_some(READ_BYTES)
            if not data:
                raise LinkLostError("connection closed by the peer")
            self._buffer += data

    async def close(self) -> None:
        """Closes the connection at once."""
        await trio.aclose_forcefully(self._stream)


async def dial_file(address: Address, context: ssl.SSLContext, own_certificate: bytes, hello: FileHello) -> FileLink:
    """Opens a file link. Raises LinkLostError."""
    stream = await dial([address], context, own_certificate)
    try:
        with within(OPEN_TIMEOUT_S):
            await send_hello(stream, hello)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return FileLink(stream)


async def answer_file(incoming: Incoming) -> FileLink:
    """The acceptor's side, after FileHello was read. Raises RemoteProtocolError if more came with it."""
    if incoming.more or incoming.decoder.buffered:
        await trio.aclose_forcefully(incoming.stream)
        raise RemoteProtocolError("asked before the file was offered")
    return FileLink(incoming.stream)
