"""What a model's file is made of: chunks of 1 MiB, each known by its SHA-256. Pure.

The content hash, by which a model is known, is of the whole file, so a part cannot be checked against it. A manifest
can: a member that holds the whole file computes both in one pass, and vouches for the pair. Where a member lies or
errs, the whole file's hash tells in the end; two members with different manifests are seen at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

CHUNK_BYTES: Final = 1 << 20
HASH_BYTES: Final = 32
MAX_CHUNKS: Final = 240_000  # 234 GiB: the manifest fits one frame


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """head_bytes: header, metadata and index of tensors, before the first weight. hashes: 32 bytes for each chunk."""

    size: int
    head_bytes: int
    hashes: bytes

    @property
    def n_chunks(self) -> int:
        """Of the whole file."""
        return -(-self.size // CHUNK_BYTES)

    @property
    def fault(self) -> str | None:
        """What cannot be about its numbers, in words; nothing else may be used before this is None."""
        if not 0 < self.size <= MAX_CHUNKS * CHUNK_BYTES:
            return f"a file of {self.size} bytes, at most {MAX_CHUNKS} MiB are allowed"
        if not 0 < self.head_bytes <= self.size:
            return f"a head of {self.head_bytes} bytes in a file of {self.size}"
        if len(self.hashes) != HASH_BYTES * self.n_chunks:
            return f"{len(self.hashes)} bytes of hashes for {self.n_chunks} chunks"
        return None

    def length(self, chunk: int) -> int:
        """Bytes of a chunk: the last may be shorter."""
        return min(CHUNK_BYTES, self.size - chunk * CHUNK_BYTES)

    def is_good(self, chunk: int, data: bytes) -> bool:
        """Whether these are the bytes of that chunk."""
        expected = self.hashes[HASH_BYTES * chunk : HASH_BYTES * (chunk + 1)]
        return len(data) == self.length(chunk) and hashlib.sha256(data).digest() == expected

    def chunks_of(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """Numbers of the chunks that hold these half-open ranges of bytes, in the order of the file."""
        found: set[int] = set()
        for start, end in ranges:
            if start < end:
                found.update(range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)))
        return sorted(found)

    def bytes_of(self, chunks: Iterable[int]) -> int:
        """Bytes of these chunks."""
        return sum(self.length(chunk) for chunk in chunks)


class ChunkSet:
    """Which chunks are here: a bit each."""

    def __init__(self, n_chunks: int, bits: bytes = b"") -> None:
        """bits: as of `bits`; b"" for none."""
        self.n_chunks = n_chunks
        self._bits = bytearray(bits or bytes(-(-n_chunks // 8)))

    @staticmethod
    def whole(n_chunks: int) -> ChunkSet:
        """All of them."""
        found = ChunkSet(n_chunks)
        for chunk in range(n_chunks):
            found.add(chunk)
        return found

    @property
    def bits(self) -> bytes:
        """Eight chunks a byte, the first in the lowest bit."""
        return bytes(self._bits)

    def add(self, chunk: int) -> None:
        self._bits[chunk // 8] |= 1 << chunk % 8

    def discard(self, chunk: int) -> None:
        self._bits[chunk // 8] &= ~(1 << chunk % 8) & 0xFF

    def __contains__(self, chunk: int) -> bool:
        return bool(self._bits[chunk // 8] >> chunk % 8 & 1)

    def __iter__(self) -> Iterator[int]:
        return (chunk for chunk in range(self.n_chunks) if chunk in self)

    def __len__(self) -> int:
        return int.from_bytes(self._bits, "little").bit_count()
