"""Whole files from peers, for `meshllm pull`. Owned by the control loop."""

from __future__ import annotations

from collections import Counter
from typing import Final

import trio

from meshllm.daemon.fetcher import Fetcher
from meshllm.daemon.model_store import ModelStore, valid_name
from meshllm.errors import MeshLLMError, NoModelError, UnavailableError, UsageError
from meshllm.status import FetchStatus

LEASE_S: Final = 5.0  # a pull that nobody asks about for so long is given up; what has come is kept
LOOK_S: Final = 0.5


class Pulls:
    """See the head of this file."""

    def __init__(self, store: ModelStore, fetcher: Fetcher) -> None:
        self._store = store
        self._fetcher = fetcher
        self._asked_at: dict[str, float] = {}  # by SHA-256, of those under way
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await trio.sleep_forever()

    def pull(self, source: str, name: str) -> FetchStatus:
        """Begins, or goes on with, getting the whole file that peers serve under the name or hash `source`, to keep it
        under `name`; how far it is. Raises NoModelError, UnavailableError, UsageError.
        """
        if not valid_name(name):
            raise UsageError(f"{name!r} cannot name a model: letters, digits and . _ : + -, at most 128; use --name")
        found = [p.model for p in self._fetcher.live_peers() if p.model and source in (p.model_name, p.model)]
        if not found:
            raise NoModelError(f"no connected device serves a model {source!r}")
        sha256 = str(Counter(found).most_common(1)[0][0])
        stored = next((model for model in self._store.list() if (model.name, model.sha256) == (name, sha256)), None)
        if stored is not None and stored.path.exists():
            size = stored.size
            return FetchStatus(name=name, sha256=sha256, done_bytes=size, wanted_bytes=size, sources=(), is_whole=True)
        fetch = self._fetcher.fetch(sha256)
        if sha256 not in self._asked_at:
            if self._nursery is None:
                raise UnavailableError("the daemon is starting or stopping; try again in a moment")
            self._nursery.start_soon(self._pull, sha256, name)
        self._asked_at[sha256] = trio.current_time()
        return self._fetcher.status_of(fetch)

    async def _pull(self, sha256: str, name: str) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._get, sha256, name, nursery.cancel_scope)
            while trio.current_time() - self._asked_at[sha256] < LEASE_S:  # noqa: ASYNC110  # a lease is a time
                await trio.sleep(LOOK_S)
            nursery.cancel_scope.cancel()
        del self._asked_at[sha256]

    async def _get(self, sha256: str, name: str, pull: trio.CancelScope) -> None:
        try:
            fetch = self._fetcher.fetch(sha256)
            await self._fetcher.get(fetch, lambda manifest: list(range(manifest.n_chunks)))
            assert fetch.part is not None
            await self._fetcher.keep_if_whole(fetch.part, name)
        except MeshLLMError as error:
            self._fetcher.failed(sha256, str(error))
            await trio.sleep(LEASE_S)  # whoever asks meanwhile is told
        pull.cancel()
