"""The driver's batches, run by an engine whose next token is a hash of the whole history: one lost, doubled or wrongly
reused position changes every later token.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import KernelError
from meshllm.layout.layout import NodeId
from meshllm.mesh.batching import MAX_WAITING, Batcher, common_prefix
from meshllm.mesh.messages import Failed, Finished, ModelHash, RequestId, Step, Submit, Tokens
from meshllm.mesh.pacing import PROMPT_CHUNKS, PromptPace
from meshllm.mesh.stepping import StepLimits, StepSequencer
from meshllm.parameters import SampledToken, SamplingParameters

VOCAB = 50
CONTEXT = 40
OWN = NodeId("0" * 16)


def next_token(history: list[int]) -> int:
    return zlib.crc32(bytes(history)) % VOCAB


def submit_of(number: int, prompt: list[int], max_tokens: int = 8, end: int | None = None) -> Submit:
    ends = () if end is None else (end,)
    return Submit(
        RequestId(f"{number:032x}"), ModelHash("0" * 64), tuple(prompt), (), max_tokens, ends, SamplingParameters()
    )


def expected(submit: Submit) -> tuple[list[int], str]:
    """What one request alone would get."""
    history, answer = list(submit.prompt), []
    while True:
        answer.append(next_token(history))
        history.append(answer[-1])
        if answer[-1] in submit.end_tokens:
            return answer, "stop"
        if len(answer) >= submit.max_tokens or len(history) >= CONTEXT:
            return answer, "length"


@dataclass
class Engine:
    """Slots of token histories, under the rules that every rank checks."""

    slots: int = 3
    max_tokens: int = 16
    caches: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        limits = StepLimits(self.slots, CONTEXT, VOCAB, self.max_tokens)
        self.sequencer = StepSequencer(driver=OWN, ranks=(OWN,), own=OWN, schedule=(), limits=limits)

    def run(self, step: Step) -> list[SampledToken]:
        self.sequencer.begin(step)
        for to, source, n_positions in step.copies:
            self.caches[to] = self.caches[source][:n_positions]
        drawn = []
        for entry in step.entries:
            cache = self.caches[entry.slot]
            assert entry.position <= len(cache)
            cache[entry.position :] = entry.tokens
            if entry.sampling is not None:
                drawn.append(SampledToken(next_token(cache)))
        self.sequencer.finish()
        return drawn


class Run:
    """A batcher and an engine, and what the readers got."""

    def __init__(self, slots: int = 3, max_tokens: int = 16) -> None:
        self.engine = Engine(slots, max_tokens)
        self.batcher = Batcher(slots=slots, context=CONTEXT, vocab_size=VOCAB, max_tokens=max_tokens)
        self.answers: dict[RequestId, list[int]] = defaultdict(list)
        self.ends: dict[RequestId, Finished | Failed] = {}
        self.steps: list[Step] = []

    def admit(self, submit: Submit) -> None:
        self.take(self.batcher.admit(submit))

    def step(self, n_prompt_tokens: int = 16) -> Step | None:
        step = self.batcher.form_step(n_prompt_tokens)
        if step is not None:
            self.steps.append(step)
            for outcome in self.batcher.complete(self.engine.run(step)):
                self.take(outcome)
        return step

    def finish(self) -> None:
        while self.batcher.has_work:
            assert self.step() is not None

    def take(self, outcome: Tokens | Finished | Failed | None) -> None:
        match outcome:
            case Tokens(request, start, tokens):
                assert start == len(self.answers[request])
                self.answers[request] += [token.token for token in tokens]
            case Finished() | Failed():
                assert outcome.request not in self.ends
                self.ends[outcome.request] = outcome
            case None:
                pass


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=CONTEXT - 1)  # few words: many common prefixes
events = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), prompts, st.integers(1, 12), st.one_of(st.none(), st.integers(0, VOCAB - 1))),
        st.tuples(st.just("step"), st.integers(1, 16)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
    ),
    max_size=40,
)


@given(events, st.integers(1, 4))
def test_each_answer_is_what_it_would_be_alone(events: list[tuple[object, ...]], slots: int) -> None:
    run, submits, cancelled = Run(slots), [], set()
    for event in events:
        match event:
            case ("admit", list(prompt), int(max_tokens), end):
                assert end is None or isinstance(end, int)
                submits.append(submit_of(len(submits), prompt, max_tokens, end))
                run.admit(submits[-1])
            case ("step", int(n_prompt_tokens)):
                run.step(n_prompt_tokens)
            case ("cancel", int(number)) if number < len(submits):
                if run.batcher.cancel(submits[number].request):
                    cancelled.add(submits[number].request)
            case _:
                pass
    run.finish()
    for submit in submits:
        answer, reason = expected(submit)
        if submit.request in cancelled:
            assert submit.request not in run.ends
            assert run.answers[submit.request] == answer[: len(run.answers[submit.request])]
        else:
            assert run.answers[submit.request] == answer
            assert run.ends[submit.request] == Finished(submit.request, reason, len(answer))


@given(st.lists(prompts, min_size=1, max_size=8), st.integers(1, 16))
def test_no_step_is_larger_than_allowed(asked: list[list[int]], n_prompt_tokens: int) -> None:
    run = Run(max_tokens=16)
    for number, prompt in enumerate(asked):
        run.admit(submit_of(number, prompt))
    while run.batcher.has_work:
        step = run.step(n_prompt_tokens)
        assert step is not None
        assert sum(len(entry.tokens) for entry in step.entries) <= min(16, n_prompt_tokens + 3)


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    run = Run()
    run.admit(submit_of(0, [1], max_tokens=20))
    run.step()
    run.admit(submit_of(1, [2] * 30))
    before = len(run.answers[RequestId(f"{0:032x}")])
    for _ in range(4):
        run.step(8)
    assert len(run.answers[RequestId(f"{0:032x}")]) == before + 4


def test_prompt_with_a_known_beginning_is_computed_from_there_on() -> None:
    run = Run()
    prompt = [7, 8, 9] * 8
    run.admit(submit_of(0, prompt, max_tokens=1))
    run.finish()
    run.admit(submit_of(1, [*prompt, 1, 2], max_tokens=1))
    step = run.step()
    assert step is not None
    assert [(entry.position, len(entry.tokens)) for entry in step.entries] == [(24, 2)]


def test_beginning_that_a_running_sequence_holds_is_copied() -> None:
    run = Run(max_tokens=32)
    prompt = [7, 8, 9] * 8
    run.admit(submit_of(0, prompt, max_tokens=8))
    run.step(32)
    run.admit(submit_of(1, [*prompt, 1], max_tokens=2))
    step = run.step(32)
    assert step is not None
    assert [n_positions for _, _, n_positions in step.copies] == [24]
    run.finish()
    for number, asked in ((0, submit_of(0, prompt, 8)), (1, submit_of(1, [*prompt, 1], 2))):
        assert run.answers[RequestId(f"{number:032x}")] == expected(asked)[0]


def test_same_prompt_again_computes_its_last_token_only() -> None:
    run = Run()
    for number in range(2):
        run.admit(submit_of(number, [4] * 10, max_tokens=1))
        run.finish()
    assert sum(len(entry.tokens) for entry in run.steps[-1].entries) == 1


def test_replay_counts_on_from_what_the_reader_has() -> None:
    whole = submit_of(0, [1, 2, 3], max_tokens=6)
    answer, _ = expected(whole)
    run = Run()
    run.answers[whole.request] += answer[:4]
    replay = Submit(whole.request, whole.model, whole.prompt, tuple(answer[:4]), 6, (), whole.sampling)
    run.admit(replay)
    run.finish()
    assert run.answers[whole.request] == answer


@pytest.mark.parametrize(("n_prompt", "n_tokens"), [(CONTEXT - 2, 2), (CONTEXT - 1, 1)], ids=["two left", "one left"])
def test_answer_ends_where_the_context_is_full(n_prompt: int, n_tokens: int) -> None:
    run = Run()
    submit = submit_of(0, [1] * n_prompt, max_tokens=100)
    run.admit(submit)
    run.finish()
    assert run.ends[submit.request] == Finished(submit.request, "length", n_tokens)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "invalid_request_error"),
        ([1] * CONTEXT, "context_length_exceeded"),
        ([VOCAB], "invalid_request_error"),
        ([-1], "invalid_request_error"),
    ],
)
def test_request_that_cannot_run_fails_at_once(prompt: list[int], code: str) -> None:
    run = Run()
    submit = submit_of(0, prompt)
    run.admit(submit)
    end = run.ends[submit.request]
    assert isinstance(end, Failed)
    assert end.code == code
    assert not run.batcher.has_work


def test_id_in_use_fails_the_second_request_alone() -> None:
    run = Run()
    run.admit(submit_of(0, [1]))
    outcome = run.batcher.admit(submit_of(0, [2]))
    assert isinstance(outcome, Failed)
    run.finish()
    assert run.answers[RequestId(f"{0:032x}")] == expected(submit_of(0, [1]))[0]


def test_waiting_requests_are_bounded() -> None:
    run = Run()
    for number in range(MAX_WAITING + 1):
        run.admit(submit_of(number, [1]))
    assert [end.code for end in run.ends.values() if isinstance(end, Failed)] == ["unavailable"]


def test_damage_of_one_row_fails_that_request_alone() -> None:
    batcher = Batcher(slots=2, context=CONTEXT, vocab_size=VOCAB, max_tokens=8)
    for number in range(2):
        batcher.admit(submit_of(number, [number + 1], max_tokens=1))
    assert batcher.form_step(8) is not None
    outcomes = batcher.complete([KernelError("no logit is a number"), SampledToken(3)])
    assert [type(outcome) for outcome in outcomes] == [Failed, Tokens, Finished]


def test_pace_shortens_prompts_on_a_slow_device_and_while_others_decode() -> None:
    fast, slow = PromptPace(10_000.0), PromptPace(100.0)
    assert fast.limit(decoding=True) == PROMPT_CHUNKS[0]
    assert slow.limit(decoding=False) == PROMPT_CHUNKS[-1]
    for _ in range(10):
        slow.observe(32, 0.01)
    assert slow.limit(decoding=False) == PROMPT_CHUNKS[0]


@given(prompts, prompts)
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n in (len(a), len(b)) or a[n] != b[n]
