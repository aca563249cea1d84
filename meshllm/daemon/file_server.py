"""Gives chunks of this device's model file to peers: the sending side of file links. Owned by the control loop.

Disk and hashes are a worker thread's. While answers run, here or where the chunks go, all links together keep to
BUSY_BYTES_PER_S.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import trio

from meshllm.daemon.manifests import make_manifest, read_manifest, write_manifest
from meshllm.daemon.served_model import ServedModel
from meshllm.errors import LinkLostError, ModelFileError, RemoteProtocolError
from meshllm.log import Logger
from meshllm.mesh.file_messages import Absent, AskChunk, Chunk, Farewell, FileHello, Offer
from meshllm.mesh.manifest import CHUNK_BYTES, Manifest
from meshllm.mesh.transfer import Bandwidth
from meshllm.model.model_file import ModelFile
from meshllm.net.file_link import FileLink, answer_file
from meshllm.net.listener import Incoming

BUSY_BYTES_PER_S: Final = 4 << 20  # a third of a 100 Mbit/s link; an answer on two devices needs a tenth
MAX_LINKS: Final = 32
IDLE_S: Final = 30.0  # a link on which nothing is asked for so long is closed


class Source(Protocol):
    """A file, or the part of one, that chunks are read from."""

    @property
    def manifest(self) -> Manifest: ...
    def read(self, chunk: int) -> bytes | None: ...


class WholeFile:
    """A file that is here as a whole."""

    def __init__(self, file: ModelFile, manifest: Manifest) -> None:
        self._file = file
        self.manifest = manifest

    def read(self, chunk: int) -> bytes | None:
        """The bytes of a chunk; None if there is no such one."""
        if not 0 <= chunk < self.manifest.n_chunks:
            return None
        return self._file.read(chunk * CHUNK_BYTES, self.manifest.length(chunk))


class FileServer:
    """See the head of this file."""

    def __init__(
        self, folder: Path, served: Callable[[], ServedModel | None], is_busy: Callable[[], bool], log: Logger
    ) -> None:
        """folder: for manifests that were made. served: the model that is given. is_busy: whether answers run here."""
        self._folder = folder
        self._served = served
        self._is_busy = is_busy
        self._log = log
        self._bandwidth = Bandwidth(BUSY_BYTES_PER_S)
        self._hashing = trio.CapacityLimiter(1)
        self._n_links = 0
        self.bytes_sent = 0

    async def answer(self, incoming: Incoming, hello: FileHello) -> None:
        """Serves a file link to its end; nothing that the peer does gets past it."""
        try:
            link = await answer_file(incoming)
        except RemoteProtocolError as error:
            self._log.warning("file_link_refused", peer=hello.node, reason=str(error))
            return
        self._n_links += 1
        try:
            await self._serve(link, hello)
        except (LinkLostError, trio.TooSlowError):
            self._log.debug("file_link_ended", peer=hello.node)
        except (RemoteProtocolError, ModelFileError, OSError) as error:
            self._log.warning("file_link_failed", peer=hello.node, reason=str(error))
        finally:
            self._n_links -= 1
            with trio.CancelScope(shield=True):
                await link.close()

    async def _serve(self, link: FileLink, hello: FileHello) -> None:
        served = self._served()
        if served is None or served.sha256 != hello.model:
            await link.send(Farewell("serves another model now"))
            return
        if self._n_links > MAX_LINKS:
            await link.send(Farewell("gives its file to others at the moment"))
            return
        source: Source
        if served.part is not None:
            source, holds = served.part, served.part.here.bits
        else:
            try:
                manifest = await trio.to_thread.run_sync(self._manifest, served, limiter=self._hashing)
            except ModelFileError as error:
                await link.send(Farewell(f"cannot give its file: {error}"))
                raise
            source, holds = WholeFile(served.file, manifest), b""
        await link.send(Offer(source.manifest, holds))
        while True:
            with trio.fail_after(IDLE_S):
                asked = await link.receive()
            if not isinstance(asked, AskChunk):
                raise RemoteProtocolError(f"sent {type(asked).__name__} instead of AskChunk")
            data = await trio.to_thread.run_sync(source.read, asked.chunk)
            message = Absent(asked.chunk) if data is None else Chunk(asked.chunk, data)
            await link.send(message, partial(self._make_room, asked.slowly))

    async def _make_room(self, slowly: bool, n_bytes: int) -> None:
        self.bytes_sent += n_bytes
        if slowly or self._is_busy():
            await trio.sleep(self._bandwidth.delay(n_bytes, trio.current_time()))

    def _manifest(self, served: ServedModel) -> Manifest:
        path = self._folder / f"{served.sha256}.manifest"
        kept = read_manifest(path)
        if kept is not None and kept.size == served.size:
            return kept
        manifest = make_manifest(served.file, served.sha256, served.size)
        with contextlib.suppress(OSError):  # a store that cannot be written still serves
            write_manifest(path, manifest)
        return manifest
