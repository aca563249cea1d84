"""The data plane: a thread with a trio loop of its own that runs the steps of the epochs in force.

Started and fed by the control loop through loop_bridge. Kernels are called right here, with the GIL released: a hop to
another thread would cost more than an exchange. Only packing a slice runs in a worker thread, so that a running epoch
goes on. Never parses JSON, never decides who takes part, logs nothing but its own bugs.

Two epochs may be alive, the old one finishing its answers while the new one takes over; each has a task, and their
steps take turns. Commands are obeyed at once while no step runs, else between two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, assert_never

import trio

from meshllm.daemon.crossing import Crossing
from meshllm.daemon.epoch_member import EpochMember
from meshllm.daemon.loop_bridge import (
    MAX_COMMANDS,
    MAX_EVENTS,
    Admit,
    Answered,
    AttachDataLink,
    CancelAdmitted,
    Command,
    CommitEpoch,
    DataLoopEnded,
    EpochRefused,
    Event,
    PrepareEpoch,
    RetireEpoch,
    Stop,
)
from meshllm.errors import LocalProtocolError
from meshllm.kernels.binding import Kernels
from meshllm.layout.layout import NodeId
from meshllm.mesh.messages import Epoch, Failed
from meshllm.mesh.request import LOST

MAX_EARLY_LINKS: Final = 64  # data links whose PrepareEpoch has not come; the oldest are closed
EARLY_LINK_S: Final = 30.0  # such a link is kept so long


class DataLoop:
    """The control loop's handle. Any thread may call `post` and `interrupt`, one trio task `next_event`."""

    def __init__(self, node: NodeId, kernels: Kernels) -> None:
        """node: this daemon's id. kernels: nobody else may run them once `start` was called."""
        self._commands: Crossing[Command] = Crossing(MAX_COMMANDS)
        self._events: Crossing[Event] = Crossing(MAX_EVENTS)
        self._loop = _Loop(node, kernels, self._commands, self._events)
        self._thread = threading.Thread(target=self._main, name="data-loop", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Hands a command down, at once. Raises LocalProtocolError if the data loop has taken none for far too long."""
        self._commands.post(command)

    async def next_event(self) -> Event:
        """The next event, when there is one. Cancellable; nothing is lost. DataLoopEnded is the last one."""
        return await self._events.receive()

    def interrupt(self) -> None:
        """From any thread, after Stop was posted: a running kernel call returns within one op."""
        self._loop.interrupt()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end; False if it has not in this time. Blocks: at the end of the daemon only."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        error: str | None = None
        try:
            trio.run(self._loop.run)
        except BaseException as caught:  # the thread's border: the control loop ends the daemon
            error = repr(caught)
        with suppress(LocalProtocolError):
            self._events.post(DataLoopEnded(error))


class _Loop:
    """What runs in the thread."""

    def __init__(self, node: NodeId, kernels: Kernels, commands: Crossing[Command], events: Crossing[Event]) -> None:
        self._node = node
        self._kernels = kernels
        self._commands = commands
        self._events = events
        self._members: dict[Epoch, EpochMember] = {}
        self._early: deque[tuple[float, AttachDataLink]] = deque()

    async def run(self) -> None:
        """Until Stop."""
        self._packing = trio.CapacityLimiter(1)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                self._obey(await self._commands.receive())

    def interrupt(self) -> None:
        """From any thread."""
        for member in list(self._members.values()):
            member.interrupt()

    def _obey_waiting(self) -> None:
        """Executes the commands that have come; a member calls it between two steps."""
        while (command := self._commands.take()) is not None:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case PrepareEpoch():
                self._prepare(command)
            case AttachDataLink():
                self._attach(command)
            case CommitEpoch():
                pass  # a driver gets no Admit before it, a rank no step
            case RetireEpoch(epoch=epoch, reason=reason):
                if (member := self._members.get(epoch)) is not None:
                    member.retire(reason)
                self._drop_early(lambda link: link.epoch == epoch)
            case Admit(epoch=epoch, submit=submit):
                if (member := self._members.get(epoch)) is not None:
                    member.admit(submit)
                else:
                    failed = Failed(submit.request, LOST, "the layout is no longer in force")
                    self._events.post(Answered(epoch, failed))
            case CancelAdmitted(request=request):
                for member in self._members.values():
                    member.cancel(request)
            case Stop():
                for member in self._members.values():
                    member.retire("the daemon stops")
                self._drop_early(lambda link: True)
                self._nursery.cancel_scope.cancel()
            case _:
                assert_never(command)

    def _prepare(self, command: PrepareEpoch) -> None:
        try:
            member = EpochMember(
                command,
                own=self._node,
                kernels=self._kernels,
                events=self._events,
                packing=self._packing,
                obey=self._obey_waiting,
                others_step=lambda: any(m.is_stepping for m in self._members.values() if m is not member),
            )
        except OSError as error:  # no file descriptors left: its links cannot be waited for
            self._events.post(EpochRefused(command.epoch, f"cannot wait for links: {error.strerror}"))
            return
        self._members[command.epoch] = member
        self._nursery.start_soon(self._run_member, member)
        early, self._early = self._early, deque()
        for item in early:
            if item[1].epoch == command.epoch:
                member.attach(item[1], self._nursery)
            else:
                self._early.append(item)

    async def _run_member(self, member: EpochMember) -> None:
        try:
            await member.run()
        finally:
            del self._members[member.epoch]

    def _attach(self, command: AttachDataLink) -> None:
        member = self._members.get(command.epoch)
        if member is not None:
            member.attach(command, self._nursery)
            return
        now = trio.current_time()
        self._early.append((now, command))
        while len(self._early) > MAX_EARLY_LINKS or self._early[0][0] < now - EARLY_LINK_S:
            self._early.popleft()[1].sock.close()

    def _drop_early(self, unwanted: Callable[[AttachDataLink], bool]) -> None:
        kept: deque[tuple[float, AttachDataLink]] = deque()
        for item in self._early:
            if unwanted(item[1]):
                item[1].sock.close()
            else:
                kept.append(item)
        self._early = kept
