"""One TLS stream <-> messages. Errors of trio, ssl and the system are mapped here, once: LinkLostError,
RemoteProtocolError.

Opening: TLS 1.3 with both sides verified. The one that accepts hears first; the first message (Hello, DataHello,
FileHello) says which kind of link it is, and only then is the peer authenticated. A ControlLink then runs one reader
and one writer task. Decides nothing about the protocol.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio

from meshllm.errors import LinkLostError, RemoteProtocolError
from meshllm.mesh.framing import FrameDecoder, LinkMessage, encode_frame
from meshllm.mesh.messages import ControlMessage, DataHello, FileHello, Goodbye, Hello
from meshllm.net.reasons import first_of, reason_of

TlsStream = trio.SSLStream[trio.SocketStream]
Address = tuple[str, int]
LinkHello = Hello | DataHello | FileHello

OPEN_TIMEOUT_S = 5.0  # a stranger has so long for handshake and first message
SEND_TIMEOUT_S = 5.0  # a peer that takes nothing for so long is lost
DRAIN_TIMEOUT_S = 1.0  # for what is queued when a link is closed
REFUSAL_TIMEOUT_S = 0.5  # to tell a peer why it is refused
QUEUE_FRAMES = 1024  # waiting to be sent on one link
READ_BYTES = 64 * 1024

_TCP_INFO_MIN_RTT = struct.Struct("=148xI")  # of struct tcp_info, linux/tcp.h: tcpi_min_rtt in microseconds, Linux 4.6


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Turns what a stream raises into LinkLostError with a reason that a person understands."""
    try:
        yield
    except trio.BrokenResourceError as error:
        raise LinkLostError(reason_of(error.__cause__ or error)) from error
    except trio.ClosedResourceError as error:
        raise LinkLostError("closed here") from error
    except OSError as error:  # ssl.SSLError is one
        raise LinkLostError(reason_of(error)) from error


@contextmanager
def within(timeout_s: float) -> Iterator[None]:
    """mapped_errors with a deadline, which is a LinkLostError too."""
    try:
        with trio.fail_after(timeout_s), mapped_errors():
            yield
    except trio.TooSlowError as error:
        raise LinkLostError(f"no answer in {timeout_s:g} s") from error


async def open_tls(stream: trio.SocketStream, context: ssl.SSLContext, *, server_side: bool) -> TlsStream:
    """The handshake. Raises LinkLostError; the stream is then closed. The caller sets the deadline."""
    tls = trio.SSLStream(stream, context, server_hostname=None, server_side=server_side, https_compatible=True)
    try:
        with mapped_errors():
            await tls.do_handshake()
    except BaseException as error:
        if isinstance(error, LinkLostError):
            await _send_alert(tls)
        await trio.aclose_forcefully(tls)
        raise
    return tls


async def _send_alert(tls: TlsStream) -> None:
    """Sends the alert that says why we refuse the other end; else it sees us leave and can only guess at its secret.

    trio leaves it in its buffer, which has no public name; the worst without it is the guess.
    """
    buffer = getattr(tls, "_outgoing", None)
    if isinstance(buffer, ssl.MemoryBIO) and (alert := buffer.read()):
        with suppress(LinkLostError), within(REFUSAL_TIMEOUT_S):
            await tls.transport_stream.send_all(alert)


async def receive_hello(stream: TlsStream, decoder: FrameDecoder) -> tuple[LinkHello, list[LinkMessage]]:
    """The first message of a fresh link, and those that came with it. Raises LinkLostError or RemoteProtocolError."""
    while True:
        with mapped_errors():
            data = await stream.receive_some(READ_BYTES)
        if not data:
            raise LinkLostError("closed before its first message")
        messages = decoder.feed(data)
        if messages:
            hello = messages[0]
            if not isinstance(hello, (Hello, DataHello, FileHello)):
                raise RemoteProtocolError(f"began with {type(hello).__name__} instead of Hello")
            return hello, messages[1:]


async def send_hello(stream: TlsStream, hello: LinkHello) -> None:
    """Sends the first message. Raises LinkLostError."""
    with mapped_errors():
        await stream.send_all(encode_frame(hello))


