"""Data links between members of an epoch, from dialling or accepting to handing the socket to the data loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import trio

from meshllm.daemon import loop_bridge as bridge
from meshllm.daemon.data_loop import DataLoop
from meshllm.daemon.device import prefers_aes
from meshllm.errors import LinkLostError, RemoteProtocolError
from meshllm.layout.layout import NodeId
from meshllm.log import Logger
from meshllm.mesh.messages import DataHello, Epoch
from meshllm.net.data_link import derive_keys
from meshllm.net.dialer import dial_data
from meshllm.net.identity import Identity
from meshllm.net.link import Address
from meshllm.net.listener import Incoming, answer_data

ATTEMPTS: Final = 3
PAUSE_S: Final = 0.3
RANDOM_BYTES: Final = 32


class MemberLinks:
    """Owned by the control loop."""

    def __init__(self, node: NodeId, identity: Identity, data: DataLoop, log: Logger) -> None:
        self._node = node
        self._identity = identity
        self._data = data
        self._log = log
        self._aes = prefers_aes()
        self._dialing: dict[Epoch, trio.CancelScope] = {}

    async def dial(
        self, epoch: Epoch, members: tuple[tuple[NodeId, Address], ...], failed: Callable[[NodeId, str], None]
    ) -> None:
        """Gets a data link up with each of the members, or says with whom it cannot be."""
        self._dialing[epoch] = trio.CancelScope()
        with self._dialing[epoch]:
            async with trio.open_nursery() as nursery:
                for node, address in members:
                    nursery.start_soon(self._dial_member, epoch, node, address, failed)

    def give_up(self, epoch: Epoch) -> None:
        """The epoch is retired."""
        scope = self._dialing.pop(epoch, None)
        if scope is not None:
            scope.cancel()

    async def _dial_member(
        self, epoch: Epoch, node: NodeId, address: Address, failed: Callable[[NodeId, str], None]
    ) -> None:
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await trio.sleep(PAUSE_S)
            mine = self._hello(epoch)
            try:
                sock, theirs = await dial_data([address], self._identity.client, self._identity.certificate, mine)
            except (LinkLostError, RemoteProtocolError) as error:
                reason = str(error)
                continue
            if (theirs.epoch, theirs.node) != (epoch, node):
                sock.close()
                reason = "another device answers at its address"
                continue
            keys = derive_keys(mine, theirs, dialed=True)
            self._data.post(bridge.AttachDataLink(epoch, node, sock, keys))
            return
        failed(node, f"no data link: {reason}")

    async def answer(self, incoming: Incoming, theirs: DataHello) -> None:
        """Their data link; it may come before the offer of its epoch, the data loop keeps it for a while."""
        mine = self._hello(theirs.epoch)
        try:
            sock = await answer_data(incoming, mine)
        except (LinkLostError, RemoteProtocolError) as error:
            self._log.warning("data_link_failed", peer=theirs.node, reason=str(error))
            return
        keys = derive_keys(mine, theirs, dialed=False)
        self._data.post(bridge.AttachDataLink(theirs.epoch, theirs.node, sock, keys))

    def _hello(self, epoch: Epoch) -> DataHello:
        return DataHello(epoch, self._node, os.urandom(RANDOM_BYTES), self._aes)
