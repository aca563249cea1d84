"""The file links by which one partial file is filled: dialled, asked, let go. Owned by the control loop.

What to ask of whom is mesh/transfer.py's; here are links, and worker threads for hashes and disk. A chunk is verified,
then written, then counted; the record on disk follows the data (partial_file.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from meshllm.daemon.partial_file import PartialFile
from meshllm.errors import LinkLostError, RemoteProtocolError, UnavailableError
from meshllm.layout.layout import NodeId
from meshllm.log import Logger
from meshllm.mesh.facts import PeerView
from meshllm.mesh.file_messages import Absent, AskChunk, Chunk, Farewell, FileHello, FileMessage, Offer
from meshllm.mesh.manifest import ChunkSet
from meshllm.mesh.transfer import TICK_S, WINDOW, Transfer
from meshllm.net.file_link import FileLink
from meshllm.net.reasons import first_of

OFFER_S: Final = 900.0  # a peer that is asked for the first time hashes its whole file; it is lost sooner if it dies
SYNC_CHUNKS: Final = 16  # between two syncs: what a power cut can cost

Dial = Callable[[PeerView, FileHello], Awaitable[FileLink]]


class SourceLinks:
    """See the head of this file."""

    def __init__(
        self,
        part: PartialFile,
        hello: FileHello,
        *,
        peers: Callable[[], Sequence[PeerView]],
        dial: Dial,
        is_busy: Callable[[], bool],
        log: Logger,
    ) -> None:
        """peers: those alive that have some of the file. is_busy: whether answers run here."""
        self._part = part
        self._hello = hello
        self._peers = peers
        self._dial = dial
        self._is_busy = is_busy
        self._log = log
        self._asks: dict[NodeId, trio.MemorySendChannel[AskChunk]] = {}
        self._scopes: dict[NodeId, trio.CancelScope] = {}
        self._writing = trio.Lock()
        self._unsynced = 0
        self.transfer = Transfer(part.here)
        self.changed = trio.Event()  # anew after each turn of `run`
        self.trouble: UnavailableError | None = None  # with the disk
        self.is_disputed = False  # some device has another manifest
        self.bytes_received = 0

    @property
    def nodes(self) -> list[NodeId]:
        """Devices that give chunks now."""
        return list(self._asks)

    def want(self, chunks: Sequence[int]) -> None:
        """What is to be asked for from now on; nothing ends all links."""
        self.transfer.want(chunks)
        self.trouble = None
        self.changed.set()

    def problem(self) -> str | None:
        """Why what is wanted does not come, if it does not."""
        if self.trouble is not None:
            return str(self.trouble)
        n_missing, damaged = self.transfer.unobtainable(), self.transfer.damaged_by()
        if not n_missing or (len(self._scopes) > len(self._asks)):  # a dial is under way
            return None
        names = {peer.node: peer.name for peer in self._peers()}
        by = ", ".join(f"'{names.get(node, node)}'" for node in damaged)
        why = f"; {by} sent damaged ones: pull the model there again" if damaged else ""
        return f"no connected device has {n_missing} of the missing chunks{why}"

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self.changed = trio.Event()
                self._tick(nursery)
                if self.transfer.missing or self._scopes:
                    with trio.move_on_after(TICK_S):
                        await self.changed.wait()
                else:
                    await self.changed.wait()

    async def sync(self) -> None:
        """Brings what has come to the disk. Raises UnavailableError."""
        async with self._writing:
            if self._unsynced:
                self._unsynced = 0
                await trio.to_thread.run_sync(self._part.sync, self._part.here.bits)

    def _tick(self, nursery: trio.Nursery) -> None:
        transfer, now = self.transfer, trio.current_time()
        alive = {peer.node: peer for peer in self._peers()}
        useless = set(transfer.overdue(now)) | (self._scopes.keys() - alive.keys())
        for node, scope in self._scopes.items():
            if node in useless or transfer.is_refused(node) or not transfer.missing:
                scope.cancel()
        for node in transfer.to_dial(alive, now) if self.trouble is None else ():
            transfer.dialled(node)
            self._scopes[node] = trio.CancelScope()
            nursery.start_soon(self._run_source, alive[node], self._scopes[node])
        for ask in transfer.next_asks(now):
            self._asks[ask.source].send_nowait(AskChunk(ask.chunk, self._is_busy()))

    async def _run_source(self, peer: PeerView, scope: trio.CancelScope) -> None:
        """One link from dial to end; nothing that the peer does gets past it."""
        try:
            with scope:
                await self._use(peer)
        except (LinkLostError, RemoteProtocolError, trio.TooSlowError) as error:
            self._log.warning("file_source_lost", peer=peer.name, reason=str(error) or "it offered nothing in time")
        except UnavailableError as error:  # our disk
            self.trouble = error
        finally:
            del self._scopes[peer.node]
            self._asks.pop(peer.node, None)
            self.transfer.source_left(peer.node, trio.current_time())
            self.changed.set()

    async def _use(self, peer: PeerView) -> None:
        link = await self._dial(peer, self._hello)
        try:
            with trio.fail_after(OFFER_S):
                offer = await offer_of(link)
            if offer.manifest != self._part.manifest:
                reason = f"its manifest differs from that of '{self._part.voucher}': one of the two files is damaged"
                self.transfer.source_refused(peer.node)
                self.is_disputed = True
                self._log.error("file_source_refused", peer=peer.name, reason=reason)
                return
            n_chunks = offer.manifest.n_chunks
            holds = ChunkSet(n_chunks, offer.holds) if offer.holds else ChunkSet.whole(n_chunks)
            self.transfer.source_joined(peer.node, holds)
            self._asks[peer.node], asks = trio.open_memory_channel[AskChunk](2 * WINDOW)
            self.changed.set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send_asks, link, asks)
                while True:
                    await self._take(peer, await link.receive())
        except* (LinkLostError, RemoteProtocolError, UnavailableError, trio.TooSlowError) as group:
            raise first_of(group) from group
        finally:
            with trio.CancelScope(shield=True):
                await link.close()

    async def _take(self, peer: PeerView, message: FileMessage) -> None:
        n_chunks = self._part.manifest.n_chunks
        match message:
            case Chunk(chunk=chunk, data=data) if chunk < n_chunks:
                self.bytes_received += len(data)
                good = await trio.to_thread.run_sync(self._part.store, chunk, data)
                if not good:
                    self._log.error("chunk_damaged", peer=peer.name, chunk=chunk, next="it is asked of another device")
                self.transfer.arrived(peer.node, chunk, trio.current_time(), good=good)
                self._unsynced += good
            case Absent(chunk=chunk) if chunk < n_chunks:
                self.transfer.absent(peer.node, chunk)
            case Farewell(reason=reason):
                raise LinkLostError(reason)
            case _:
                raise RemoteProtocolError(f"sent {type(message).__name__}, which was not asked for")
        self.changed.set()
        if self._unsynced >= SYNC_CHUNKS:
            await self.sync()


async def offer_of(link: FileLink) -> Offer:
    """What a file link begins with. Raises LinkLostError or RemoteProtocolError."""
    match await link.receive():
        case Offer() as offer:
            return offer
        case Farewell(reason=reason):
            raise LinkLostError(reason)
        case message:
            raise RemoteProtocolError(f"began with {type(message).__name__} instead of Offer")


async def _send_asks(link: FileLink, asks: trio.MemoryReceiveChannel[AskChunk]) -> None:
    async for ask in asks:
        await link.send(ask)
