"""A file of which some chunks are here: what counts after a crash, a damaged disk and a full one."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshllm.daemon.partial_file import PartialFile, partial_files
from meshllm.errors import ModelFileError, UnavailableError
from meshllm.mesh.manifest import CHUNK_BYTES, Manifest
from tests.disks import tmpfs

DATA = random.Random(3).randbytes(5 * CHUNK_BYTES + 17)
CHUNKS = [DATA[i : i + CHUNK_BYTES] for i in range(0, len(DATA), CHUNK_BYTES)]
MANIFEST = Manifest(len(DATA), 100, b"".join(hashlib.sha256(chunk).digest() for chunk in CHUNKS))
SHA256 = hashlib.sha256(DATA).hexdigest()


def begin(folder: Path, manifest: Manifest = MANIFEST, sha256: str = SHA256) -> PartialFile:
    return PartialFile.create(folder, sha256, "model", manifest, "kitchen")


def put(part: PartialFile, *chunks: int, sync: bool = True) -> None:
    for chunk in chunks:
        assert part.store(chunk, CHUNKS[chunk])
        part.here.add(chunk)
    if sync:
        part.sync(part.here.bits)


def opened(folder: Path) -> PartialFile:
    part = PartialFile.open(folder, SHA256)
    assert part is not None
    return part


def test_what_was_synced_is_here_after_a_restart_without_being_read(tmp_path: Path) -> None:
    put(begin(tmp_path), 0, 2, 5)
    with (tmp_path / f"{SHA256}.gguf").open("r+b") as file:  # as if the disk forgot: only a hash could tell
        before = os.fstat(file.fileno())
        file.seek(2 * CHUNK_BYTES)
        file.write(b"?")
    os.utime(tmp_path / f"{SHA256}.gguf", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert list(opened(tmp_path).here) == [0, 2, 5]


def test_what_was_written_but_not_recorded_is_found_and_verified(tmp_path: Path) -> None:
    part = begin(tmp_path)
    put(part, 0, 1)
    put(part, 3, 5, sync=False)  # and then kill -9
    assert list(opened(tmp_path).here) == [0, 1, 3, 5]


def test_record_without_its_data_is_not_believed(tmp_path: Path) -> None:
    put(begin(tmp_path), 0, 1, 2)
    with (tmp_path / f"{SHA256}.gguf").open("r+b") as file:  # a power cut lost a page
        file.seek(CHUNK_BYTES + 5)
        file.write(bytes(4096))
    assert list(opened(tmp_path).here) == [0, 2]


def test_damaged_chunk_is_not_written(tmp_path: Path) -> None:
    part = begin(tmp_path)
    assert not part.store(1, CHUNKS[2])
    assert not part.store(5, CHUNKS[5][:-1])
    assert part.read(1) is None
    assert list(opened(tmp_path).here) == []


def test_whole_file_is_checked_against_its_content_hash(tmp_path: Path) -> None:
    part = begin(tmp_path)
    put(part, *range(6))
    assert part.is_whole
    part.check_whole()
    lie = begin(tmp_path / "other", sha256="ab" * 32)  # a manifest that fits together, of another file
    put(lie, *range(6))
    with pytest.raises(ModelFileError, match="manifest of 'kitchen' is of another file"):
        lie.check_whole()
    assert partial_files(tmp_path / "other") == []


def test_damaged_manifest_on_disk_begins_anew(tmp_path: Path) -> None:
    put(begin(tmp_path), 0)
    (tmp_path / f"{SHA256}.manifest").write_bytes(b"\x93\xa1")
    assert PartialFile.open(tmp_path, SHA256) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", 3) as folder:
        yield folder


def test_full_disk_is_said_and_nothing_half_written_counts(small_disk: Path) -> None:
    part = begin(small_disk)
    with pytest.raises(UnavailableError, match="the disk has 2 MiB free"):
        part.check_room(len(DATA))
    put(part, 0, 1)
    with pytest.raises(UnavailableError, match="the disk is full: free some space"):
        put(part, 2, 3, 4)
    assert list(opened(small_disk).here) == list(part.here)
    assert 2 <= len(part.here) < 5
