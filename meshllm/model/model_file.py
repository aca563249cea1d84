"""A model file on disk: one memory map, and what is read from it, each part when it is first asked for.

It never copies weights: `tensor` gives views of the map. Pure but for the map itself; nothing is written.
"""

from __future__ import annotations

import mmap
import os
import re
import weakref
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from meshllm.errors import ModelFileError, NoModelError
from meshllm.model.gguf import GgufFile, open_gguf
from meshllm.model.hyperparameters import Hyperparameters, check_tensors, read_hyperparameters

if TYPE_CHECKING:
    from meshllm.model.chat_template import ChatTemplate
    from meshllm.model.tokenizer import Tokenizer

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class ModelFile:
    """An open GGUF. A file with a vocabulary alone opens too; only `hyperparameters` refuses it.

    It stays the file that was opened when another one takes its name. Close it when its views are no longer used, or
    leave it to the last reference; the map itself lives until the last view is gone.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Takes the descriptor over."""
        self.path = path
        self.name = path.name
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        status = os.fstat(descriptor)
        self.identity = file_identity(status)
        self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if status.st_size else b""
        self._view = memoryview(self._map)
        self.gguf: GgufFile = open_gguf(self._view, self.name)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Maps and indexes the file. Raises NoModelError where there is none, ModelFileError where it is not usable."""
        path = Path(path)
        try:
            if path.exists() and not path.is_file():  # a FIFO would keep us waiting for ever
                raise ModelFileError(f"{path}: cannot be read (it is no regular file); choose a readable .gguf file")
            return cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            raise NoModelError(f'{path}: no such file; "meshllm models" lists what is here') from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ModelFileError(f"{path}: cannot be read ({reason}); choose a readable .gguf file") from error
        except ModelFileError as error:
            raise _explain_shard(path, error) from None

    @property
    def data(self) -> memoryview:
        """The whole file, bytes."""
        return self._view

    def read(self, start: int, size: int) -> bytes:
        """Bytes from the disk, not by way of the map; fewer where the file was cut short. Raises OSError."""
        return os.pread(self._descriptor, size, start)

    def check_unchanged(self) -> None:
        """Raises ModelFileError where the file was written to or cut short since it was opened."""
        if file_identity(os.fstat(self._descriptor)) != self.identity:
            raise ModelFileError(
                f"{self.path}: the file was changed while it was in use; replace a model file by renaming another over"
                " it, never by writing into it"
            )

    @cached_property
    def hyperparameters(self) -> Hyperparameters:
        """The numbers of the model, after its tensors were checked against them. Raises ModelFileError."""
        found = read_hyperparameters(self.gguf)
        check_tensors(self.gguf, found)
        return found

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Built on first use (a 128k vocabulary: see tokenizer.py). Raises ModelFileError."""
        from meshllm.model.tokenizer import Tokenizer  # here: to open a file needs no tokenizer library

        return Tokenizer.from_gguf(self.gguf)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The file's own template; None where it has none. Raises ModelFileError where it cannot be compiled."""
        from meshllm.model.chat_template import ChatTemplate

        source = self.gguf.find_str("tokenizer.chat_template")
        if source is None:
            return None
        tokenizer = self.tokenizer
        try:
            return ChatTemplate(source, tokenizer.text_of(tokenizer.bos_id), tokenizer.text_of(tokenizer.eos_id))
        except ModelFileError as error:
            raise ModelFileError(f"{self.name}: {error}") from error

    def tensor(self, name: str) -> memoryview:
        """Bytes of a tensor, a view of the map. Raises ModelFileError where the file has none of that name."""
        info = self.gguf.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self.name}: tensor {name} is missing: the file is no complete model; get it again")
        return self._view[info.offset : info.offset + info.size]

    def will_need(self, name: str, rows: slice) -> None:
        """These rows of a tensor are read soon: where the system can, it fetches their pages from disk meanwhile."""
        if isinstance(self._map, mmap.mmap) and not self._map.closed and hasattr(mmap, "MADV_WILLNEED"):
            info = self.gguf.tensors[name]
            row_size = info.size // info.shape[0]
            start = (info.offset + rows.start * row_size) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start, info.offset + rows.stop * row_size - start)

    def drop_pages(self, name: str) -> None:
        """The tensor's pages need not stay in this process's memory: they were read for the last time for a while."""
        if isinstance(self._map, mmap.mmap) and not self._map.closed:
            info = self.gguf.tensors[name]
            start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, info.offset + info.size - start)

    def close(self) -> None:
        """Gives the map up; pages go when the last view of a tensor is gone."""
        self._close()
        self._view.release()
        if isinstance(self._map, mmap.mmap):
            try:
                self._map.close()
            except BufferError:  # views are in use: the map is freed with them
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def file_identity(status: os.stat_result) -> str:
    """Changes when a file is replaced or written to: "device:inode:size:mtime_ns"."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _explain_shard(path: Path, error: ModelFileError) -> ModelFileError:
    """For a shard of a split model: which other shard is missing beside it."""
    match = _SHARD.fullmatch(path.name)
    if match is None or "shard of a split model" not in str(error):
        return error
    count = int(match["count"])
    for number in range(1, min(count, 1000) + 1):
        sibling = path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf")
        if not sibling.exists():
            return ModelFileError(
                f"{path.name}: split model, shard {number} of {count} missing: {sibling.name}; get all shards, then"
                ' merge them with "llama-gguf-split --merge" and use the merged file'
            )
    return ModelFileError(
        f'{error}, with "llama-gguf-split --merge {match["stem"]}-00001-of-{match["count"]}.gguf OUT.gguf"'
    )
