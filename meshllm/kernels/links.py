"""Sealed links and the exchange of partial sums over them, by the native module. Nothing here waits or decides.

A frame is u32 little-endian length, then the sealed body (16 bytes longer than the body): AES-256-GCM or
ChaCha20-Poly1305, one key a direction and link, so the nonce is a plain frame counter. Frames can be neither lost,
doubled, reordered nor forged without the link failing. Any error of a link is final.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from meshllm._native import ffi, lib
from meshllm.errors import ConfigError, KernelError, LinkLostError, MeshLLMError, RemoteProtocolError
from meshllm.kernels.binding import NativeProgram

SEAL_BYTES: Final = 16
KEY_BYTES: Final = 32
HEAD_BYTES: Final = 19  # before the data of a partial


@dataclass(frozen=True, slots=True)
class PartialHead:
    """What a frame with a partial sum says of itself: the step, the exchange in it, the bytes of data."""

    step: int
    exchange: int
    n_bytes: int

    @classmethod
    def of(cls, head: bytes) -> PartialHead:
        """From the first bytes of a body: see partial_frame.h."""
        return cls(*(int.from_bytes(head[a:b], "big") for a, b in ((3, 11), (12, 14), (15, HEAD_BYTES))))


class SealedLink:
    """Sealed frames on a connected socket, which stays the caller's and must outlive this. See the head of this file.

    `send` and `receive` try at once and keep what is left over, so that frames larger than the socket's buffers cannot
    deadlock. Raises ConfigError where the device has no libcrypto.
    """

    def __init__(self, fd: int, send_key: bytes, receive_key: bytes, *, aes: bool, frame_limit: int) -> None:
        """frame_limit: bytes of the largest body that the other end may send."""
        if len(send_key) != KEY_BYTES or len(receive_key) != KEY_BYTES:
            raise KernelError(f"keys of {len(send_key)} and {len(receive_key)} bytes, expected {KEY_BYTES}")
        out = ffi.new("struct meshllm_link **")
        status = lib.meshllm_link_new(out, fd, aes, send_key, receive_key)
        if status == lib.MESHLLM_NO_CIPHER:
            raise ConfigError("links between devices need OpenSSL's libcrypto.so.3, which is not here: install libssl3")
        if status != lib.MESHLLM_OK:
            raise KernelError("out of memory: making a link")
        self._link = ffi.gc(out[0], lib.meshllm_link_free)
        self._body, self._size = ffi.new("uint8_t **"), ffi.new("size_t *")
        self._frame_limit = 0
        self.admit(frame_limit)

    def close(self) -> None:
        """The socket is about to be closed: sending and receiving fail from now on, whoever gets its number next."""
        lib.meshllm_link_close(self._link)

    def admit(self, frame_limit: int) -> None:
        """Take bodies up to frame_limit bytes from now on."""
        self._frame_limit = frame_limit
        lib.meshllm_link_limit(self._link, frame_limit)

    @property
    def unsent(self) -> int:
        """Bytes that `flush` has to send."""
        return int(lib.meshllm_link_unsent(self._link))

    @property
    def bytes_sent(self) -> int:
        """Of frames so far, with lengths and seals; unsent ones too."""
        return int(lib.meshllm_link_sent(self._link))

    @property
    def bytes_received(self) -> int:
        """So far."""
        return int(lib.meshllm_link_received(self._link))

    def send(self, body: bytes) -> None:
        """Seals a body and sends what the socket takes at once. Raises LinkLostError."""
        self._check(lib.meshllm_link_send(self._link, len(body), body))

    def flush(self) -> None:
        """Sends what the socket takes of what is left over. Raises LinkLostError."""
        self._check(lib.meshllm_link_flush(self._link))

    def receive(self) -> bytes | PartialHead | None:
        """The next body, or None if there is no whole one yet. A partial sum is for a Communicator: it stays where it
        is, and only what it says of itself is given.

        Raises LinkLostError if the peer closed, RemoteProtocolError on a frame that is too long or not sealed by it.
        """
        status = lib.meshllm_link_receive(self._link, self._body, self._size)
        if status == lib.MESHLLM_NOTHING:
            return None
        if status == lib.MESHLLM_PARTIAL:
            return PartialHead.of(bytes(ffi.buffer(self._body[0], HEAD_BYTES)))
        self._check(status)
        return bytes(ffi.buffer(self._body[0], self._size[0]))

    def error(self, status: int) -> MeshLLMError:
        """What a native function's failure on this link is to people."""
        detail = int(lib.meshllm_link_detail(self._link, status))
        if status == lib.MESHLLM_LINK_CLOSED:
            return LinkLostError("it closed its data link")
        if status == lib.MESHLLM_LINK_FAILED:
            text = os.strerror(detail)
            return LinkLostError(f"its data link failed: {text[:1].lower()}{text[1:]}")
        if status == lib.MESHLLM_BAD_LENGTH:
            allowed = self._frame_limit + SEAL_BYTES
            return RemoteProtocolError(f"data frame of {detail} bytes, {allowed} are allowed")
        if status == lib.MESHLLM_FORGED:
            return RemoteProtocolError("data frame that is not sealed with the key agreed")
        return KernelError(f"a link failed with status {status}: out of memory, most likely")

    def _check(self, status: int) -> None:
        if status != lib.MESHLLM_OK:
            raise self.error(status)


