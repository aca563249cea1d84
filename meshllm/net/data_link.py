"""A data link: sealed frames on a raw, non-blocking TCP socket between two members of an epoch. Never waits or decides.

Keys come from two random values that the members exchanged inside TLS 1.3 (`derive_keys`): one key a direction and
link, so the nonce is a plain frame counter. A frame is u32 little-endian length, then the sealed body (16 bytes longer
than the body). Frames can be neither lost, doubled, reordered nor forged without the link failing.

`send` and `receive` try at once and keep what is left over: whoever waits (link_group.py) does both in turn, so that
frames larger than the socket's buffers cannot deadlock. Any error is final; the link is then to be closed.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from meshllm.errors import LinkLostError, RemoteProtocolError
from meshllm.mesh.messages import DataHello

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
NONCE_BYTES: Final = 12
BUFFER_BYTES: Final = 64 * 1024  # to start with; grows to the largest frame that came
SMALL_FRAME_BYTES: Final = 16 * 1024  # up to this, joining length and body is cheaper than two buffers to the system

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class DataKeys:
    """Keys of one data link as seen from one end, 32 bytes each. aes: AES-256-GCM, else ChaCha20-Poly1305."""

    send: bytes
    receive: bytes
    aes: bool

    def __repr__(self) -> str:
        return "DataKeys(...)"  # never in a log


def derive_keys(own: DataHello, peer: DataHello, *, dialed: bool) -> DataKeys:
    """The keys that both ends find from the two DataHellos. dialed: this end dialed the link.

    Both randoms travelled inside TLS between members; the epoch and both node ids bind the keys to this use.
    """
    first, second = (own, peer) if dialed else (peer, own)
    info = f"meshllm data link 1 {own.epoch.counter} {own.epoch.driver} {first.node} {second.node}".encode()
    secret = first.random + second.random
    both = HKDF(algorithm=SHA256(), length=2 * KEY_BYTES, salt=None, info=info).derive(secret)
    forth, back = both[:KEY_BYTES], both[KEY_BYTES:]
    send, receive = (forth, back) if dialed else (back, forth)
    return DataKeys(send, receive, own.aes and peer.aes)


class DataLink:
    """See the head of this file."""

    def __init__(self, sock: socket.socket, keys: DataKeys, frame_limit: int) -> None:
        """Takes the socket over. frame_limit: bytes of the largest body that either end may send."""
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._frame_limit = frame_limit
        cipher = AESGCM if keys.aes else ChaCha20Poly1305
        self._sealer = cipher(keys.send)
        self._opener = cipher(keys.receive)
        self._n_sealed = 0
        self._n_opened = 0
        self.unsent: deque[memoryview] = deque()  # what `flush` has to send
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0  # of the first unread byte
        self._end = 0  # of the last
        self.bytes_sent = 0  # by `send`, with lengths and tags
        self.bytes_received = 0

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    @property
    def has_unread(self) -> bool:
        """Whether more than the bodies handed out has been read, a whole frame or a part."""
        return self._start < self._end

    def send(self, body: bytes) -> None:
        """Seals a body and sends what the socket takes at once; `flush` sends the rest. Raises LinkLostError."""
        sealed = self._sealer.encrypt(self._n_sealed.to_bytes(NONCE_BYTES, "little"), body, None)
        self._n_sealed += 1
        length = _LENGTH.pack(len(sealed))
        self.bytes_sent += len(length) + len(sealed)
        if self.unsent or len(sealed) > SMALL_FRAME_BYTES:
            self.unsent += (memoryview(length), memoryview(sealed))
            self.flush()
            return
        frame = length + sealed
        try:  # what flush does, where all is likely to go at once
            n_sent = self._sock.send(frame)
        except BlockingIOError:
            n_sent = 0
        except OSError as error:
            raise LinkLostError(_reason(error)) from error
        if n_sent < len(frame):
            self.unsent.append(memoryview(frame)[n_sent:])

    def flush(self) -> None:
        """Sends what the socket takes of what is left over. Raises LinkLostError."""
        unsent = self.unsent
        try:
            while unsent:
                n_sent = self._sock.send(unsent[0]) if len(unsent) == 1 else self._sock.sendmsg(unsent)
                while unsent and n_sent >= len(unsent[0]):
                    n_sent -= len(unsent.popleft())
                if n_sent:
                    unsent[0] = unsent[0][n_sent:]
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkLostError(_reason(error)) from error

    def receive(self) -> bytes | None:
        """The next body, or None if there is no whole one yet; asks the socket once if need be.

        Raises LinkLostError if the peer closed, RemoteProtocolError on a frame that is too long or not sealed by it.
        """
        if self._start < self._end and (body := self.buffered()) is not None:
            return body
        try:  # there is always room to read into: buffered() makes it for a part of a frame
            n_read = self._sock.recv_into(self._view[self._end :])
        except BlockingIOError:
            return None
        except OSError as error:
            raise LinkLostError(_reason(error)) from error
        if n_read == 0:
            raise LinkLostError("it closed its data link")
        self._end += n_read
        self.bytes_received += n_read
        return self.buffered()

    def admit(self, frame_limit: int) -> None:
        """The peer is known now: take bodies up to frame_limit bytes."""
        self._frame_limit = frame_limit

    def close(self) -> None:
        """Closes the socket; what is unsent is dropped. May be called again."""
        self.unsent.clear()
        self._sock.close()

    def buffered(self) -> bytes | None:
        """The next body if it has been read already; the socket is not asked. Raises RemoteProtocolError."""
        start = self._start
        n_unread = self._end - start
        if n_unread < _LENGTH.size:
            self._make_room(_LENGTH.size)
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, start)
        if not TAG_BYTES <= length <= self._frame_limit + TAG_BYTES:
            raise RemoteProtocolError(f"data frame of {length} bytes, {self._frame_limit + TAG_BYTES} are allowed")
        if n_unread < _LENGTH.size + length:
            self._make_room(_LENGTH.size + length)
            return None
        start += _LENGTH.size
        stop = start + length
        nonce = self._n_opened.to_bytes(NONCE_BYTES, "little")
        self._n_opened += 1
        try:
            body: bytes = self._opener.decrypt(nonce, self._view[start:stop], None)
        except InvalidTag:
            raise RemoteProtocolError("data frame that is not sealed with the key agreed") from None
        if stop == self._end:
            self._start = self._end = 0
        else:
            self._start = stop
        return body

    def _make_room(self, n_needed: int) -> None:
        """Moves unread bytes to the front, into a larger buffer if n_needed from there do not fit."""
        if self._start == 0 and n_needed <= len(self._buffer):
            return
        unread = bytes(self._view[self._start : self._end])
        if n_needed > len(self._buffer):
            self._view.release()
            self._buffer = bytearray(n_needed)
            self._view = memoryview(self._buffer)
        self._view[: len(unread)] = unread
        self._start, self._end = 0, len(unread)


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    return f"its data link failed: {text[:1].lower()}{text[1:]}"
