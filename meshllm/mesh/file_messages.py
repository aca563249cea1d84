"""Messages about a model's file: who needs which part of it (control links), and the bytes themselves (file links).

A file link is a TLS link of its own, so that bytes never stand before a heartbeat or a step. It begins with FileHello;
the one that holds the file answers with Offer, then every AskChunk with Chunk or Absent, in order. Pure.
"""

from __future__ import annotations

from meshllm.layout.layout import NodeId
from meshllm.mesh.manifest import Manifest
from meshllm.mesh.wire import Message, ModelHash
from meshllm.model.slicing import Slice

# --- control link -----------------------------------------------------------------------------------------------------


class Need(Message, frozen=True, tag=15):
    """Driver -> rank: fetch what this slice needs of the file; a layout that gives it to you follows your Held."""

    model: ModelHash
    part: Slice


class Held(Message, frozen=True, tag=16):
    """Rank -> driver: the slice's bytes are here. problem: they cannot be had now, and why."""

    model: ModelHash
    part: Slice
    problem: str | None = None


# --- file link --------------------------------------------------------------------------------------------------------


class FileHello(Message, frozen=True, tag=40):
    """First message of a file link, by the one that wants the file."""

    node: NodeId
    model: ModelHash


class Offer(Message, frozen=True, tag=41):
    """The manifest, and which chunks the sender holds: bits as in manifest.ChunkSet; b"" for all of them."""

    manifest: Manifest
    holds: bytes


class AskChunk(Message, frozen=True, tag=42):
    """slowly: the receiver answers requests meanwhile, so leave room for them."""

    chunk: int
    slowly: bool


class Chunk(Message, frozen=True, tag=43):
    chunk: int
    data: bytes


class Absent(Message, frozen=True, tag=44):
    """The sender does not hold that chunk."""

    chunk: int


class Farewell(Message, frozen=True, tag=45):
    """The last message of a file link: why there is nothing to be had."""

    reason: str


FileMessage = Offer | AskChunk | Chunk | Absent | Farewell
