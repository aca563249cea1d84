"""Gets one model's file, or the parts of it that are wanted, from the peers that have it. Owned by the control loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import trio

from meshllm.daemon.partial_file import PartialFile
from meshllm.daemon.source_links import OFFER_S, Dial, SourceLinks, offer_of
from meshllm.errors import LinkLostError, ModelFileError, NoModelError, RemoteProtocolError, UnavailableError
from meshllm.layout.layout import NodeId
from meshllm.log import Logger
from meshllm.mesh.facts import PeerView
from meshllm.mesh.file_messages import FileHello, Offer
from meshllm.mesh.manifest import Manifest
from meshllm.mesh.messages import ModelHash

STUCK_S: Final = 10.0  # without anybody who has what is missing, before whoever waits is told


class Fetch:
    """See the head of this file. `run` in a nursery, then `get` by anyone."""

    def __init__(
        self,
        folder: Path,
        own: NodeId,
        sha256: str,
        *,
        peers: Callable[[], Sequence[PeerView]],
        dial: Dial,
        is_busy: Callable[[], bool],
        log: Logger,
    ) -> None:
        """folder: of partial files. The rest as SourceLinks takes it."""
        self.sha256 = sha256
        self._folder = folder
        self._hello = FileHello(own, ModelHash(sha256))
        self._peers = peers
        self._dial = dial
        self._is_busy = is_busy
        self._log = log
        self._wants: dict[object, list[int]] = {}
        self._beginning = trio.Lock()
        self._begun = trio.Event()
        self._life = trio.CancelScope()
        self._links: SourceLinks | None = None
        self.part: PartialFile | None = None
        self.is_moving = False  # into the store

    async def run(self) -> None:
        """Runs the links while anything is wanted, until cancelled or stopped."""
        with self._life:
            await self._begun.wait()
            if self._links is not None:
                await self._links.run()

    def stop(self) -> None:
        """Ends `run`."""
        self._life.cancel()

    async def begin(self) -> PartialFile:
        """The file with its manifest, from disk or else from a peer. Raises NoModelError, UnavailableError."""
        async with self._beginning:
            if self.part is None:
                kept = await trio.to_thread.run_sync(PartialFile.open, self._folder, self.sha256)
                self.part = kept or await self._create()
                self._links = SourceLinks(
                    self.part, self._hello, peers=self._peers, dial=self._dial, is_busy=self._is_busy, log=self._log
                )
                self._begun.set()
            return self.part

    async def get(self, wanted: Callable[[Manifest], list[int]]) -> None:
        """Returns when these chunks are here and on disk. Raises NoModelError, UnavailableError; ModelFileError where
        the device that vouched for the file is wrong.
        """
        part = await self.begin()
        assert self._links is not None  # begun
        chunks, key = wanted(part.manifest), object()
        missing = [chunk for chunk in chunks if chunk not in part.here]
        if missing:
            await trio.to_thread.run_sync(part.check_room, part.manifest.bytes_of(missing))
            self._wants[key] = chunks
            try:
                self._renew(self._links)
                await _wait(self._links, part, chunks)
            finally:
                del self._wants[key]
                self._renew(self._links)
        await self._links.sync()

    def progress(self) -> tuple[int, int]:
        """Bytes that are here of what is wanted, and bytes wanted."""
        if self.part is None:
            return 0, 0
        wanted = {chunk for chunks in self._wants.values() for chunk in chunks}
        manifest, here = self.part.manifest, self.part.here
        return manifest.bytes_of(chunk for chunk in wanted if chunk in here), manifest.bytes_of(wanted)

    @property
    def is_wanted(self) -> bool:
        """Whether anything is awaited."""
        return bool(self._wants)

    @property
    def sources(self) -> list[NodeId]:
        """Devices that give chunks now."""
        return [] if self._links is None else self._links.nodes

    @property
    def bytes_received(self) -> int:
        """Of chunks, since the start."""
        return 0 if self._links is None else self._links.bytes_received

    def problem(self) -> str | None:
        """Why what is wanted does not come, if it does not."""
        return None if self._links is None else self._links.problem()

    def _renew(self, links: SourceLinks) -> None:
        links.want(list(dict.fromkeys(chunk for chunks in self._wants.values() for chunk in chunks)))

    async def _create(self) -> PartialFile:
        """Begins the file with the manifest of the first peer that offers it; one that has the whole goes first."""
        reason = "no connected device has it"
        for peer in sorted(self._peers(), key=lambda peer: not peer.whole):
            try:
                offer = await self._ask(peer)
            except (LinkLostError, RemoteProtocolError, trio.TooSlowError) as error:
                reason = f"'{peer.name}' does not give it: {error}"
                continue
            name = peer.model_name or f"model-{self.sha256[:8]}"
            self._log.info("fetch_begun", model=name, sha256=self.sha256[:16], bytes=offer.manifest.size, of=peer.name)
            return await trio.to_thread.run_sync(
                PartialFile.create, self._folder, self.sha256, name, offer.manifest, peer.name
            )
        raise NoModelError(f"the model with sha256 {self.sha256[:8]}… cannot be fetched: {reason}")

    async def _ask(self, peer: PeerView) -> Offer:
        link = await self._dial(peer, self._hello)
        try:
            with trio.fail_after(OFFER_S):
                return await offer_of(link)
        finally:
            with trio.CancelScope(shield=True):
                await link.close()


async def _wait(links: SourceLinks, part: PartialFile, chunks: list[int]) -> None:
    stuck_since = math.inf
    while not part.has_all(chunks):
        if links.trouble is not None:
            raise links.trouble
        now, problem = trio.current_time(), links.problem()
        stuck_since = math.inf if problem is None else min(stuck_since, now)
        if problem is not None and now - stuck_since >= STUCK_S:
            if links.is_disputed:
                raise ModelFileError(
                    f"{part.name}: the manifest of '{part.voucher}' is not that of other devices, and {problem}"
                )
            raise UnavailableError(problem)
        with trio.move_on_after(STUCK_S / 10):
            await links.changed.wait()
