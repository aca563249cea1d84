"""A model's file of which only some chunks are here, under STATE/models/partial. Blocks: for worker threads.

    <sha256>.gguf        sparse, of the file's full size; chunks stand where they belong
    <sha256>.manifest    name and manifest, by which each chunk is verified before it is written
    <sha256>.parts       slices that were fetched, the latest first
    <sha256>.record      which chunks are here, and what the file looked like when they were synced

A record is written after the data that it tells of has reached the disk, never before. Where the file is not what the
record remembers (a kill or a power cut came between), every chunk that the file seems to hold is verified anew: so
nothing is trusted that was not checked, and nothing is fetched twice that is here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import weakref
from pathlib import Path
from typing import Final

import msgspec

from meshllm.errors import ModelFileError, UnavailableError
from meshllm.mesh.manifest import CHUNK_BYTES, ChunkSet, Manifest
from meshllm.model.model_file import ModelFile, file_identity
from meshllm.model.slicing import Slice

MAX_PARTS: Final = 4  # slices remembered: the mesh with and without some device
SPARE_BYTES: Final = 16 << 20  # left free on the disk: for the index, the record, and whoever else writes


class _Head(msgspec.Struct, frozen=True, array_like=True):
    name: str
    manifest: Manifest
    voucher: str  # name of the device whose manifest it is


class _Record(msgspec.Struct, frozen=True, array_like=True):
    identity: str
    bits: bytes


class PartialFile:
    """See the head of this file. `here` grows by the caller, after `store`."""

    def __init__(self, path: Path, head: _Head) -> None:
        """Of files that are there; `create` and `open` make one."""
        self.path, self.sha256 = path, path.stem
        self.name, self.manifest, self.voucher = head.name, head.manifest, head.voucher
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.here = self._recorded()
        self.parts = self._read_parts()

    @classmethod
    def create(cls, folder: Path, sha256: str, name: str, manifest: Manifest, voucher: str) -> PartialFile:
        """Begins a file of which nothing is here. Raises UnavailableError."""
        path, head = folder / f"{sha256}.gguf", _Head(name, manifest, voucher)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for suffix in (".record", ".parts"):
                path.with_suffix(suffix).unlink(missing_ok=True)
            with path.open("wb") as file:
                file.truncate(manifest.size)
            _replace(path.with_suffix(".manifest"), msgspec.msgpack.encode(head))
            return cls(path, head)
        except OSError as error:
            raise _disk_error(path, error) from error

    @classmethod
    def open(cls, folder: Path, sha256: str) -> PartialFile | None:
        """The one that was begun before; None where there is none that can be used. Raises UnavailableError."""
        path = folder / f"{sha256}.gguf"
        try:
            head = msgspec.msgpack.decode(path.with_suffix(".manifest").read_bytes(), type=_Head)
            if head.manifest.fault is not None or path.stat().st_size != head.manifest.size:
                return None
            return cls(path, head)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        except OSError as error:
            raise _disk_error(path, error) from error

    @property
    def is_whole(self) -> bool:
        """Whether every chunk is here."""
        return len(self.here) == self.manifest.n_chunks

    def has_all(self, chunks: list[int]) -> bool:
        return all(chunk in self.here for chunk in chunks)

    def check_room(self, n_bytes: int) -> None:
        """Raises UnavailableError where the disk has no room for so many bytes more."""
        try:
            free = shutil.disk_usage(self.path.parent).free
        except OSError as error:
            raise _disk_error(self.path, error) from error
        if free < n_bytes + SPARE_BYTES:
            raise UnavailableError(
                f"{self.path.parent}: {n_bytes >> 20} MiB of {self.name} are still to come, the disk has"
                f" {free >> 20} MiB free: free some space, it goes on by itself"
            )

    def store(self, chunk: int, data: bytes) -> bool:
        """Writes a chunk if it is what the manifest says; else False, and nothing is written. Raises UnavailableError,
        after which the chunk counts as not here.
        """
        if not self.manifest.is_good(chunk, data):
            return False
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], chunk * CHUNK_BYTES + written)
        except OSError as error:
            raise _disk_error(self.path, error) from error
        return True

    def sync(self, bits: bytes) -> None:
        """Brings the data to the disk, then the record of it. bits: `here`, taken before. Raises UnavailableError."""
        try:
            os.fdatasync(self._descriptor)
            identity = file_identity(os.fstat(self._descriptor))
            _replace(self.path.with_suffix(".record"), msgspec.msgpack.encode(_Record(identity, bits)))
        except OSError as error:
            raise _disk_error(self.path, error) from error

    def note_part(self, part: Slice) -> None:
        """All that a slice needs is here: after a restart the layout that has it needs no transfer."""
        self.parts = (part, *(other for other in self.parts if not part.holds(other)))[:MAX_PARTS]
        try:
            _replace(self.path.with_suffix(".parts"), msgspec.msgpack.encode(self.parts))
        except OSError as error:
            raise _disk_error(self.path, error) from error

    def read(self, chunk: int) -> bytes | None:
        """The bytes of a chunk, for another device; None if it is not here."""
        if not 0 <= chunk < self.manifest.n_chunks or chunk not in self.here:
            return None
        return self._read(chunk)

    def check_whole(self) -> None:
        """Raises ModelFileError unless the file is the one that its content hash names; it is then removed.
        UnavailableError where the disk cannot be read.
        """
        digest = hashlib.sha256()
        try:
            for chunk in range(self.manifest.n_chunks):
                digest.update(self._read(chunk))
        except OSError as error:
            raise _disk_error(self.path, error) from error
        if digest.hexdigest() != self.sha256:
            self.remove()
            raise ModelFileError(
                f"{self.name}: the manifest of '{self.voucher}' is of another file than sha256 {self.sha256[:8]}…: run"
                ' "meshllm pull" for the model there again'
            )

    def remove(self) -> None:
        """Forgets everything of it; what is mapped stays readable until it is unmapped."""
        for suffix in (".gguf", ".record", ".parts", ".manifest"):
            with contextlib.suppress(OSError):  # a disk that cannot be written: it is looked at anew at the next start
                self.path.with_suffix(suffix).unlink(missing_ok=True)

    def _read(self, chunk: int) -> bytes:
        return os.pread(self._descriptor, self.manifest.length(chunk), chunk * CHUNK_BYTES)

    def _read_parts(self) -> tuple[Slice, ...]:
        try:
            return msgspec.msgpack.decode(self.path.with_suffix(".parts").read_bytes(), type=tuple[Slice, ...])
        except (OSError, msgspec.MsgspecError):
            return ()

    def _recorded(self) -> ChunkSet:
        n_chunks = self.manifest.n_chunks
        try:
            record = msgspec.msgpack.decode(self.path.with_suffix(".record").read_bytes(), type=_Record)
        except (OSError, msgspec.MsgspecError):
            return self._verified()
        if record.identity != file_identity(os.fstat(self._descriptor)) or len(record.bits) != -(-n_chunks // 8):
            return self._verified()
        return ChunkSet(n_chunks, record.bits)

    def _verified(self) -> ChunkSet:
        """What stands in the file, each chunk hashed; holes are passed over."""
        here, position = ChunkSet(self.manifest.n_chunks), 0
        while position < self.manifest.size:
            try:
                position = os.lseek(self._descriptor, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                    break
                raise
            chunk = position // CHUNK_BYTES
            if self.manifest.is_good(chunk, self._read(chunk)):
                here.add(chunk)
            position = (chunk + 1) * CHUNK_BYTES
        return here


class PartialModelFile(ModelFile):
    """The open file while chunks are written into it. Only what was fetched may be read: the rest is zeros."""

    def check_unchanged(self) -> None:
        """As ModelFile, but that it grows is no change."""
        status = os.fstat(self._descriptor)
        if file_identity(status).rsplit(":", 1)[0] != self.identity.rsplit(":", 1)[0]:
            raise ModelFileError(f"{self.path}: the file was cut short while it was in use; it is fetched anew")


def partial_files(folder: Path) -> list[tuple[str, str]]:
    """SHA-256 and name of those that were begun, the one last worked at first."""
    found: list[tuple[int, str, str]] = []
    try:
        for path in folder.glob("*.manifest"):
            head = msgspec.msgpack.decode(path.read_bytes(), type=_Head)
            found.append((path.with_suffix(".gguf").stat().st_mtime_ns, path.stem, head.name))
    except (OSError, msgspec.MsgspecError):
        return []
    return [(sha256, name) for _, sha256, name in sorted(found, reverse=True)]


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _disk_error(path: Path, error: OSError) -> UnavailableError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnavailableError(f"{path.parent}: the disk is full: free some space, it goes on by itself")
    return UnavailableError(f"{error.filename or path}: {error.strerror}; check the disk and the owner of the folder")
