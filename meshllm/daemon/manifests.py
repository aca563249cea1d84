"""Manifests of whole files: made once, which reads the file, and kept by content hash under STATE/models/manifests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from meshllm.errors import ModelFileError
from meshllm.mesh.manifest import CHUNK_BYTES, Manifest
from meshllm.model.model_file import ModelFile
from meshllm.model.slice_bytes import head_bytes


def read_manifest(path: Path) -> Manifest | None:
    """The one that was kept; None where there is none, or where it is not what was written."""
    try:
        digest, body = msgspec.msgpack.decode(path.read_bytes(), type=tuple[bytes, bytes])
        if hashlib.sha256(body).digest() != digest:
            return None
        found = msgspec.msgpack.decode(body, type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None
    return None if found.fault else found


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Keeps it. Raises OSError."""
    body = msgspec.msgpack.encode(manifest)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.msgpack.encode((hashlib.sha256(body).digest(), body)))
    temporary.replace(path)


def make_manifest(file: ModelFile, sha256: str, size: int) -> Manifest:
    """The manifest of a file, made in the same pass as its content hash. Raises ModelFileError where that differs."""
    whole, hashes = hashlib.sha256(), []
    for start in range(0, size, CHUNK_BYTES):
        data = file.read(start, min(CHUNK_BYTES, size - start))
        whole.update(data)
        hashes.append(hashlib.sha256(data).digest())
    if whole.hexdigest() != sha256:
        raise ModelFileError(f'{file.path}: is not what it was when it was registered; run "meshllm pull" for it again')
    return Manifest(size, head_bytes(file.gguf, size), b"".join(hashes))
