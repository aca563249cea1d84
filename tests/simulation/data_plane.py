"""A small fake of the data plane: an epoch is a set of processes that are linked; a token is a hash of all before it.

So a lost, doubled, reordered or foreign token changes every later one. Packing takes time and may be refused; a step
needs every member alive, reachable and still holding the epoch, else each member that notices reports it broken.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from meshllm.mesh.actions import Admit, PrepareEpoch
from meshllm.mesh.messages import Epoch, Finished, RequestId, Submit, Tokens
from meshllm.parameters import SampledToken

if TYPE_CHECKING:
    from cluster import Cluster, Process

VOCAB = 1000
END_TOKEN = 7
LINK_DEADLINE_S = 5.0
STEP_DEADLINE_S = 2.0
CROSSING_S = 0.002  # from the data loop to the control loop


def next_token(history: tuple[int, ...]) -> int:
    """The fake model."""
    digest = hashlib.blake2b(array("I", history).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


@cache
def right_answer(submit: Submit) -> tuple[int, ...]:
    """All that a request should get."""
    tokens = submit.generated
    while len(tokens) < submit.max_tokens and not (tokens and tokens[-1] in submit.end_tokens):
        tokens += (next_token(submit.prompt + tokens),)
    return tokens


@dataclass
class EpochData:
    """What one process holds of an epoch."""

    action: PrepareEpoch
    n_bytes: int
    linked: bool = False
    broken: bool = False
    requests: dict[RequestId, tuple[Submit, tuple[int, ...]]] = field(default_factory=dict)


class DataPlane:
    """Of one process."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self.cluster = cluster
        self.process = process
        self.epochs: dict[Epoch, EpochData] = {}
        self.stepping: dict[Epoch, None] = {}

    def prepare(self, action: PrepareEpoch) -> None:
        rng = self.cluster.scheduler.rng
        share = action.layout.shares[action.rank] if action.rank is not None else None
        n_bytes = share.slice_bytes + share.cache_bytes + self.cluster.buffer_bytes if share else 0
        fits = self.held_bytes() + n_bytes <= self.process.options.memory
        self.epochs[action.epoch] = EpochData(action, n_bytes if fits else 0)
        assert self.held_bytes() <= self.process.options.memory
        if not fits or rng.random() < self.cluster.refusals:
            self._later(rng.uniform(0.0, 0.5), lambda: self._refuse(action.epoch))
        else:
            began = self.cluster.scheduler.now
            self._later(rng.uniform(0.02, 0.8), lambda: self._link(action.epoch, began))

    def retire(self, epoch: Epoch) -> None:
        self.epochs.pop(epoch, None)

    def admit(self, action: Admit) -> None:
        self.epochs[action.epoch].requests[action.submit.request] = (action.submit, action.submit.generated)
        self._start_steps(action.epoch)

    def cancel(self, request: RequestId) -> None:
        for data in self.epochs.values():
            data.requests.pop(request, None)

    def held_bytes(self) -> int:
        return sum(data.n_bytes for data in self.epochs.values())

    # --- inside

    def _later(self, delay: float, work: object) -> None:
        self.process.later(delay, work)

    def _refuse(self, epoch: Epoch) -> None:
        if epoch in self.epochs:
            self.process.call(lambda node, now: node.prepare_refused(epoch, "needs 12 MB more memory", now))

    def _link(self, epoch: Epoch, began: float) -> None:
        data = self.epochs.get(epoch)
        if data is None:
            return
        missing = self._unreachable(data)
        if not missing:
            data.linked = True
            self.cluster.invariants.prepared(epoch, self.process.node_id)
            self.process.call(lambda node, now: node.prepared(epoch, now))
        elif self.cluster.scheduler.now - began > LINK_DEADLINE_S:
            self._break(epoch, missing[0], "no data link")
        else:
            self._later(0.1, lambda: self._link(epoch, began))

    def _unreachable(self, data: EpochData) -> list[str]:
        """Members that do not hold the epoch or cannot be reached both ways."""
        missing = []
        for node in data.action.members:
            other = self.cluster.find(node)
            cut = other is None or self.cluster.is_apart(self.process, other)
            if other is None or cut or other.data is None or data.action.epoch not in other.data.epochs:
                missing.append(node)
        return missing

    def _start_steps(self, epoch: Epoch) -> None:
        if epoch not in self.stepping:
            self.stepping[epoch] = None
            self._later(self.cluster.scheduler.rng.uniform(0.005, 0.05), lambda: self._step(epoch, None))

    def _step(self, epoch: Epoch, waiting_since: float | None) -> None:
        data = self.epochs.get(epoch)
        if data is None or not data.requests or data.broken:
            self.stepping.pop(epoch, None)
            return
        now = self.cluster.scheduler.now
        missing = self._unreachable(data)
        if missing:
            since = now if waiting_since is None else waiting_since
            if now - since >= STEP_DEADLINE_S:
                self.stepping.pop(epoch, None)
                self.cluster.break_epoch(epoch, missing[0], "no partial sum within 2.0 s")
            else:
                self._later(0.1, lambda: self._step(epoch, since))
            return
        for request, (submit, tokens) in list(data.requests.items()):
            self._draw(epoch, data, request, submit, tokens)
        self._later(self.cluster.scheduler.rng.uniform(0.005, 0.05), lambda: self._step(epoch, None))

    def _draw(self, epoch: Epoch, data: EpochData, request: RequestId, submit: Submit, tokens: tuple[int, ...]) -> None:
        token = next_token(submit.prompt + tokens)
        grown = (*tokens, token)
        data.requests[request] = (submit, grown)
        drawn = Tokens(request, len(tokens), (SampledToken(token),))
        self._tell(epoch, drawn)
        ended = token in submit.end_tokens
        if ended or len(grown) >= submit.max_tokens:
            data.requests.pop(request, None)
            self._tell(epoch, Finished(request, "stop" if ended else "length", len(grown)))

    def _tell(self, epoch: Epoch, message: Tokens | Finished) -> None:
        """Late, as it comes from another thread: the epoch may be over by then."""
        self._later(CROSSING_S, lambda: self.process.call(lambda node, now: node.answered(epoch, message, now)))

    def _break(self, epoch: Epoch, node: str | None, reason: str) -> None:
        data = self.epochs.get(epoch)
        if data is not None and not data.broken:
            data.broken = True
            self.process.call(lambda n, now: n.epoch_broken(epoch, node, reason, now))

    def notice_broken(self, epoch: Epoch, node: str | None, reason: str) -> None:
        """A data link of this epoch ended here."""
        self._later(self.cluster.scheduler.rng.uniform(0.0, 0.05), lambda: self._break(epoch, node, reason))
