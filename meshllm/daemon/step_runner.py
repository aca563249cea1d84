"""One step at a time on one member: kernels, exchanges with the other ranks, what it cost. For ranks and the driver.

Every wait on a peer has a deadline (mesh.stepping.Patience) and names whom it waits for, so a hung device ends the
epoch instead of the answer hanging. Nothing here decides what a step holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from meshllm.daemon.rank_engine import RankEngine
from meshllm.daemon.step_costs import CostCounter
from meshllm.engine.sampling import Candidates
from meshllm.errors import LinkLostError, RemoteProtocolError
from meshllm.kernels.links import PartialHead, Progress
from meshllm.layout.layout import NodeId
from meshllm.mesh.framing import decode_data, encode_body
from meshllm.mesh.messages import Message, Step
from meshllm.mesh.pacing import Patience
from meshllm.mesh.stepping import MemberFaultError, StepSequencer
from meshllm.net.link_group import SPIN_S, YIELD_S, LinkFaultError, LinkGroup


class HungMemberError(LinkLostError):
    """A member did not do its part of a step in time. `node`: which one."""

    def __init__(self, node: NodeId, message: str) -> None:
        super().__init__(message)
        self.node = node


class StepRunner:
    """See the head of this file."""

    def __init__(
        self,
        *,
        own: NodeId,
        ranks: Sequence[NodeId],
        engine: RankEngine,
        links: LinkGroup,
        sequencer: StepSequencer,
        patience: Patience,
        costs: CostCounter,
        may_sleep: Callable[[], bool],
    ) -> None:
        """ranks[i]: the node of rank i. may_sleep: nothing else in this loop has work just now."""
        self.own = own
        self._ranks = tuple(ranks)
        self.other_ranks = tuple(node for node in ranks if node != own)
        self.engine = engine
        self.links = links
        self.sequencer = sequencer
        self.patience = patience
        self.costs = costs
        self._may_sleep = may_sleep
        self._began_s = 0.0
        self._exchange_s = 0.0
        self._bytes = (0, 0)

    def begin(self) -> None:
        """A step begins: its costs are counted from here."""
        self._began_s = time.perf_counter()
        self._exchange_s = 0.0
        self._bytes = (self.links.bytes_sent, self.links.bytes_received)

    async def run(self, step: Step) -> list[Candidates]:
        """This rank's part of a step: candidates of its vocabulary for each entry with sampling.

        Raises BatchStoppedError, KernelError, ModelFileError, and all that `until` raises.
        """
        limit_s = self.patience.limit_s(sum(len(entry.tokens) for entry in step.entries))
        engine = self.engine
        engine.begin(step)
        exchange, since = -1, 0.0
        may_sleep = self._may_sleep()
        while (progress := self._advance(may_sleep)) is not Progress.FINISHED:
            communicator, now = engine.communicator, time.perf_counter()
            if progress is Progress.MESSAGE:
                self._take_from(self._ranks[communicator.rank])
                continue
            if communicator.exchange != exchange:
                exchange, since = communicator.exchange, now - YIELD_S
            late = [self._ranks[rank] for rank in communicator.missing()]
            if now - since > limit_s:
                (hung, *_) = late or self.links.unsent_nodes
                raise HungMemberError(hung, f"did not do its part of a step within {limit_s:.1f} s")
            unread = [node for node in self.other_ranks if node not in late]
            await self.links.wait(since, since + limit_s, may_sleep=may_sleep, unread=unread)
        self._exchange_s = engine.communicator.exchange_s
        return engine.candidates()

    def send(self, nodes: Sequence[NodeId], message: Message) -> None:
        """Sends as far as the sockets take it; `until` sends the rest. Raises LinkFaultError."""
        if nodes:
            self.links.send(nodes, encode_body(message))

    async def until(
        self,
        done: Callable[[], bool],
        limit_s: float = math.inf,
        late: Callable[[], Sequence[NodeId]] | None = None,
    ) -> None:
        """Sends and receives until done() and all is sent; after limit_s it returns, or blames the first of late().

        Raises HungMemberError, LinkFaultError, MemberFaultError or MemberLeftError.
        """
        links = self.links
        since = time.perf_counter()
        deadline = since + limit_s
        while True:
            holding: list[NodeId] = []
            for node, body in links.pump():
                if isinstance(body, PartialHead):
                    self.sequencer.check_early(node, body.step, body.exchange)
                    holding.append(node)
                else:
                    self._take(node, body)
            if done() and not links.has_unsent:
                return
            if time.perf_counter() > deadline:
                if late is None:
                    return
                (hung, *_) = late() or links.unsent_nodes
                raise HungMemberError(hung, f"did not do its part of a step within {limit_s:.1f} s")
            await links.wait(since, deadline, may_sleep=self._may_sleep(), unread=holding)

    def end(self, step: Step, waited_s: float = 0.0) -> None:
        """A step is over. waited_s: for other members, beside exchanges."""
        total_s = time.perf_counter() - self._began_s
        sent, received = self._bytes
        self.patience.observe(sum(len(entry.tokens) for entry in step.entries), total_s)
        self.costs.add(
            step,
            sent=self.links.bytes_sent - sent,
            received=self.links.bytes_received - received,
            exchange_s=self._exchange_s + waited_s,
            total_s=total_s,
        )

    def _advance(self, may_sleep: bool) -> Progress:
        try:
            return self.engine.run(SPIN_S, YIELD_S if may_sleep else SPIN_S)
        except (LinkLostError, RemoteProtocolError) as error:
            raise LinkFaultError(self._ranks[self.engine.communicator.rank], str(error)) from error

    def _take_from(self, node: NodeId) -> None:
        body = self.links.receive(node)
        if isinstance(body, bytes):
            self._take(node, body)

    def _take(self, node: NodeId, body: bytes) -> None:
        try:
            message = decode_data(body)
        except RemoteProtocolError as error:
            raise MemberFaultError(node, str(error)) from error
        self.sequencer.receive(node, message)
