"""A control loop's face for tests above it: a real model file's tokenizer, and tokens that the test chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

import trio

from meshllm.daemon.control_loop import ControlLoop
from meshllm.daemon.generation import Generator
from meshllm.daemon.readers import Delivery
from meshllm.daemon.served_model import ServedModel
from meshllm.errors import NoModelError
from meshllm.mesh.messages import Failed, Finished, Submit, Tokens
from meshllm.model.model_file import ModelFile
from meshllm.parameters import SampledToken
from meshllm.status import RequestCounts, Status

STATUS = Status(
    version=1, build="0", state="serving", detail=None, node="n", name="n", mesh_tag="t", uptime_s=0.0, model=None,
    layout=None, peers=(), requests=RequestCounts(active=0, answered=0, failed=0, steps=0),
)  # fmt: skip


class EmittingControl:
    """Answers every request with `ids`, one a step, whatever was asked; then what `end` says."""

    def __init__(self, file: ModelFile, ids: Sequence[int] = ()) -> None:
        self.served: ServedModel | None = ServedModel("emitting", "0" * 64, 1, file)
        self.ids = tuple(ids)
        self.end: Callable[[Submit], Delivery] | None = None  # None: "length" after the last id
        self.first_after_s = 0.0
        self.endless = False  # the ids again and again
        self.submits: list[Submit] = []
        self.steps = 0  # tokens that readers took
        self.left: list[str] = []  # requests whose reader left before the end

    def generator(self, context: int = 2048) -> Generator:
        return Generator(cast(ControlLoop, self), context)

    def status(self) -> Status:
        return STATUS

    def model(self, name: str | None = None) -> ServedModel:
        if self.served is None:
            raise NoModelError("no model")
        return self.served

    def reload(self) -> None: ...

    @asynccontextmanager
    async def open_request(self, submit: Submit) -> AsyncIterator[trio.MemoryReceiveChannel[Delivery]]:
        self.submits.append(submit)
        send, receive = trio.open_memory_channel[Delivery](0)  # no step before the one before was read
        ended = False

        async def emit() -> None:
            nonlocal ended
            await trio.sleep(self.first_after_s)
            n = 0
            while n < len(self.ids) or (self.endless and n < submit.max_tokens):
                await send.send(Tokens(submit.request, n, (SampledToken(self.ids[n % len(self.ids)]),)))
                self.steps, n = self.steps + 1, n + 1
            ended = True
            await send.send(self.end(submit) if self.end else Finished(submit.request, "length", n))

        errors: list[Exception] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(emit)
            try:
                yield receive
            except Exception as error:  # raised outside the nursery, as the real one does
                errors.append(error)
            finally:
                if not ended:
                    self.left.append(submit.request)
                nursery.cancel_scope.cancel()
        if errors:
            raise errors[0]


def fails_with(code: str, reason: str) -> Callable[[Submit], Delivery]:
    """An end that is a failure."""
    return lambda submit: Failed(submit.request, code, reason)
