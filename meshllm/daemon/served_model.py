"""The one model that a daemon serves: found in the store, opened in a worker thread, looked for again where there is
none.

Where the store has none, a part of one that peers have may be served (`serve_part`) until it is whole.
A model that is served stays: another one pulled meanwhile is served after a restart, or when it is asked for by name,
and a file that takes its path is not read. It goes when somebody writes into its file; what is there then is opened,
and, since it may be damaged, given up for a file that takes its path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from meshllm.daemon.model_index import identity_of
from meshllm.daemon.model_store import ModelStore
from meshllm.daemon.partial_file import PartialFile
from meshllm.errors import MeshLLMError, ModelFileError, NoModelError, UnavailableError
from meshllm.kernels.binding import guard_map
from meshllm.mesh.facts import ModelFacts
from meshllm.mesh.messages import ModelHash
from meshllm.model.model_file import ModelFile
from meshllm.model.weight_sizes import measure_shape
from meshllm.status import DaemonState, ModelStatus

POLL_S: Final = 1.0  # between looks for a model while there is none, and at the one that is served: a stat or two


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An open model file and its facts. part: what is here of it, where not all is."""

    name: str
    sha256: str
    size: int  # bytes
    file: ModelFile
    part: PartialFile | None = None

    def facts(self) -> ModelFacts:
        """What the mesh must know of it."""
        h = self.file.hyperparameters
        shape = measure_shape(h, self.file.gguf.tensors.values())
        held = () if self.part is None else self.part.parts
        return ModelFacts(hash=ModelHash(self.sha256), name=self.name, shape=shape, whole=self.part is None, held=held)

    def status(self) -> ModelStatus:
        """What people are told of it."""
        h = self.file.hyperparameters
        return ModelStatus(
            name=self.name,
            sha256=self.sha256,
            architecture=h.architecture,
            file_bytes=self.size,
            context_length=h.context_length,
        )


class ModelFollower:
    """Finds the model to serve and holds it, or the reason why there is none."""

    def __init__(self, store: ModelStore, wanted: str | None, changed: Callable[[], None]) -> None:
        """changed: called in the trio loop when `served` or `error` has changed."""
        self._store = store
        self._wanted = wanted
        self.named = wanted is not None  # a certain model was asked for
        self._changed = changed
        self._again = trio.Event()
        self._partial: ServedModel | None = None  # to be served, where the store has nothing
        self._written: str | None = None  # device and inode of a file that was written into: it may be damaged
        self.served: ServedModel | None = None
        self.error: MeshLLMError | None = None

    def model(self, name: str | None = None) -> ServedModel:
        """The model served, if `name` is None, its name or hash. Raises NoModelError, ModelFileError,
        UnavailableError.
        """
        if self.served is None:
            raise self.error or UnavailableError("the daemon is still opening its model; try again in a moment")
        if name is None or name in (self.served.name, self.served.sha256):
            return self.served
        raise NoModelError(
            f'no model "{name}" is served here, but "{self.served.name}"; "meshllm models" lists what is stored'
        )

    def facts(self) -> ModelFacts | None:
        """Of the model served, for the mesh."""
        return None if self.served is None else self.served.facts()

    def state(self) -> tuple[DaemonState, str | None]:
        """What the daemon's state is without a model."""
        if self.error is None:
            return "starting", "looking for the model"
        return ("no-model" if isinstance(self.error, NoModelError) else "failed"), str(self.error)

    @property
    def wanted_of_peers(self) -> str | None:
        """The name of the model that only peers may have; "" for any. None while nothing is wanted of them."""
        if self.served is not None or not isinstance(self.error, NoModelError):
            return None
        if self._wanted is None:
            return None if self._store.list() else ""
        return None if is_path(self._wanted) else self._wanted

    def serve_part(self, served: ServedModel) -> None:
        """Serves a file of which some is here, until `part_is_whole`."""
        self._partial = served
        self._again.set()

    def look_again(self) -> None:
        """Looks at once where there was none."""
        self._again.set()

    def part_is_whole(self) -> None:
        """What was served in part is in the store now: it is opened there."""
        self._partial = None
        self._again.set()

    async def run(self) -> None:
        """Looks until there is a model, and again when its file was changed. An error is told once, until there is
        another one.
        """
        while True:
            self._again = trio.Event()
            stamp = self._stamp()  # hashing a file changes the index: the look after it finds what this one has found
            try:
                served = self._partial
                if served is None:
                    served = await trio.to_thread.run_sync(self._open, abandon_on_cancel=True)
            except MeshLLMError as error:
                if str(error) != str(self.error):
                    self._tell(None, error)
                while self._stamp() == stamp and not self._again.is_set():
                    with trio.move_on_after(POLL_S):
                        await self._again.wait()
            else:
                self._tell(served, None)
                await self._watch(served)

    def lose(self, file: ModelFile | None, error: MeshLLMError) -> None:
        """A file that is served cannot be used any more; what is there now is opened."""
        if self.served is not None and self.served.file is file:
            self._partial = None
            self._tell(None, error)

    def _tell(self, served: ServedModel | None, error: MeshLLMError | None) -> None:
        self.served, self.error = served, error
        self._changed()

    async def _watch(self, served: ServedModel) -> None:
        """Until it is served no longer."""
        file, inode = served.file, _inode(served.file.identity)
        while self.served is served and (served.part is None or served is self._partial):
            await trio.sleep(POLL_S)
            try:
                file.check_unchanged()
            except ModelFileError as error:
                self._written = inode
                self.lose(file, error)
            else:
                if self._written == inode and _identity(file.path) not in (None, file.identity):
                    why = "replaced, after somebody had written into it; it is opened anew"
                    self.lose(file, ModelFileError(f"{file.path}: {why}"))

    def _open(self) -> ServedModel:
        stored = self._store.resolve(self._wanted)
        file = ModelFile.open(stored.path)
        try:
            guard_map(file, file.data)
            if file.identity != identity_of(stored.path) or self._store.sha256_of(stored.path) != stored.sha256:
                raise ModelFileError(f"{stored.path}: the file was replaced while it was opened; it is opened again")
            _ = file.hyperparameters, file.tokenizer, file.chat_template  # slow the first time: here, not in the loop
        except BaseException:
            file.close()
            raise
        with contextlib.suppress(MeshLLMError):  # a store that cannot be written still serves
            self._store.mark_used(stored.name)
        return ServedModel(stored.name, stored.sha256, stored.size, file)

    def _stamp(self) -> tuple[str | None, ...]:
        """Changes when looking again may find something else."""
        paths = [self._store.folder / "index.json"]
        with contextlib.suppress(OSError):  # no descriptor is left, or the folder went while it was read
            paths += sorted(self._store.folder.glob("*.gguf"))
        if self._wanted is not None and is_path(self._wanted):
            paths.append(Path(self._wanted).expanduser())
        return tuple(_identity(path) for path in paths)


def is_path(wanted: str) -> bool:
    """Whether a model was named by its file."""
    return "/" in wanted or wanted.endswith(".gguf")


def _inode(identity: str) -> str:
    return identity.rsplit(":", 2)[0]


def _identity(path: Path) -> str | None:
    try:
        return identity_of(path)
    except OSError:
        return None
