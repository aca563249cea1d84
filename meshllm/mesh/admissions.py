"""The driver's requests, of all roots: each runs in one epoch, and goes back to its root when that is over. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshllm.layout.layout import NodeId
from meshllm.mesh.actions import Admit, CancelAdmitted
from meshllm.mesh.messages import Epoch, Failed, Finished, RequestId, Submit, Tokens
from meshllm.mesh.outbox import Outbox
from meshllm.mesh.request import LOST, UNAVAILABLE

MAX_ADMITTED: Final = 1024  # requests that one driver takes, running and queued


@dataclass(slots=True)
class Admission:
    """A request that runs at the driver."""

    root: NodeId
    epoch: Epoch


class Admissions:
    """See the head of this file. `answer(root, message)` takes messages to a root, this node included."""

    def __init__(self, out: Outbox, answer: Callable[[NodeId, Tokens | Finished | Failed], None]) -> None:
        self._out = out
        self._answer = answer
        self._requests: dict[RequestId, Admission] = {}

    def take(self, root: NodeId, submit: Submit, epoch: Epoch) -> None:
        """Runs a request in an epoch. One too many, or with another root's id, fails at once; one that runs runs on."""
        known = self._requests.get(submit.request)
        if known is not None and known.root == root:
            return
        if known is not None:
            self._answer(root, Failed(submit.request, "invalid_request_error", "the request id is in use"))
        elif len(self._requests) >= MAX_ADMITTED:
            self._answer(root, Failed(submit.request, UNAVAILABLE, f"busy: {MAX_ADMITTED} requests are running"))
        else:
            self._requests[submit.request] = Admission(root, epoch)
            self._out.add(Admit(epoch, submit))

    def count(self, epoch: Epoch) -> int:
        """Requests that run in an epoch."""
        return sum(admission.epoch == epoch for admission in self._requests.values())

    def answered(self, epoch: Epoch, message: Tokens | Finished | Failed) -> None:
        """What the data loop says of one."""
        admission = self._requests.get(message.request)
        if admission is None or admission.epoch != epoch:
            return  # cancelled, or it runs in a later epoch by now
        if not isinstance(message, Tokens):
            del self._requests[message.request]
        self._answer(admission.root, message)

    def cancel(self, request: RequestId, root: NodeId) -> None:
        """Its root wants no more."""
        admission = self._requests.get(request)
        if admission is not None and admission.root == root:
            self._drop(request)

    def root_lost(self, root: NodeId) -> None:
        """Nobody reads the answers of this root."""
        for request in [r for r, admission in self._requests.items() if admission.root == root]:
            self._drop(request)

    def fail_epoch(self, epoch: Epoch, reason: str) -> None:
        """Gives the requests of an epoch that is no more back to their roots."""
        for request in [r for r, admission in self._requests.items() if admission.epoch == epoch]:
            self._answer(self._requests.pop(request).root, Failed(request, LOST, reason))

    def _drop(self, request: RequestId) -> None:
        del self._requests[request]
        self._out.add(CancelAdmitted(request))
