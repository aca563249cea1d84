"""What this daemon gets from its peers: a model where it has none, and the parts that layouts give it. Owned by
the control loop.

A daemon without a model takes the one that it was told to serve, or that most peers serve: its head first, with which
it is a root. Parts follow when a driver needs them. A file that has become whole moves into the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import trio

from meshllm.daemon.fetch import Fetch
from meshllm.daemon.model_store import ModelStore, valid_name
from meshllm.daemon.partial_file import PartialFile, partial_files
from meshllm.daemon.parts import chunks_of, open_part
from meshllm.daemon.served_model import ModelFollower
from meshllm.daemon.source_links import Dial
from meshllm.errors import MeshLLMError, ModelFileError, NoModelError, UnavailableError
from meshllm.layout.layout import NodeId
from meshllm.log import Logger
from meshllm.mesh.facts import PeerView
from meshllm.mesh.manifest import Manifest
from meshllm.mesh.messages import ModelHash
from meshllm.model.slicing import Slice
from meshllm.status import FetchStatus

LOOK_S: Final = 0.5  # between looks for a peer with a model, while there is none
AGAIN_S: Final = 5.0  # after a fetch failed
MAX_FETCHES: Final = 4  # models at once

Held = Callable[[ModelHash, Slice, str | None], None]


class Fetcher:
    """See the head of this file."""

    def __init__(
        self,
        *,
        own: NodeId,
        store: ModelStore,
        models: ModelFollower,
        peers: Callable[[], Sequence[PeerView]],
        dial: Dial,
        is_busy: Callable[[], bool],
        held: Held,
        log: Logger,
    ) -> None:
        """peers: all that there are, as now. held: told when a part was gathered, or why it cannot be."""
        self._own = own
        self._store = store
        self._models = models
        self._peers = peers
        self._dial = dial
        self._is_busy = is_busy
        self._held = held
        self._log = log
        self._fetches: dict[str, Fetch] = {}
        self._gathering = trio.CancelScope()
        self._problem: tuple[str, str] | None = None  # SHA-256, why the last one failed
        self._distrusted: set[str] = set()  # names of devices with a wrong manifest
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Runs until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                has_failed = await self._look()
                await trio.sleep(AGAIN_S if has_failed else LOOK_S)

    async def _look(self) -> bool:
        """Gets a model where there is none. Whether that failed."""
        sha256: str | None = None
        try:
            self._leave_stale_part()
            wanted = self._models.wanted_of_peers
            sha256 = None if wanted is None else self._choose(wanted)
            if sha256 is not None:
                await self._serve_part(sha256)
                self._problem = None
        except MeshLLMError as error:
            self.failed(sha256 or "", str(error))
            return True
        return False

    def _leave_stale_part(self) -> None:
        """A part that was begun when the mesh served another model, and that nobody can complete, is left for the
        mesh's own, unless it was asked for by name.
        """
        served, live = self._models.served, {peer.model for peer in self.live_peers() if peer.model}
        if served is None or served.part is None or self._models.named:
            return
        if live and served.sha256 not in live:
            self._forget(self.fetch(served.sha256))
            self._models.lose(served.file, NoModelError(f"no connected device serves {served.name} any more"))

    # --- parts of the served model

    def has_part(self, part: Slice) -> bool:
        """Whether all that a slice of the served model needs is here."""
        served = self._models.served
        return served is not None and (served.part is None or served.part.has_all(chunks_of(served, part)))

    def gather(self, model: ModelHash, part: Slice) -> None:
        """Gets what a slice needs; it replaces what was asked for before."""
        self._gathering.cancel()
        self._gathering = trio.CancelScope()
        if self._nursery is not None:
            self._nursery.start_soon(self._gather, model, part, self._gathering)

    async def _gather(self, model: ModelHash, part: Slice, scope: trio.CancelScope) -> None:
        with scope:
            problem: str | None = None
            try:
                served = self._models.served
                if served is None or served.sha256 != model:
                    raise UnavailableError("serves another model now")
                if served.part is not None and not served.part.is_whole:
                    await self.get(self.fetch(model), lambda _: chunks_of(served, part))
                    self._problem = None
                    await trio.to_thread.run_sync(served.part.note_part, part)
                    await self.keep_if_whole(served.part)
            except MeshLLMError as error:
                problem = str(error)
                self.failed(model, problem)
            self._held(model, part, problem)

    # --- what is going on

    def status(self) -> FetchStatus | None:
        """Of what is being fetched, or could not be."""
        busy = next((fetch for fetch in self._fetches.values() if fetch.is_wanted), None)
        failed = self._fetches.get(self._problem[0]) if self._problem is not None else None
        fetch = busy or failed
        return None if fetch is None else self.status_of(fetch)

    def status_of(self, fetch: Fetch) -> FetchStatus:
        """How far one is."""
        done, wanted = fetch.progress()
        names = {peer.node: peer.name for peer in self._peers()}
        failed = self._problem[1] if self._problem is not None and self._problem[0] == fetch.sha256 else None
        return FetchStatus(
            name=fetch.part.name if fetch.part is not None else fetch.sha256[:8],
            sha256=fetch.sha256,
            done_bytes=done,
            wanted_bytes=wanted,
            sources=tuple(names.get(node, node) for node in fetch.sources),
            error=failed or fetch.problem(),
        )

    async def get(self, fetch: Fetch, wanted: Callable[[Manifest], list[int]]) -> None:
        """As Fetch.get; a voucher that is found wrong is not believed again."""
        try:
            await fetch.get(wanted)
        except ModelFileError as error:
            self._distrust(fetch, error)
            raise

    def failed(self, sha256: str, problem: str) -> None:
        """Says why a fetch came to nothing, until one succeeds."""
        if self._problem != (sha256, problem):
            self._log.warning("fetch_failed", sha256=sha256[:16], reason=problem)
        self._problem = (sha256, problem)

    # --- inside

    def _choose(self, wanted: str) -> str | None:
        """SHA-256 of the model to fetch, None while nobody has one: one that was begun goes first."""
        named = [(peer.model, peer.model_name) for peer in self.live_peers() if peer.model]
        there = {model for model, _ in named}
        for sha256, name in partial_files(self._store.partial):
            if wanted in ("", name, sha256) and (sha256 in there or wanted or not there):
                return sha256
        served = Counter(model for model, name in named if model and wanted in ("", name, model))
        return str(min(served.items(), key=lambda entry: (-entry[1], entry[0]))[0]) if served else None

    def live_peers(self) -> list[PeerView]:
        """Those with a link."""
        return [peer for peer in self._peers() if peer.state in ("connected", "suspected")]

    def fetch(self, sha256: str) -> Fetch:
        """The one of this file, begun or not. Raises UnavailableError where there are too many."""
        fetch = self._fetches.get(sha256)
        if fetch is None:
            if len(self._fetches) >= MAX_FETCHES or self._nursery is None:
                raise UnavailableError(f"{len(self._fetches)} models are being fetched already; wait for one of them")
            fetch = self._fetches[sha256] = Fetch(
                self._store.partial,
                self._own,
                sha256,
                peers=lambda: [
                    peer for peer in self.live_peers() if peer.model == sha256 and peer.name not in self._distrusted
                ],
                dial=self._dial,
                is_busy=self._is_busy,
                log=self._log,
            )
            self._nursery.start_soon(fetch.run)
        return fetch

    async def _serve_part(self, sha256: str) -> None:
        fetch = self.fetch(sha256)
        await self.get(fetch, lambda manifest: manifest.chunks_of([(0, manifest.head_bytes)]))
        part = fetch.part
        assert part is not None
        try:
            served = await trio.to_thread.run_sync(open_part, part)
        except ModelFileError as error:
            self._distrust(fetch, error)
            raise
        self._models.serve_part(served)
        await self.keep_if_whole(part)

    async def keep_if_whole(self, part: PartialFile, name: str | None = None) -> None:
        """Moves a file into the store, once all of it is here and its content hash was checked."""
        fetch = self._fetches.get(part.sha256)
        if not part.is_whole or fetch is None or fetch.part is not part or fetch.is_moving:
            return
        fetch.is_moving = True
        try:
            await trio.to_thread.run_sync(part.check_whole)
            kept = name or (part.name if valid_name(part.name) else f"model-{part.sha256[:8]}")
            await trio.to_thread.run_sync(self._store.adopt, part.path, kept, part.sha256)
        except ModelFileError as error:
            self._distrust(fetch, error)
            raise
        finally:
            self._forget(fetch)
        part.remove()
        self._log.info("fetch_finished", model=kept, sha256=part.sha256[:16], bytes=part.manifest.size)
        self._models.part_is_whole()

    def _distrust(self, fetch: Fetch, error: ModelFileError) -> None:
        """What its voucher said of the file is wrong: it is begun anew, with another one's manifest."""
        part, served = fetch.part, self._models.served
        if part is not None:
            self._distrusted.add(part.voucher)
            part.remove()
        self._forget(fetch)
        if served is not None and served.part is not None and served.part is part:
            self._models.lose(served.file, error)

    def _forget(self, fetch: Fetch) -> None:
        fetch.stop()
        self._fetches.pop(fetch.sha256, None)
