"""Bytes <-> messages: u32 little-endian length, then that many bytes of msgpack `[tag, fields...]`.

Feeding byte by byte gives what feeding at once gives. A length is checked before a byte of its body is kept, so what a
stranger can make us remember is one frame of HELLO_LIMIT. After an error the decoder is dead, its link closed. Pure.

A control link: `FrameDecoder()`, whose first message says which kind of link this is (Hello, DataHello or FileHello);
after a good Hello `admit()`. A data link seals bodies by itself: `encode_body`, `decode_data`.
"""

from __future__ import annotations

import struct
from typing import TypeAlias, TypeVar

import msgspec

from meshllm.errors import LocalProtocolError, RemoteProtocolError
from meshllm.mesh.checks import check
from meshllm.mesh.file_messages import FileMessage
from meshllm.mesh.messages import ControlMessage, DataHello, DataMessage, FileHello, Message

HELLO_LIMIT = 64 * 1024  # bytes of a first frame: all that a stranger may make us keep
CONTROL_LIMIT = 8 * 1024 * 1024  # bytes of a control frame: a Submit of a million tokens
LENGTH_BYTES = 4

LinkMessage: TypeAlias = ControlMessage | DataHello | FileHello

M = TypeVar("M", bound=Message)

_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()
_LINK_DECODER: msgspec.msgpack.Decoder[LinkMessage] = msgspec.msgpack.Decoder(LinkMessage)
_FILE_DECODER: msgspec.msgpack.Decoder[FileMessage] = msgspec.msgpack.Decoder(FileMessage)
_DATA_DECODER: msgspec.msgpack.Decoder[DataMessage] = msgspec.msgpack.Decoder(DataMessage)


def encode_body(message: Message) -> bytes:
    """The msgpack of a message, without a length."""
    return _ENCODER.encode(message)


def encode_frame(message: Message) -> bytes:
    """Length and body of a message. Raises LocalProtocolError if it is longer than any link takes."""
    body = _ENCODER.encode(message)
    if len(body) > CONTROL_LIMIT:
        raise LocalProtocolError(f"{type(message).__name__} of {len(body)} bytes, a frame takes {CONTROL_LIMIT}")
    return _LENGTH.pack(len(body)) + body


def decode_data(body: bytes | bytearray | memoryview) -> DataMessage:
    """The data message of an unsealed body. Raises RemoteProtocolError."""
    return _decode(_DATA_DECODER, body, "data message")


def decode_file(body: bytes | bytearray | memoryview) -> FileMessage:
    """The message of a file link's frame. Raises RemoteProtocolError."""
    return _decode(_FILE_DECODER, body, "message of a file")


def frame_length(head: bytes | bytearray) -> int:
    """Bytes of the body that follows these LENGTH_BYTES, on a file link. Raises RemoteProtocolError if too long."""
    (length,) = _LENGTH.unpack(head)
    if length > CONTROL_LIMIT:
        raise RemoteProtocolError(f"frame of {length} bytes, at most {CONTROL_LIMIT} are allowed")
    return int(length)


class FrameDecoder:
    """A control link's receive side."""

    def __init__(self, limit: int = HELLO_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._failed = False

    def admit(self, limit: int = CONTROL_LIMIT) -> None:
        """The peer is known now: take frames up to `limit` bytes."""
        self._limit = limit

    @property
    def buffered(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[LinkMessage]:
        """The messages that `data` completes, in order.

        Raises RemoteProtocolError on a frame that is too long, is not msgpack, is no control message, or holds a value
        out of its limits; messages before it in `data` are lost with the link. LocalProtocolError if fed after that.
        """
        if self._failed:
            raise LocalProtocolError("frame decoder fed after an error")
        self._buffer += data
        try:
            return self._take_frames()
        except RemoteProtocolError:
            self._failed = True
            raise

    def _take_frames(self) -> list[LinkMessage]:
        messages: list[LinkMessage] = []
        start = 0
        while len(self._buffer) - start >= LENGTH_BYTES:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._limit:
                raise RemoteProtocolError(f"frame of {length} bytes, at most {self._limit} are allowed")
            end = start + LENGTH_BYTES + length
            if len(self._buffer) < end:
                break
            messages.append(_decode(_LINK_DECODER, bytes(self._buffer[start + LENGTH_BYTES : end]), "frame"))
            start = end
        del self._buffer[:start]
        return messages


def _decode(decoder: msgspec.msgpack.Decoder[M], body: bytes | bytearray | memoryview, what: str) -> M:
    try:
        message = decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed {what} of {len(body)} bytes: {error}") from error
    check(message)
    return message
