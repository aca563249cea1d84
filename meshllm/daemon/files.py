"""Model files between this daemon and its peers: what is given, what is got, how fast. Owned by the control loop."""

from __future__ import annotations

from typing import Final

import trio

from meshllm.daemon.fetcher import Fetcher, Held
from meshllm.daemon.file_server import FileServer
from meshllm.daemon.model_store import ModelStore
from meshllm.daemon.pulls import Pulls
from meshllm.daemon.served_model import ModelFollower, ServedModel
from meshllm.errors import LinkLostError, UnavailableError
from meshllm.layout.layout import NodeId
from meshllm.log import Logger
from meshllm.mesh.facts import PeerView
from meshllm.mesh.file_messages import FileHello
from meshllm.mesh.messages import ModelHash
from meshllm.mesh.node import Node
from meshllm.model.slicing import Slice
from meshllm.net.file_link import FileLink, dial_file
from meshllm.net.identity import Identity
from meshllm.net.listener import Incoming
from meshllm.status import FetchStatus

BUSY_S: Final = 2.0  # after a step: an answer is likely to run still


class Files:
    """See the head of this file."""

    def __init__(
        self,
        own: NodeId,
        identity: Identity,
        store: ModelStore,
        models: ModelFollower,
        node: Node,
        held: Held,
        log: Logger,
    ) -> None:
        """node: asked for its peers alone. held: told when a part was gathered, or why it cannot be."""
        self._identity = identity
        self._store = store
        self._models = models
        self._busy_until = 0.0
        self._server = FileServer(store.folder / "manifests", lambda: models.served, self._is_busy, log)
        self._fetcher = Fetcher(
            own=own,
            store=store,
            models=models,
            peers=lambda: node.view(trio.current_time()).peers,
            dial=self._dial,
            is_busy=self._is_busy,
            held=held,
            log=log,
        )
        self._pulls = Pulls(store, self._fetcher)

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._fetcher.run)
            nursery.start_soon(self._pulls.run)

    def note_step(self, now: float) -> None:
        """Steps ran here: chunks leave room for more of them."""
        self._busy_until = now + BUSY_S

    async def answer(self, incoming: Incoming, hello: FileHello) -> None:
        """Serves a peer's file link to its end."""
        await self._server.answer(incoming, hello)

    def gather(self, model: ModelHash, part: Slice) -> None:
        """Gets what a slice needs; `held` is told."""
        self._fetcher.gather(model, part)

    def prepared_for(self, model: ModelHash, part: Slice | None) -> ServedModel | str:
        """The file to pack a slice from (None: nothing is packed), or why it cannot be."""
        served = self._models.served
        if served is None or served.sha256 != model:
            return "serves another file"
        if part is not None and not self._fetcher.has_part(part):
            return "has not fetched its part of the model yet"
        return served

    def pull(self, source: str, name: str, state_dir: str) -> FetchStatus:
        """As Pulls.pull, for a command that works on this daemon's state folder. Raises UnavailableError for others."""
        if str(self._store.folder.parent.resolve()) != state_dir:
            raise UnavailableError(f"this daemon keeps its models elsewhere: {self._store.folder.parent}")
        return self._pulls.pull(source, name)

    def status(self) -> FetchStatus | None:
        """Of what is being fetched, or could not be."""
        return self._fetcher.status()

    def _is_busy(self) -> bool:
        return trio.current_time() < self._busy_until

    async def _dial(self, peer: PeerView, hello: FileHello) -> FileLink:
        if peer.address is None:
            raise LinkLostError("its address is not known")
        return await dial_file(peer.address, self._identity.client, self._identity.certificate, hello)