async def send_refusal(stream: TlsStream, reason: str) -> None:
    """Tells a peer with the right secret why its first message is refused. The stream is to be closed."""
    with suppress(LinkLostError), within(REFUSAL_TIMEOUT_S):
        await stream.send_all(encode_frame(Goodbye(reason, refused=True)))


def peer_address(stream: TlsStream) -> Address:
    """Host and port of the other end; link-local IPv6 with its scope."""
    name = stream.transport_stream.socket.getpeername()
    host, port = str(name[0]), int(name[1])
    if len(name) == 4 and name[3] and "%" not in host:
        host = f"{host}%{name[3]}"
    return host, port


def leave_tls(stream: TlsStream, decoder: FrameDecoder, more: list[LinkMessage]) -> socket.socket:
    """The socket under a TLS stream, non-blocking, no longer trio's. RemoteProtocolError if bytes came too early."""
    if more or decoder.buffered:
        raise RemoteProtocolError("sent data before the data link was ready")
    sock = socket.socket(fileno=stream.transport_stream.socket.detach())
    sock.setblocking(False)
    return sock


class ControlLink:
    """A control link: a bounded queue to one writer task, a reader task; both end together."""

    def __init__(self, stream: TlsStream, decoder: FrameDecoder | None = None) -> None:
        """decoder: of an accepted link, with whatever it has read beyond the first message."""
        self.address = peer_address(stream)
        self._stream = stream
        self._decoder = decoder or FrameDecoder()
        self._decoder.admit()
        self._queue, self._outgoing = trio.open_memory_channel[ControlMessage](QUEUE_FRAMES)
        self._scope = trio.CancelScope()
        self._closing: str | None = None
        self.ended = trio.Event()

    @property
    def network_rtt_us(self) -> float | None:
        """The least round trip that the system saw of late, without what programs add; None if it does not tell."""
        try:
            sock = self._stream.transport_stream.socket
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_MIN_RTT.size)
            (rtt_us,) = _TCP_INFO_MIN_RTT.unpack(info)
        except (AttributeError, OSError, struct.error):  # another system, an old one
            return None
        return float(rtt_us) if 0 < rtt_us < 2**32 - 1 else None  # the limits: not measured

    def send(self, message: ControlMessage) -> bool:
        """Queues a message; False if the queue is full or the link is closing. Order is kept."""
        try:
            self._queue.send_nowait(message)
        except (trio.WouldBlock, trio.ClosedResourceError, trio.BrokenResourceError):
            return False
        return True

    def close(self, reason: str) -> None:
        """Sends what is queued, at most DRAIN_TIMEOUT_S long, then ends `run`. May be called again."""
        if self._closing is None:
            self._closing = reason
            self._queue.close()
            self._scope.deadline = trio.current_time() + DRAIN_TIMEOUT_S

    async def run(self, receive: Callable[[ControlMessage], None]) -> str:
        """Runs the link until it ends and says why. `receive` gets each message, in order. Closes the stream."""
        reason = "connection closed by the peer"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, nursery.cancel_scope)
                    await self._read(receive)
                    nursery.cancel_scope.cancel()
        except* (LinkLostError, RemoteProtocolError) as group:
            reason = str(first_of(group))
        finally:
            self._queue.close()
            self._outgoing.close()
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._stream)  # nothing below waits on the peer
            self.ended.set()
        return self._closing or reason

    async def _read(self, receive: Callable[[ControlMessage], None]) -> None:
        while True:
            with mapped_errors():
                data = await self._stream.receive_some(READ_BYTES)
            if not data:
                return
            try:
                for message in self._decoder.feed(data):
                    if isinstance(message, DataHello | FileHello):
                        raise RemoteProtocolError(f"sent {type(message).__name__} on a control link")
                    receive(message)
            except RemoteProtocolError as error:  # it should know why, whatever it makes of it
                self.send(Goodbye(str(error), refused=True))
                self.close(str(error))
                await trio.sleep_forever()  # the writer ends the link when that is sent

    async def _write(self, everything: trio.CancelScope) -> None:
        async for message in self._outgoing:
            with within(SEND_TIMEOUT_S):
                await self._stream.send_all(encode_frame(message))
        everything.cancel()  # closed by us and all is sent
