"""The control loop: owns the Node, its links, its timer and the data loop's handle; does what the Node wants.

All in one trio loop: after whatever happens the Node is told, its actions are carried out by the one `match` below, its
timer is set. The API uses the public part: `status`, `model`, `open_request`, `reload`.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeVarTuple, Unpack, assert_never

import trio

from meshllm.daemon import loop_bridge as bridge
from meshllm.daemon.data_loop import DataLoop
from meshllm.daemon.device import free_bytes
from meshllm.daemon.files import Files
from meshllm.daemon.member_links import MemberLinks
from meshllm.daemon.model_store import ModelStore
from meshllm.daemon.observed_speed import ObservedSpeed
from meshllm.daemon.own_facts import gather_facts
from meshllm.daemon.readers import Readers
from meshllm.daemon.reports import Reports
from meshllm.daemon.served_model import ModelFollower, ServedModel
from meshllm.daemon.status_report import CostWindow, build_status, show_address
from meshllm.errors import KernelError, LinkLostError, ModelFileError
from meshllm.layout.layout import Device, NodeId
from meshllm.log import Logger
from meshllm.mesh import actions as act
from meshllm.mesh.facts import NodeConfig
from meshllm.mesh.framing import FrameDecoder, LinkMessage
from meshllm.mesh.messages import (
    PROTOCOL_VERSION,
    ControlMessage,
    DataHello,
    Epoch,
    FileHello,
    Hello,
    ModelHash,
    Submit,
)
from meshllm.mesh.node import Node
from meshllm.model.slicing import Slice
from meshllm.net.adverts import Announcement, Ignored, Sighting
from meshllm.net.dialer import dial
from meshllm.net.discovery import Discovery
from meshllm.net.identity import Identity
from meshllm.net.interfaces import announced_addresses
from meshllm.net.link import ControlLink, TlsStream
from meshllm.net.listener import Incoming, Strangers, serve
from meshllm.status import DaemonState, Status

FREE_BYTES_INTERVAL_S: Final = 2.0
STOP_TIMEOUT_S: Final = 2.0  # for links to say goodbye
Args = TypeVarTuple("Args")


class ControlLoop:
    """See the head of this file. Made, then `run` in a nursery of the composition root."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        device: Device,
        identity: Identity,
        data: DataLoop,
        sockets: Sequence[socket.socket],
        peers: Sequence[act.Address],
        interfaces: Sequence[str],
        store: ModelStore,
        wanted_model: str | None,
        log: Logger,
    ) -> None:
        """sockets: listening, of config.port. peers: static addresses. data: not started yet."""
        self._started_s = now = trio.current_time()
        self._config = config
        self._speed = ObservedSpeed(device)
        self._identity = identity
        self._data = data
        self._sockets = list(sockets)
        self._log = log
        self._node = Node(config, device, None, now)
        self._links: dict[act.LinkId, ControlLink] = {}
        self._link_ids = itertools.count(1)
        self._reports = Reports(log)
        self._readers = Readers()
        self._members = MemberLinks(config.node, identity, data, log)
        self._timer = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._costs = CostWindow()
        self._models = ModelFollower(store, wanted_model, self._model_changed)
        self.files = Files(config.node, identity, store, self._models, self._node, self._part_held, log)
        announcement = Announcement(config.node, identity.tag, PROTOCOL_VERSION, config.port)
        self._discovery = Discovery(announcement, interfaces, self._seen, self._reports.of_discovery)
        for address in peers:
            self._node.addresses_found("static", None, (address,), now)

    # --- the face for the API and the composition root ----------------------------------------------------------------

    def status(self) -> Status:
        """Everything that is known now."""
        now = trio.current_time()
        view = self._node.view(now)
        hosts = announced_addresses(self._discovery.chosen)
        own = gather_facts(self._config, self._speed.device, self._identity.tag, hosts, now - self._started_s)
        served = self._models.served
        state: tuple[DaemonState, str | None] = (view.state, view.detail) if served else self._models.state()
        model = served.status() if served else None
        counts, costs = self._readers.counts(self._costs.steps), self._costs.per_token()
        return build_status(view, own, model, state, counts, costs, self.files.status())

    def model(self, name: str | None = None) -> ServedModel:
        """The model served, if `name` is its name, its hash or None. Raises what ModelFollower.model does."""
        return self._models.model(name)

    @asynccontextmanager
    async def open_request(self, submit: Submit) -> AsyncIterator[trio.MemoryReceiveChannel[act.Delivery]]:
        """A request in the mesh; the channel gives Tokens until Finished or Failed, then ends. Leaving cancels it."""
        with self._readers.open(submit) as receive:
            try:
                self._node.submit(submit, trio.current_time())
                self._carry_out()
                yield receive
            finally:
                if self._readers.close(submit.request):
                    self._node.cancel(submit.request, trio.current_time())
                    self._carry_out()

    def reload(self) -> None:
        """Looks for a model again, if none is served."""
        self._models.look_again()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled; started once peers may connect. Raises KernelError if the data loop died."""
        self._data.start()
        strangers = Strangers(self._reports.of_stranger)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await nursery.start(serve, self._sockets, self._identity.server, strangers, self._accepted)
                nursery.start_soon(self._discovery.run)
                nursery.start_soon(self._models.run)
                nursery.start_soon(self.files.run)
                nursery.start_soon(self._keep_time)
                nursery.start_soon(self._take_events)
                nursery.start_soon(self._watch_memory)
                self._carry_out()
                task_status.started()
        finally:
            self._nursery = None
            self._data.post(bridge.Stop())
            self._data.interrupt()

    async def stop(self, reason: str) -> None:
        """Local answers fail, peers are told, links close; at most STOP_TIMEOUT_S. Cancel `run` after it."""
        self._node.shutdown(reason, trio.current_time())
        self._carry_out()
        with trio.move_on_after(STOP_TIMEOUT_S):
            for link in list(self._links.values()):
                await link.ended.wait()

    # --- what happens -------------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        while True:
            with trio.CancelScope(deadline=self._node.next_deadline()) as self._timer:
                await trio.sleep_forever()
            self._node.wake(trio.current_time())
            self._carry_out()

    async def _watch_memory(self) -> None:
        while True:
            self._node.set_free_bytes(free_bytes())
            await trio.sleep(FREE_BYTES_INTERVAL_S)

    async def _accepted(self, incoming: Incoming) -> None:
        match incoming.hello:
            case DataHello() as hello:
                await self._members.answer(incoming, hello)
            case FileHello() as hello:
                await self.files.answer(incoming, hello)
            case Hello() as hello:
                await self._run_link(incoming.stream, None, incoming.decoder, [hello, *incoming.more])
            case never:
                assert_never(never)

    async def _run_link(
        self,
        stream: TlsStream,
        dialed: str | None,
        decoder: FrameDecoder | None,
        first: Sequence[LinkMessage],
    ) -> None:
        """A control link from its opening to its end."""
        link_id = act.LinkId(next(self._link_ids))
        try:
            link = ControlLink(stream, decoder)
        except OSError as error:  # gone already
            await trio.aclose_forcefully(stream)
            if dialed is not None:
                self._tell_dial_failed(dialed, str(error))
            return
        self._links[link_id] = link
        self._node.link_opened(link_id, link.address, dialed, trio.current_time())
        for message in first:
            if not isinstance(message, DataHello | FileHello):
                self._node.receive(link_id, message, trio.current_time())
        self._carry_out()
        reason = await link.run(lambda message: self._received(link_id, message))
        if self._links.pop(link_id, None) is not None:
            self._node.link_lost(link_id, reason, trio.current_time())
            self._carry_out()

    def _received(self, link_id: act.LinkId, message: ControlMessage) -> None:
        if (link := self._links.get(link_id)) is not None:
            self._node.receive(link_id, message, trio.current_time(), link.network_rtt_us)
            self._carry_out()

    async def _dial(self, action: act.Dial) -> None:
        try:
            stream = await dial(action.addresses, self._identity.client, self._identity.certificate)
        except LinkLostError as error:
            self._tell_dial_failed(action.key, str(error))
            return
        await self._run_link(stream, action.key, None, [])

    def _tell_dial_failed(self, key: str, reason: str) -> None:
        self._node.dial_failed(key, reason, trio.current_time())
        self._carry_out()

    def _seen(self, sighting: Sighting | Ignored) -> None:
        match sighting:
            case Sighting(node, ()):
                self._node.addresses_gone(node, trio.current_time())
            case Sighting(node, addresses):
                self._node.addresses_found("mdns", node, addresses, trio.current_time())
            case Ignored(reason):
                self._log.debug("advert_ignored", reason=reason)
            case never:
                assert_never(never)
        self._carry_out()

    def _model_changed(self) -> None:
        self._reports.of_model(self._models, self._config.context)
        self._describe_self()

    def _describe_self(self) -> None:
        self._node.set_model(self._models.facts(), self._speed.device, trio.current_time(), self._models.error)
        self._carry_out()

    def _part_held(self, model: ModelHash, part: Slice, problem: str | None) -> None:
        self._node.held(model, part, problem, trio.current_time())
        self._carry_out()

    async def _take_events(self) -> None:
        while True:
            self._event(await self._data.next_event())
            self._carry_out()

    def _event(self, event: bridge.Event) -> None:
        now = trio.current_time()
        match event:
            case bridge.EpochPrepared(epoch, slice_bytes, cache_bytes):
                self._log.info("slice_packed", epoch=epoch.counter, slice_bytes=slice_bytes, cache_bytes=cache_bytes)
                self._node.prepared(epoch, now)
            case bridge.EpochRefused(epoch, reason):
                self._node.prepare_refused(epoch, reason, now)
            case bridge.EpochBroken(epoch, node, reason, lost_file):
                self._models.lose(lost_file, ModelFileError(reason))
                self._node.epoch_broken(epoch, node, reason, now)
            case bridge.Answered(epoch, message):
                self._node.answered(epoch, message, now)
            case bridge.StepCosts():
                self._costs.add(event, now)
                self.files.note_step(now)
                if self._speed.has_changed(event, now):
                    self._describe_self()
            case bridge.DataLoopEnded(error):
                raise KernelError(f"the data loop died: {error}; restart the daemon and report this")
            case never:
                assert_never(never)

    # --- what is done -------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Carries out what the Node wants, until it wants nothing more, and sets its timer."""
        while actions := self._node.take_actions():
            for action in actions:
                self._do(action)
        self._timer.deadline = self._node.next_deadline()

    def _do(self, action: act.Action) -> None:
        match action:
            case act.Send(link_id, message):
                self._send(link_id, message)
            case act.CloseLink(link_id, reason, at_fault):
                self._close(link_id, reason, at_fault)
            case act.Dial():
                self._start(self._dial, action)
            case act.PrepareEpoch():
                self._prepare(action)
            case act.CommitEpoch(epoch):
                self._costs.start_anew()
                self._data.post(bridge.CommitEpoch(epoch))
            case act.RetireEpoch(epoch, reason):
                self._retire(epoch, reason)
            case act.Gather(model, part):
                self.files.gather(model, part)
            case act.Admit(epoch, submit):
                self._data.post(bridge.Admit(epoch, submit))
            case act.CancelAdmitted(request):
                self._data.post(bridge.CancelAdmitted(request))
            case act.Deliver(request, message):
                self._readers.deliver(request, message, trio.current_time())
            case act.Report(event, fields):
                self._reports.of_node(event, dict(fields))
            case never:
                assert_never(never)

    def _start(self, task: Callable[[Unpack[Args]], Awaitable[None]], *arguments: *Args) -> None:
        if self._nursery is not None:  # else the loop is ending
            self._nursery.start_soon(task, *arguments)

    def _send(self, link_id: act.LinkId, message: ControlMessage) -> None:
        link = self._links.get(link_id)
        if link is not None and not link.send(message):
            del self._links[link_id]
            link.close("it takes messages too slowly")
            self._node.link_lost(link_id, "it takes messages too slowly", trio.current_time())

    def _close(self, link_id: act.LinkId, reason: str, at_fault: bool) -> None:
        link = self._links.pop(link_id, None)
        if link is not None:
            link.close(reason)
            if at_fault:
                self._log.warning("link_refused", address=show_address(link.address), reason=reason)

    def _prepare(self, action: act.PrepareEpoch) -> None:
        part = None if action.rank is None else action.layout.shares[action.rank].slice
        served = self.files.prepared_for(action.model, part)
        if isinstance(served, str):
            self._node.prepare_refused(action.epoch, served, trio.current_time())
            return
        self._data.post(
            bridge.PrepareEpoch(
                epoch=action.epoch,
                layout=action.layout,
                rank=action.rank,
                is_driver=action.driver,
                model_file=served.file,
                members=action.members,
            )
        )
        if action.dial:
            self._start(self._members.dial, action.epoch, action.dial, partial(self._member_failed, action.epoch))

    def _member_failed(self, epoch: Epoch, node: NodeId, reason: str) -> None:
        self._node.epoch_broken(epoch, node, reason, trio.current_time())
        self._carry_out()

    def _retire(self, epoch: Epoch, reason: str) -> None:
        self._members.give_up(epoch)
        self._data.post(bridge.RetireEpoch(epoch, reason))
