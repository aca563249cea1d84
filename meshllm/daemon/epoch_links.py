"""The data links of one epoch from fresh socket to proven: the peer has shown that it has the keys.

The dialer (the lower node id) says Ready first, the acceptor answers Ready: before that the acceptor may not send,
since TLS was left on the same socket. A link that fails the proof is closed and forgotten, and may be replaced; a
proven link that fails is the epoch's end, which `group` tells whoever uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from meshllm.daemon.loop_bridge import AttachDataLink
from meshllm.errors import LinkLostError, RemoteProtocolError, UnavailableError
from meshllm.kernels.links import PartialHead
from meshllm.layout.layout import NodeId
from meshllm.mesh.framing import decode_data, encode_body
from meshllm.mesh.messages import Leave, Ready
from meshllm.net.data_link import DataLink
from meshllm.net.link_group import LinkGroup

PROOF_TIMEOUT_S: Final = 10.0  # for the peer's Ready on a fresh link
ALL_TIMEOUT_S: Final = 15.0  # for the links that are still missing when our slice is packed
UNPROVEN_LIMIT: Final = 16 * 1024  # bytes of a frame, until the model tells how large a step may be


@dataclass(slots=True)
class _Fresh:
    """A link that has not proved itself."""

    link: DataLink
    scope: trio.CancelScope


class EpochLinks:
    """See the head of this file. `group` holds the proven ones."""

    def __init__(self, own: NodeId, members: Sequence[NodeId]) -> None:
        """members: the others, with each of whom there is to be one link."""
        self.group = LinkGroup()
        self._own = own
        self._missing = dict.fromkeys(members)
        self._fresh: dict[NodeId, _Fresh] = {}
        self._frame_limit = UNPROVEN_LIMIT
        self._changed = trio.Event()

    def attach(self, command: AttachDataLink, nursery: trio.Nursery) -> None:
        """Takes a fresh socket over and has it proved by a task in `nursery`."""
        node = command.node
        if node not in self._missing:  # proven already, or no member
            command.sock.close()
            return
        self._drop(node)
        fresh = _Fresh(DataLink(command.sock, command.keys, self._frame_limit), trio.CancelScope())
        self._fresh[node] = fresh
        nursery.start_soon(self._prove, node, fresh)

    def admit(self, frame_limit: int) -> None:
        """Members may send bodies of this size from now on."""
        self._frame_limit = max(frame_limit, UNPROVEN_LIMIT)
        for fresh in self._fresh.values():
            fresh.link.admit(self._frame_limit)
        self.group.admit(self._frame_limit)

    async def wait_all(self) -> None:
        """Until there is a proven link with every member. Raises UnavailableError after ALL_TIMEOUT_S."""
        with trio.move_on_after(ALL_TIMEOUT_S):
            while self._missing:
                self._changed = trio.Event()
                await self._changed.wait()
        if self._missing:
            raise UnavailableError(f"no data link came up with {', '.join(self._missing)} within {ALL_TIMEOUT_S:g} s")

    def close(self, leave: Leave) -> None:
        """Tells the members why, as far as their sockets take it, and closes everything."""
        for node in tuple(self._fresh):
            self._drop(node)
        body = encode_body(leave)
        for node in self.group.nodes:
            try:
                self.group.send([node], body)
            except LinkLostError:
                continue
        self.group.close()

    def _drop(self, node: NodeId) -> None:
        """Its fresh link is not wanted any more; the task that proves it closes it, for it may be about to use it."""
        if (fresh := self._fresh.pop(node, None)) is not None:
            fresh.scope.cancel()

    async def _prove(self, node: NodeId, fresh: _Fresh) -> None:
        proven = False
        try:
            with fresh.scope, trio.fail_after(PROOF_TIMEOUT_S):
                await trio.lowlevel.checkpoint_if_cancelled()
                await self._exchange_ready(node, fresh.link)
                proven = self._fresh.get(node) is fresh  # it may have been dropped since it was last cancellable
        except (LinkLostError, RemoteProtocolError, trio.TooSlowError):
            pass
        finally:
            if self._fresh.get(node) is fresh:
                del self._fresh[node]
            if not proven:
                fresh.link.close()
        if proven:
            del self._missing[node]
            self.group.add(node, fresh.link)
            self._changed.set()

    async def _exchange_ready(self, node: NodeId, link: DataLink) -> None:
        ready = encode_body(Ready())
        if self._own < node:
            link.send(ready)
        while (body := link.receive()) is None:
            await trio.lowlevel.wait_readable(link.fileno())
        if isinstance(body, PartialHead) or not isinstance(decode_data(body), Ready):
            raise RemoteProtocolError("sent something before Ready")
        if self._own > node:
            link.send(ready)
