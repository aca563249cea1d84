"""Local readers: what they get, and what is counted."""

from __future__ import annotations

import pytest
import trio

from meshllm.daemon.readers import Readers
from meshllm.mesh.messages import Failed, Finished, ModelHash, RequestId, Submit, Tokens
from meshllm.parameters import SampledToken, SamplingParameters

REQUEST = RequestId("0" * 32)
SUBMIT = Submit(REQUEST, ModelHash("a" * 64), (1, 2), (), 8, (), SamplingParameters())


def tokens(start: int, *ids: int) -> Tokens:
    return Tokens(REQUEST, start, tuple(SampledToken(i) for i in ids))


async def test_an_answer_ends_after_finished_and_is_counted() -> None:
    readers = Readers()
    with readers.open(SUBMIT) as channel:
        assert readers.counts(0).active == 1
        readers.deliver(REQUEST, tokens(0, 5), 10.0)
        readers.deliver(REQUEST, tokens(1, 6, 7), 12.0)
        readers.deliver(REQUEST, Finished(REQUEST, "stop", 3), 12.0)
        got = [message async for message in channel]
    assert got == [tokens(0, 5), tokens(1, 6, 7), Finished(REQUEST, "stop", 3)]
    counts = readers.counts(9)
    assert (counts.active, counts.answered, counts.failed, counts.steps) == (0, 1, 0, 9)
    assert counts.decode_tok_s == pytest.approx(1.0)  # two tokens after the first in two seconds
    assert not readers.close(REQUEST)


async def test_a_failed_answer_is_counted_as_failed() -> None:
    readers = Readers()
    with readers.open(SUBMIT) as channel:
        readers.deliver(REQUEST, Failed(REQUEST, "unavailable", "a rank was lost"), 1.0)
        assert [message async for message in channel] == [Failed(REQUEST, "unavailable", "a rank was lost")]
    assert readers.counts(0).failed == 1


async def test_what_comes_for_a_reader_that_left_is_dropped() -> None:
    readers = Readers()
    with readers.open(SUBMIT):
        assert readers.close(REQUEST)
    readers.deliver(REQUEST, tokens(0, 5), 1.0)
    assert readers.counts(0).active == 0


async def test_a_slow_reader_loses_nothing_of_a_whole_answer() -> None:
    readers = Readers()
    with readers.open(SUBMIT) as channel:
        for i in range(SUBMIT.max_tokens):
            readers.deliver(REQUEST, tokens(i, i), float(i))
        readers.deliver(REQUEST, Finished(REQUEST, "length", 8), 9.0)
        await trio.lowlevel.checkpoint()
        assert len([message async for message in channel]) == 9
