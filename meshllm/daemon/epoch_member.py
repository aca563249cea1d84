"""This daemon's part in one epoch, from PrepareEpoch to its end: one task, one engine, one set of links.

Prepare: pack the slice in a worker thread, prove the links meanwhile. Then steps until the epoch is retired (quiet) or
breaks (EpochBroken, with the device to blame); either way everything is freed and the other members are told. The
task's border is `run`: nothing that a peer, a file or a kernel does gets past it. Two epochs may be alive; between two
steps of one, the other gets its turn and commands are obeyed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog
import trio

from meshllm.daemon.crossing import Crossing
from meshllm.daemon.epoch_links import EpochLinks
from meshllm.daemon.loop_bridge import (
    Answered,
    AttachDataLink,
    EpochBroken,
    EpochPrepared,
    EpochRefused,
    Event,
    PrepareEpoch,
)
from meshllm.daemon.rank_engine import RankEngine
from meshllm.daemon.step_costs import CostCounter
from meshllm.daemon.step_driver import StepDriver
from meshllm.daemon.step_runner import HungMemberError, StepRunner
from meshllm.engine.executor import BatchStoppedError
from meshllm.errors import KernelError, MeshLLMError, ModelFileError
from meshllm.kernels.binding import Kernels
from meshllm.layout.layout import NodeId
from meshllm.mesh.messages import Candidates, Failed, Leave, RequestId, Submit
from meshllm.mesh.pacing import Patience
from meshllm.mesh.request import LOST
from meshllm.mesh.stepping import MemberFaultError, MemberLeftError, StepLimits, StepSequencer
from meshllm.model.model_file import ModelFile
from meshllm.net.link_group import LinkFaultError

BURST_S: Final = 0.2  # without a step: a burst of steps has ended


class EpochMember:
    """See the head of this file. Owned by the data loop, which calls everything but `interrupt` in its own thread."""

    def __init__(
        self,
        command: PrepareEpoch,
        *,
        own: NodeId,
        kernels: Kernels,
        events: Crossing[Event],
        packing: trio.CapacityLimiter,
        obey: Callable[[], None],
        others_step: Callable[[], bool],
    ) -> None:
        """packing: one slice is packed at a time. obey: executes the commands that wait. others_step: whether another
        epoch of this loop is within a step.
        """
        self.epoch = command.epoch
        self.is_stepping = False
        self._command = command
        self._own = own
        self._kernels = kernels
        self._events = events
        self._packing = packing
        self._obey = obey
        self._others_step = others_step
        self._links = EpochLinks(own, command.members)
        self._scope = trio.CancelScope()
        self._leave = Leave(None, "the epoch has ended")
        self._engine: RankEngine | None = None
        self._driver: StepDriver | None = None

    # --- commands

    def attach(self, command: AttachDataLink, nursery: trio.Nursery) -> None:
        """A fresh data link with a member."""
        self._links.attach(command, nursery)

    def admit(self, submit: Submit) -> None:
        """A request, on the driver."""
        if self._driver is None:
            failed = Failed(submit.request, LOST, "the layout is not in force on its driver")
            self._events.post(Answered(self.epoch, failed))
        else:
            self._driver.admit(submit)

    def cancel(self, request: RequestId) -> bool:
        """Drops a request; False if it is not here."""
        return self._driver is not None and self._driver.cancel(request)

    def retire(self, reason: str) -> None:
        """Ends it quietly, at the next place where it waits."""
        self._leave = Leave(None, reason)
        self._scope.cancel()

    def interrupt(self) -> None:
        """From any thread: a running kernel call returns within one op, and the epoch breaks."""
        if (engine := self._engine) is not None:
            engine.stop()

    # --- life

    async def run(self) -> None:
        """Its whole life; returns when all is freed."""
        ended: Event | None = None
        try:
            with self._scope:
                ended = await self._live()
        finally:
            self._links.close(self._leave)
            if self._driver is not None:
                with trio.CancelScope(shield=True):
                    await self._driver.tell()
                self._driver = None
            if self._engine is not None:
                self._engine.close()
                self._engine = None
        if ended is not None:
            await self._events.send(ended)

    async def _live(self) -> Event:
        """Why it ended, unless it was cancelled."""
        try:
            runner = await self._prepare()
        except (MeshLLMError, OSError, MemoryError) as error:
            return EpochRefused(self.epoch, str(error) or type(error).__name__)
        except Exception as error:  # the task's border: a bug must not take the other epoch along
            structlog.get_logger().exception("prepare_failed", epoch=self.epoch.counter)
            return EpochRefused(self.epoch, f"internal error: {error!r}")
        try:
            if self._driver is not None:
                return await self._drive(runner, self._driver)
            return await self._follow(runner)
        except (LinkFaultError, MemberFaultError, MemberLeftError, HungMemberError) as error:
            return self._broken(error.node, str(error))
        except ModelFileError as error:
            return self._broken(self._own, str(error), self._command.model_file)
        except (BatchStoppedError, KernelError) as error:
            return self._broken(self._own, str(error))
        except Exception as error:  # as above
            structlog.get_logger().exception("step_failed", epoch=self.epoch.counter)
            return self._broken(self._own, f"internal error: {error!r}")

    def _broken(self, node: NodeId | None, reason: str, lost_file: ModelFile | None = None) -> EpochBroken:
        self._leave = Leave(node, reason[:500])
        return EpochBroken(self.epoch, node, reason, lost_file)

    async def _prepare(self) -> StepRunner:
        command, layout = self._command, self._command.layout
        engine = await trio.to_thread.run_sync(
            RankEngine,
            self._kernels,
            command.model_file,
            layout,
            command.rank,
            abandon_on_cancel=True,  # what is packed by then goes with the last reference to it
            limiter=self._packing,
        )
        self._engine = engine
        self._links.admit(engine.frame_limit)
        await self._links.wait_all()
        ranks = tuple(share.node for share in layout.shares)
        limits = StepLimits(layout.slots, layout.context, engine.vocab_size, engine.max_tokens)
        engine.connect(self._links.group.of_ranks(ranks))
        runner = StepRunner(
            own=self._own,
            ranks=ranks,
            engine=engine,
            links=self._links.group,
            sequencer=StepSequencer(
                driver=self.epoch.driver, ranks=ranks, own=self._own, schedule=engine.schedule, limits=limits
            ),
            patience=Patience(layout.prediction.decode_tok_s, layout.prediction.prefill_tok_s),
            costs=CostCounter(self.epoch, engine.slice_bytes, time.monotonic()),
            may_sleep=lambda: not self._others_step(),
        )
        if command.is_driver:
            self._driver = StepDriver(self.epoch, runner, layout, self._events)
        await self._events.send(EpochPrepared(self.epoch, engine.slice_bytes, engine.cache_bytes))
        return runner

    async def _drive(self, runner: StepRunner, driver: StepDriver) -> Event:
        """The driver's steps, for ever."""
        while True:
            if not driver.has_work:
                await self._rest(runner, lambda: driver.has_work)
            self.is_stepping = True
            await driver.step()
            self.is_stepping = False
            await self._between_steps(runner)

    async def _follow(self, runner: StepRunner) -> Event:
        """Another rank's steps, for ever."""
        sequencer = runner.sequencer
        while True:
            await self._rest(runner, lambda: sequencer.has_step)
            step = sequencer.take_step()
            assert step is not None
            self.is_stepping = True
            runner.begin()
            candidates = await runner.run(step)
            runner.send([self.epoch.driver], Candidates(step.step, tuple(row.to_bytes() for row in candidates)))
            sequencer.finish()
            runner.end(step)
            self.is_stepping = False
            await self._between_steps(runner)

    async def _rest(self, runner: StepRunner, has_work: Callable[[], bool]) -> None:
        """Until there is work; what steps cost is told when it is long in coming."""
        await runner.until(has_work, BURST_S)
        if not has_work():
            await self._tell_costs(runner, burst_ended=True)
            await runner.until(has_work)

    async def _between_steps(self, runner: StepRunner) -> None:
        await self._tell_costs(runner, burst_ended=False)
        self._obey()
        await trio.lowlevel.checkpoint()

    async def _tell_costs(self, runner: StepRunner, *, burst_ended: bool) -> None:
        costs = runner.costs.report(time.monotonic(), burst_ended=burst_ended)
        if costs is not None:
            await self._events.send(costs)
