"""The index of the model store: names, sizes, the model last used, and hashes that were computed.

Several processes (daemon, commands) use one store: changes are made under a lock, and the file is replaced as a whole,
so a reader needs no lock and sees one state or the other.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from meshllm.errors import ConfigError
from meshllm.model.model_file import file_identity

MAX_HASHES: Final = 256  # remembered; the oldest go first


class ModelEntry(msgspec.Struct, frozen=True):
    """The file that a name stands for."""

    sha256: str
    size: int


class ModelIndex(msgspec.Struct):
    """What the index holds."""

    version: int = 1
    models: dict[str, ModelEntry] = {}
    hashes: dict[str, str] = {}  # identity_of(file) -> sha256, oldest first
    last_used: str | None = None

    def remember(self, path: Path, sha256: str) -> None:
        """Keeps the hash of a file as it is now."""
        identity = identity_of(path)
        self.hashes.pop(identity, None)
        self.hashes[identity] = sha256
        for old in list(self.hashes)[:-MAX_HASHES]:
            del self.hashes[old]


class IndexFile:
    """index.json in a folder that is made when the index is first changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "index.json"

    def read(self) -> ModelIndex:
        """Raises ConfigError where the file is damaged or not ours to read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=ModelIndex)
        except FileNotFoundError:
            return ModelIndex()
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read ({error.strerror}); check its owner") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self._path}: damaged ({error}); delete it and register the models again") from error

    @contextmanager
    def change(self) -> Iterator[ModelIndex]:
        """The index, to be changed: written back when the block ends without an error. Raises ConfigError."""
        try:
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / "partial").mkdir(parents=True, exist_ok=True)
            with (self._folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                index = self.read()
                yield index
                temporary = self._path.with_suffix(".new")
                temporary.write_bytes(msgspec.json.format(msgspec.json.encode(index)))
                os.replace(temporary, self._path)
        except OSError as error:
            where = error.filename or self._folder
            raise ConfigError(f"{where}: cannot be written ({error.strerror}); check the state folder") from error


def identity_of(path: Path) -> str:
    """Of the file that is there now: see file_identity."""
    return file_identity(path.stat())
