"""Local readers of answers: a bounded channel for each request of this daemon, and the counts that `status` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import trio

from meshllm.mesh.actions import Delivery, Resuming
from meshllm.mesh.messages import Failed, Finished, RequestId, Submit, Tokens
from meshllm.mesh.request import MAX_REPLAYS
from meshllm.status import RequestCounts


@dataclass(slots=True)
class _Reader:
    channel: trio.MemorySendChannel[Delivery]
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0


class Readers:
    """Owned by the control loop."""

    def __init__(self) -> None:
        self._readers: dict[RequestId, _Reader] = {}
        self._answered = 0
        self._failed = 0
        self._decode_tok_s: float | None = None

    def open(self, submit: Submit) -> trio.MemoryReceiveChannel[Delivery]:
        """A place for the answer of a request; it ends after Finished or Failed."""
        most = (submit.max_tokens + 1) * (1 + MAX_REPLAYS) + 1  # that can ever come
        send, receive = trio.open_memory_channel[Delivery](most)
        self._readers[submit.request] = _Reader(send)
        return receive

    def close(self, request: RequestId) -> bool:
        """Its reader has left; False if it was over already."""
        reader = self._readers.pop(request, None)
        if reader is None:
            return False
        reader.channel.close()
        return True

    def deliver(self, request: RequestId, message: Delivery, now: float) -> None:
        """Hands a message to its reader, if that is still there."""
        reader = self._readers.get(request)
        if reader is None:
            return
        reader.channel.send_nowait(message)
        match message:
            case Tokens():
                reader.first_s = now if reader.first_s is None else reader.first_s
                reader.last_s = now
                reader.tokens += len(message.tokens)
            case Resuming():
                pass
            case Finished():
                self._answered += 1
                if reader.first_s is not None and reader.tokens > 1 and reader.last_s > reader.first_s:
                    self._decode_tok_s = (reader.tokens - 1) / (reader.last_s - reader.first_s)
                self.close(request)
            case Failed():
                self._failed += 1
                self.close(request)
            case never:
                assert_never(never)

    def counts(self, steps: int) -> RequestCounts:
        """For `status`; steps come from the data loop."""
        return RequestCounts(
            active=len(self._readers),
            answered=self._answered,
            failed=self._failed,
            steps=steps,
            decode_tok_s=self._decode_tok_s,
        )
