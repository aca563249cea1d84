"""Models on this device: files by their content hash, names that point at them. Synchronous, no network.

    STATE/models/<sha256>.gguf   a registered file's clone, else a hard link to it, else a symbolic link; or a copy
    STATE/models/index.json      names, sizes, the last one used, and hashes that were computed, by the file's identity
    STATE/models/partial/        what is not whole yet; may be deleted at any time

A hash is computed once and kept for (device, inode, size, mtime): a restart must not read gigabytes again, and a file
that was changed behind our back is noticed. The index file itself is model_index.py's.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from meshllm.daemon.model_index import IndexFile, ModelEntry, ModelIndex, identity_of
from meshllm.errors import ConfigError, ModelFileError, NoModelError, UsageError
from meshllm.model.model_file import ModelFile

CHUNK_BYTES: Final = 4 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}")

_FICLONE: Final = 0x40049409  # ioctl of file systems that share blocks between files (btrfs, xfs)

Method = Literal["hard link", "symbolic link", "clone", "copy"]
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model file that is here."""

    name: str
    path: Path
    sha256: str
    size: int
    replaced: str | None = field(default=None, compare=False)  # SHA-256 of what the name stood for until it was added


class ModelStore:
    """The store under one state folder, which is made when something is first put into it."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "models"
        self.partial = self.folder / "partial"
        self._index = IndexFile(self.folder)

    def add(
        self, path: Path, name: str | None = None, *, copy: bool = False, progress: Progress = lambda done, total: None
    ) -> tuple[StoredModel, Method]:
        """Registers a file of this device, after a look whether it can be run, and says how it was put into the store.

        Linked unless `copy`: a hard link costs no space and outlives the original's name. The name is the file's stem
        if not given; one that is taken moves to the new file. Raises NoModelError, ModelFileError, UsageError.
        """
        chosen = name if name is not None else _name_from(path)
        if not valid_name(chosen):
            raise UsageError(f"{chosen!r} cannot name a model: letters, digits and . _ : + -, at most 128; use --name")
        with ModelFile.open(path) as model:
            _ = model.hyperparameters  # refuses what cannot be run, in its own words
        source = path.resolve()
        sha256 = self.sha256_of(source, progress)
        with self._index.change() as index:
            target = self._blob(sha256)
            method = _place(source, target, copy=copy)
            stored = self._enter(index, chosen, target, sha256)
        return stored, method

    def adopt(self, partial: Path, name: str, sha256: str) -> StoredModel:
        """Moves a finished file out of the partial folder into the store; its hash was checked by the caller."""
        with self._index.change() as index:
            target = self._blob(sha256)
            partial.chmod(0o644)
            os.replace(partial, target)
            return self._enter(index, name, target, sha256)

    def _enter(self, index: ModelIndex, name: str, target: Path, sha256: str) -> StoredModel:
        """Gives a file in the store its name, which leaves another file if it had one."""
        before = index.models.get(name)
        replaced = None if before is None or before.sha256 == sha256 else before.sha256
        index.models[name] = ModelEntry(sha256, target.stat().st_size)
        index.last_used = index.last_used or name
        index.remember(target, sha256)
        self._sweep(index)
        return StoredModel(name, target, sha256, index.models[name].size, replaced)

    def remove(self, name: str) -> None:
        """Forgets a name, and the file where no other name has it. Raises NoModelError."""
        with self._index.change() as index:
            if index.models.pop(name, None) is None:
                raise _unknown(name, index)
            if index.last_used == name:
                index.last_used = None
            self._sweep(index)

    def resolve(self, name_or_path: str | None = None) -> StoredModel:
        """The model of that name, or the file at that path; for None the only one, else the one last used.

        Raises NoModelError where there is none, ModelFileError where the file is not what it was.
        """
        index = self._index.read()
        if name_or_path is None:
            return self._resolve_default(index)
        if name_or_path in index.models:
            return self._check(name_or_path, index.models[name_or_path])
        path = Path(name_or_path).expanduser()
        if path.suffix == ".gguf" or "/" in name_or_path:
            if not path.is_file():
                raise NoModelError(f'{path}: no such file; "meshllm models" lists what is here')
            path = path.resolve()
            return StoredModel(_name_from(path), path, self.sha256_of(path), path.stat().st_size)
        raise _unknown(name_or_path, index)

    def mark_used(self, name: str) -> None:
        """This model is the one to serve after a restart where none is named."""
        if self._index.read().last_used == name:
            return
        with self._index.change() as index:
            if name in index.models:
                index.last_used = name

    def sha256_of(self, path: Path, progress: Progress = lambda done, total: None) -> str:
        """SHA-256 of a file, 64 hex digits; remembered where it was hashed before. Raises ModelFileError."""
        try:
            before = identity_of(path)
            known = self._index.read().hashes.get(before)
            if known is not None:
                return known
            sha256 = _hash(path, progress)
            if identity_of(path) != before:
                raise ModelFileError(f"{path}: the file changed while it was read; try again when it is complete")
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read ({error.strerror}); choose a readable .gguf file") from error
        try:
            with self._index.change() as index:
                index.remember(path, sha256)
        except ConfigError:  # a store that cannot be written still serves a file that can be read
            return sha256
        return sha256

    def list(self) -> tuple[StoredModel, ...]:
        """All models by name, whether or not their files are still there."""
        models = sorted(self._index.read().models.items())
        return tuple(StoredModel(name, self._blob(e.sha256), e.sha256, e.size) for name, e in models)

    def _resolve_default(self, index: ModelIndex) -> StoredModel:
        name = index.last_used
        if name is None and len(index.models) == 1:
            (name,) = index.models
        if name is not None and name in index.models:
            return self._check(name, index.models[name])
        if not index.models:
            raise NoModelError('no model on this device yet: run "meshllm pull smollm2", or "meshllm pull FILE.gguf"')
        raise NoModelError(f"several models and none chosen: {', '.join(sorted(index.models))}; choose with --model")

    def _check(self, name: str, entry: ModelEntry) -> StoredModel:
        """The stored file, after a look whether it is still the one that was registered."""
        path = self._blob(entry.sha256)
        if not path.exists():
            target = f"{path.readlink()}, which {name} links to, is gone" if path.is_symlink() else "its file is gone"
            raise NoModelError(f'model {name}: {target}; run "meshllm pull" for it again')
        found = self.sha256_of(path)
        if found != entry.sha256:
            raise ModelFileError(
                f"model {name}: the file was changed after it was registered (sha256 {found[:8]}…, expected"
                f' {entry.sha256[:8]}…); run "meshllm pull" for it again'
            )
        return StoredModel(name, path, entry.sha256, entry.size)

    def _blob(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.gguf"

    def _sweep(self, index: ModelIndex) -> None:
        """Deletes files that no name has any more."""
        used = {entry.sha256 for entry in index.models.values()}
        for path in self.folder.glob("*.gguf"):
            if path.stem not in used:
                path.unlink()


def valid_name(name: str) -> bool:
    """Whether a model may be kept under it."""
    return _NAME.fullmatch(name) is not None


def _place(source: Path, target: Path, *, copy: bool) -> Method:
    """Puts the file at target; one that is there already stays if it is the same file."""
    if target.exists() and target.samefile(source) and not copy:
        return "symbolic link" if target.is_symlink() else "hard link"
    temporary = target.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    method: Method = "clone"
    if not _clone(source, temporary):
        if copy:
            shutil.copyfile(source, temporary)
            method = "copy"
        else:
            method = _link(source, temporary)
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # os.replace leaves it where both names are one file already
    return method


def _clone(source: Path, target: Path) -> bool:
    """A copy that shares the source's blocks until one is written to: the best of all, where the file system can."""
    with source.open("rb") as file, target.open("wb") as clone:
        try:
            fcntl.ioctl(clone.fileno(), _FICLONE, file.fileno())
            return True
        except OSError:
            target.unlink()
            return False


def _link(source: Path, target: Path) -> Method:
    try:
        os.link(source, target)
        return "hard link"
    except OSError:  # another file system, or a file that is not ours to link
        target.symlink_to(source)
        return "symbolic link"


def _name_from(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._:+-]+", "-", path.stem).lstrip("._:+-")[:128] or "model"


def _hash(path: Path, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        total = os.fstat(file.fileno()).st_size
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(done, total)
    return digest.hexdigest()


def _unknown(name: str, index: ModelIndex) -> NoModelError:
    close = difflib.get_close_matches(name, index.models, n=1)
    known = f"did you mean {close[0]}?" if close else f"here are: {', '.join(sorted(index.models)) or 'none'}"
    return NoModelError(f'no model {name!r} on this device; {known} ("meshllm pull" gets one)')
