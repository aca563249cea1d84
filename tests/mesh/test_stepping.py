"""The rules of stepping: what a member accepts, drops and refuses, and whom it names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import NodeId
from meshllm.mesh.messages import Candidates, DataMessage, Leave, Ready, Step, StepEntry
from meshllm.mesh.pacing import EASE_S, Patience
from meshllm.mesh.stepping import MemberFaultError, MemberLeftError, StepLimits, StepSequencer
from meshllm.parameters import SamplingParameters

A, B, C, D = (NodeId(f"{i:016x}") for i in range(4))
SCHEDULE = ((0, 1, 2), (0, 2))  # rank 1 (B) has no hidden units
LIMITS = StepLimits(slots=2, context=16, vocab_size=100, max_tokens=8)
DRAW = SamplingParameters(temperature=0.0)


def sequencer_of(own: NodeId, driver: NodeId = A) -> StepSequencer:
    return StepSequencer(driver=driver, ranks=(A, B, C), own=own, schedule=SCHEDULE, limits=LIMITS)


def step_of(number: int = 0, n_tokens: int = 1, position: int = 0, *, draws: bool = True) -> Step:
    return Step(number, (StepEntry(0, position, (5,) * n_tokens, DRAW if draws else None),))


def test_partial_of_the_next_step_may_come_before_it() -> None:
    sequencer = sequencer_of(B)
    sequencer.check_early(C, 0, 0)
    sequencer.receive(A, step_of())
    assert sequencer.take_step() == step_of()
    sequencer.finish()
    sequencer.check_early(C, 1, 1)


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
    "candidates for a rank": (C, Candidates(0, ())),
    "ready again": (C, Ready()),
}


@pytest.mark.parametrize(("sender", "message"), FAULTS.values(), ids=FAULTS)
def test_fault_names_its_sender(sender: NodeId, message: DataMessage) -> None:
    with pytest.raises(MemberFaultError) as caught:
        sequencer_of(B).receive(sender, message)
    assert caught.value.node == sender


@pytest.mark.parametrize(
    ("sender", "step", "exchange", "running"),
    [(C, 1, 0, False), (C, 0, 2, False), (B, 0, 1, False), (D, 0, 0, False), (C, 0, 0, True)],
    ids=["far ahead", "of no exchange", "of one that adds nothing there", "of no rank", "after the last exchange"],
)
def test_partial_that_cannot_be_due_names_its_sender(sender: NodeId, step: int, exchange: int, running: bool) -> None:
    sequencer = sequencer_of(A)
    if running:
        sequencer.begin(step_of())
    with pytest.raises(MemberFaultError) as caught:
        sequencer.check_early(sender, step, exchange)
    assert caught.value.node == sender


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