class Progress(IntEnum):
    """Where a step stands after `Communicator.run`."""

    FINISHED = 0
    WAITING = 1  # for a partial sum
    STOPPED = 2
    MESSAGE = 3  # `rank` has sent something else than the partial that is due; its link's `receive` gives it


class Communicator:
    """The ranks that run one program's steps together: all kernels and exchanges of a step in one call.

    All-to-all: each rank that adds something at an exchange sends its partial to all others, and all add the same
    partials in rank order.
    """

    def __init__(
        self,
        program: NativeProgram,
        own: int,
        links: Sequence[SealedLink | None],
        contributors: Sequence[Sequence[int]],
    ) -> None:
        """links: by rank, None for this one. contributors[i]: the ranks that add something at exchange i of a step."""
        self._links = links
        adds = [int(rank in adding) for adding in contributors for rank in range(len(links))]
        out = ffi.new("struct meshllm_communicator **")
        pointers = [ffi.NULL if link is None else link._link for link in links]
        status = lib.meshllm_communicator_new(
            out, program._program, len(links), own, pointers, len(contributors), bytes(adds)
        )
        if status != lib.MESHLLM_OK:
            raise KernelError(f"a communicator of {len(links)} ranks and {len(contributors)} exchanges was refused")
        self._held = (program, pointers)
        self._communicator = ffi.gc(out[0], lib.meshllm_communicator_free)

    def begin(self, step: int) -> None:
        """A batch of the program has begun: this is its step."""
        lib.meshllm_communicator_begin(self._communicator, step)

    def run(self, spin_s: float, yield_s: float) -> Progress:
        """Runs the step on, without the GIL, to its end or until a partial is not there after yield_s. It looks for
        it without a pause for spin_s, and then offers its core to others.

        Raises LinkLostError or RemoteProtocolError about the link of `rank`.
        """
        status = lib.meshllm_communicator_run(self._communicator, int(spin_s * 1e6), int(yield_s * 1e6))
        if (progress := _PROGRESS.get(status)) is not None:
            return progress
        link = self._links[self.rank]
        if link is None:
            raise KernelError(f"a step failed with status {status}")
        if status == lib.MESHLLM_WRONG_PARTIAL:
            head = link.receive()
            assert isinstance(head, PartialHead)
            raise RemoteProtocolError(
                f"sent a partial of {head.n_bytes} bytes for exchange {head.exchange} of step {head.step}, which is not"
                f" the one of exchange {self.exchange} that is due"
            )
        raise link.error(status)

    @property
    def rank(self) -> int:
        """Whom the last MESSAGE or error is about."""
        return int(lib.meshllm_communicator_rank(self._communicator))

    @property
    def exchange(self) -> int:
        """The exchange that is due, counted from 0 in a step."""
        return int(lib.meshllm_communicator_exchange(self._communicator))

    @property
    def exchange_s(self) -> float:
        """Seconds in exchanges, in this step."""
        return float(lib.meshllm_communicator_exchange_ns(self._communicator)) * 1e-9

    def missing(self) -> list[int]:
        """Ranks whose partial has not come."""
        return [i for i in range(len(self._links)) if lib.meshllm_communicator_lacks(self._communicator, i)]


_PROGRESS: Final[dict[Any, Progress]] = {
    lib.MESHLLM_OK: Progress.FINISHED,
    lib.MESHLLM_EXCHANGE: Progress.WAITING,
    lib.MESHLLM_STOPPED: Progress.STOPPED,
    lib.MESHLLM_MESSAGE: Progress.MESSAGE,
}
