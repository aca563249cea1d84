"""The rules of stepping: what a member accepts, drops and refuses, and whom it names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import NodeId
from meshllm.mesh.exchange import ExchangeSchedule
from meshllm.mesh.messages import Candidates, DataMessage, Leave, Partial, Ready, Step, StepEntry
from meshllm.mesh.pacing import EASE_S, Patience
from meshllm.mesh.stepping import MemberFaultError, MemberLeftError, StepLimits, StepSequencer
from meshllm.parameters import SamplingParameters

A, B, C, D = (NodeId(f"{i:016x}") for i in range(4))
SCHEDULE = ExchangeSchedule(((0, 1, 2), (0, 2)), row_bytes=4)  # rank 1 (B) has no hidden units
LIMITS = StepLimits(slots=2, context=16, vocab_size=100, max_tokens=8)
DRAW = SamplingParameters(temperature=0.0)


def sequencer_of(own: NodeId, driver: NodeId = A) -> StepSequencer:
    return StepSequencer(driver=driver, ranks=(A, B, C), own=own, schedule=SCHEDULE, limits=LIMITS)


def step_of(number: int = 0, n_tokens: int = 1, position: int = 0, *, draws: bool = True) -> Step:
    return Step(number, (StepEntry(0, position, (5,) * n_tokens, DRAW if draws else None),))


def partial_of(sender: NodeId, exchange: int = 0, step: int = 0, n_tokens: int = 1) -> Partial:
    return Partial(step, exchange, sender[-1:].encode() * 4 * n_tokens)


def test_partials_come_out_in_rank_order_whatever_order_they_came_in() -> None:
    sequencer = sequencer_of(B)
    sequencer.receive(C, partial_of(C))  # before the step itself
    sequencer.receive(A, step_of())
    assert sequencer.take_step() == step_of()
    assert sequencer.missing(0) == [A]
    sequencer.receive(A, partial_of(A))
    assert sequencer.missing(0) == []
    assert sequencer.take_partials(0, b"1111") == [b"0000", b"1111", b"2222"]


def test_rank_that_adds_nothing_takes_the_others_partials() -> None:
    sequencer = sequencer_of(B)
    sequencer.receive(A, step_of())
    sequencer.take_step()
    sequencer.receive(A, partial_of(A, 1))
    sequencer.receive(C, partial_of(C, 1))
    assert sequencer.take_partials(1, None) == [b"0000", b"2222"]


def test_partial_of_an_older_step_is_dropped() -> None:
    sequencer = sequencer_of(B)
    sequencer.receive(A, step_of())
    sequencer.take_step()
    sequencer.finish()
    sequencer.receive(C, partial_of(C, step=0))
    sequencer.receive(A, step_of(1, position=1))
    sequencer.take_step()
    assert sequencer.missing(0) == [A, C]


def test_doubled_partial_counts_once_and_the_first_stands() -> None:
    sequencer = sequencer_of(B)
    sequencer.receive(A, step_of())
    sequencer.take_step()
    for data in (b"0000", b"9999"):
        sequencer.receive(A, Partial(0, 0, data))
    sequencer.receive(C, partial_of(C))
    assert sequencer.take_partials(0, b"1111")[0] == b"0000"


def test_candidates_of_all_ranks_end_a_step_on_the_driver() -> None:
    sequencer = sequencer_of(A)
    sequencer.begin(step_of())
    assert sequencer.missing_candidates() == [B, C]
    sequencer.receive(B, Candidates(0, ()))  # no vocabulary
    sequencer.receive(C, Candidates(0, (b"offer",)))
    assert sequencer.missing_candidates() == []
    assert (sequencer.candidates_of(B), sequencer.candidates_of(C)) == ((), (b"offer",))
    sequencer.finish()
    sequencer.begin(step_of(1, position=1))
    sequencer.receive(C, Candidates(0, (b"late",)))
    assert sequencer.missing_candidates() == [B, C]


FAULTS: dict[str, tuple[NodeId, DataMessage]] = {
    "a step from a rank": (C, step_of()),
    "a step of another number": (A, step_of(1)),
    "a step with no tokens": (A, Step(0, ())),
    "a step with too many tokens": (A, step_of(n_tokens=9)),
    "a position past what the slot holds": (A, step_of(position=3)),
    "a position past the context": (A, Step(0, (StepEntry(0, 0, (5,) * 8),), ((0, 1, 1),))),
    "a slot that is not there": (A, Step(0, (StepEntry(2, 0, (5,)),))),
    "a slot twice": (A, Step(0, (StepEntry(0, 0, (5,)), StepEntry(0, 1, (5,))))),
    "a copy of what is not held": (A, Step(0, (StepEntry(0, 0, (5,)),), ((0, 1, 3),))),
    "a copy onto itself": (A, Step(0, (StepEntry(0, 0, (5,)),), ((0, 0, 0),))),
    "a token past the vocabulary": (A, Step(0, (StepEntry(0, 0, (100,)),))),
    "a partial far ahead": (C, partial_of(C, step=2)),
    "a partial of no exchange": (C, partial_of(C, exchange=2)),
    "a partial of one that adds nothing": (D, partial_of(D)),
    "candidates for a rank": (C, Candidates(0, ())),
    "ready again": (C, Ready()),
}


@pytest.mark.parametrize(("sender", "message"), FAULTS.values(), ids=FAULTS)
def test_fault_names_its_sender(sender: NodeId, message: DataMessage) -> None:
    with pytest.raises(MemberFaultError) as caught:
        sequencer_of(B).receive(sender, message)
    assert caught.value.node == sender


def test_partial_of_a_wrong_size_is_a_fault_even_if_it_came_early() -> None:
    sequencer = sequencer_of(B)
    sequencer.receive(C, Partial(0, 0, b"short"))
    sequencer.receive(A, step_of())
    with pytest.raises(MemberFaultError) as caught:
        sequencer.take_step()
    assert caught.value.node == C


def test_second_step_before_the_first_is_over_is_a_fault() -> None:
    sequencer = sequencer_of(B)
    sequencer.receive(A, step_of())
    with pytest.raises(MemberFaultError):
        sequencer.receive(A, step_of(1, position=1))


def test_candidates_of_a_wrong_number_of_rows_are_a_fault() -> None:
    sequencer = sequencer_of(A)
    sequencer.begin(step_of())
    with pytest.raises(MemberFaultError):
        sequencer.receive(C, Candidates(0, (b"a", b"b")))


def test_the_drivers_own_mistake_is_a_bug() -> None:
    with pytest.raises(LocalProtocolError):
        sequencer_of(A).begin(step_of(position=3))


@pytest.mark.parametrize(("blamed", "named"), [(C, C), (None, None), (B, A)], ids=["another", "nobody", "us"])
def test_leave_says_who_is_to_blame(blamed: NodeId | None, named: NodeId | None) -> None:
    with pytest.raises(MemberLeftError) as caught:
        sequencer_of(B).receive(A, Leave(blamed, "it hung"))
    assert caught.value.node == named


@given(st.lists(st.tuples(st.integers(1, 256), st.floats(0.0, 5.0)), max_size=30))
def test_patience_is_never_shorter_than_the_ease_nor_than_the_last_step(seen: list[tuple[int, float]]) -> None:
    patience = Patience(30.0, 300.0)
    for n_tokens, seconds in seen:
        patience.observe(n_tokens, seconds)
        assert patience.limit_s(n_tokens) >= EASE_S + seconds
    assert patience.limit_s(1) < float("inf")
