"""The driver's loop of one epoch: form a step from the running requests, have the ranks run it, draw, tell, again.

It may hold no slice itself. Requests come and go between steps (and while it waits for peers). One request's damage
(no logit is a number) fails that request alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from meshllm.daemon.crossing import Crossing
from meshllm.daemon.loop_bridge import Answered, Event
from meshllm.daemon.step_runner import StepRunner
from meshllm.engine.sampling import Candidates, draw
from meshllm.errors import KernelError, RemoteProtocolError
from meshllm.layout.layout import Layout
from meshllm.mesh.batching import Batcher, Outcome
from meshllm.mesh.messages import Epoch, RequestId, Step, Submit
from meshllm.mesh.pacing import PromptPace
from meshllm.mesh.stepping import MemberFaultError
from meshllm.parameters import SampledToken


class StepDriver:
    """See the head of this file."""

    def __init__(self, epoch: Epoch, runner: StepRunner, layout: Layout, events: Crossing[Event]) -> None:
        self._epoch = epoch
        self._runner = runner
        self._layout = layout
        self._events = events
        engine = runner.engine
        self._batcher = Batcher(
            slots=layout.slots, context=layout.context, vocab_size=engine.vocab_size, max_tokens=engine.max_tokens
        )
        self._pace = PromptPace(layout.prediction.prefill_tok_s)
        self._untold: deque[Outcome] = deque()  # what came of requests; told when the next step is under way

    @property
    def has_work(self) -> bool:
        """Whether a step can be formed or something is to be told."""
        return self._batcher.has_work or bool(self._untold)

    def admit(self, submit: Submit) -> None:
        """Takes a request."""
        outcome = self._batcher.admit(submit)
        if outcome is not None:
            self._untold.append(outcome)
        self._runner.links.wake()

    def cancel(self, request: RequestId) -> bool:
        """Drops a request; False if it is not here."""
        return self._batcher.cancel(request)

    async def step(self) -> None:
        """One step, if there is work. Raises what StepRunner raises."""
        step = self._batcher.form_step(self._pace.limit(self._batcher.is_decoding))
        runner, sequencer = self._runner, self._runner.sequencer
        if step is None:
            await self.tell()
            return
        runner.begin()
        began_s = time.perf_counter()
        sequencer.begin(step)
        runner.send(runner.other_ranks, step)
        await self.tell()  # not before: the control loop, once awake, takes this core, and all ranks would wait
        own = await runner.run(step) if runner.engine.is_rank else []
        ended_s = time.perf_counter()
        n_tokens = sum(len(entry.tokens) for entry in step.entries)
        limit_s = runner.patience.limit_s(n_tokens)
        await runner.until(lambda: not sequencer.missing_candidates(), limit_s, sequencer.missing_candidates)
        waited_s = time.perf_counter() - ended_s
        drawn = self._draw(step, own)
        sequencer.finish()
        runner.end(step, waited_s)
        self._pace.observe(n_tokens, time.perf_counter() - began_s)
        self._untold += self._batcher.complete(drawn)

    async def tell(self) -> None:
        """What came of requests, as far as the control loop does not know it."""
        while self._untold:
            await self._events.send(Answered(self._epoch, self._untold.popleft()))

    def _draw(self, step: Step, own: Sequence[Candidates]) -> list[SampledToken | KernelError]:
        """The token of each entry with sampling."""
        drawing = [entry for entry in step.entries if entry.sampling is not None]
        if not drawing:
            return []
        offers = [part for part in self._offers(own, len(drawing)) if part]
        drawn: list[SampledToken | KernelError] = []
        for row, entry in enumerate(drawing):
            assert entry.sampling is not None
            position = entry.position + len(entry.tokens) - 1
            try:
                drawn.append(draw([part[row] for part in offers], entry.sampling, position))
            except KernelError as error:
                drawn.append(error)
        return drawn

    def _offers(self, own: Sequence[Candidates], n_rows: int) -> list[Sequence[Candidates]]:
        """By rank: the candidates of each row; [] of a rank without vocabulary."""
        offers: list[Sequence[Candidates]] = []
        for share in self._layout.shares:
            if share.node == self._runner.own:
                offers.append(own)
                continue
            rows = self._runner.sequencer.candidates_of(share.node)
            if len(rows) != (n_rows if share.slice.vocab else 0):
                raise MemberFaultError(share.node, f"sent candidates of {len(rows)} rows, {n_rows} are due")
            try:
                offers.append([Candidates.from_bytes(row, share.slice.vocab) for row in rows])
            except RemoteProtocolError as error:
                raise MemberFaultError(share.node, str(error)) from error
        return offers
