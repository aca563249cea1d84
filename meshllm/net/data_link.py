"""A data link: sealed frames on a raw, non-blocking TCP socket between two members of an epoch. Never waits or decides.

Keys come from two random values that the members exchanged inside TLS 1.3 (`derive_keys`).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from meshllm.kernels.links import KEY_BYTES, SealedLink
from meshllm.mesh.messages import DataHello


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


class DataLink(SealedLink):
    """See the head of this file."""

    def __init__(self, sock: socket.socket, keys: DataKeys, frame_limit: int) -> None:
        """Takes the socket over. frame_limit: bytes of the largest body that either end may send."""
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(sock.fileno(), keys.send, keys.receive, aes=keys.aes, frame_limit=frame_limit)
        self._sock = sock

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def close(self) -> None:
        """Closes the socket; what is unsent is dropped. May be called again."""
        super().close()
        self._sock.close()
