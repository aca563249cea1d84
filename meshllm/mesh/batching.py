"""The driver's batches: which tokens of which sequences the next step computes, and what the drawn tokens end. Pure.

Continuous batching. A request waits until a slot is free, in order of arrival. A step takes the next token of every
sequence that decodes and fills up with prompt tokens, oldest request first, in chunks; so a long prompt delays the
others by a chunk and no more. A sequence starts from what some slot already holds of it: in place where that slot is
free, by a copy where it is in use.

Life of a step: `form_step`, then `complete` with the tokens drawn. Between the two only `admit` and `cancel` may come;
a cancelled sequence gives its slot up at once, and its tokens of the running step are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from meshllm.errors import KernelError, LocalProtocolError
from meshllm.mesh.messages import Failed, Finished, RequestId, Step, StepEntry, Submit, Tokens
from meshllm.parameters import SampledToken

MAX_WAITING: Final = 256  # requests without a slot; more are told to come again
LEAST_COPY: Final = 16  # tokens alike, for which copying a slot that is in use is worth while

Outcome: TypeAlias = Tokens | Finished | Failed


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request that runs or waits. tokens: prompt and answer so far; the first n_computed are in its slot's cache."""

    submit: Submit
    tokens: list[int]
    end_tokens: frozenset[int]
    n_computed: int = 0

    @property
    def n_answered(self) -> int:
        return len(self.tokens) - len(self.submit.prompt)

    @property
    def n_pending(self) -> int:
        """Tokens to compute before the next one can be drawn; 1 while it decodes."""
        return len(self.tokens) - self.n_computed


@dataclass(slots=True, eq=False)
class _Slot:
    """held: the tokens whose keys and values its cache has. used: when it was last given away, counting."""

    held: list[int] = field(default_factory=list)
    sequence: _Sequence | None = None
    used: int = 0


class Batcher:
    """The sequences of one epoch on its driver."""

    def __init__(self, *, slots: int, context: int, vocab_size: int, max_tokens: int) -> None:
        """context: positions a slot. max_tokens: rows a step, at least `slots`."""
        if max_tokens < slots:
            raise LocalProtocolError(f"steps of {max_tokens} tokens for {slots} slots")
        self._slots = [_Slot() for _ in range(slots)]
        self._context = context
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._waiting: deque[_Sequence] = deque()
        self._drawing: list[_Sequence] | None = None  # of the running step, one for each entry with sampling
        self._n_steps = 0
        self._n_placed = 0

    @property
    def has_work(self) -> bool:
        """Whether form_step would give a step."""
        return bool(self._waiting) or any(slot.sequence is not None for slot in self._slots)

    @property
    def is_decoding(self) -> bool:
        """Whether some sequence only needs its next token, so that a long step would make a reader wait."""
        return any(slot.sequence is not None and slot.sequence.n_pending == 1 for slot in self._slots)

    def requests(self) -> tuple[RequestId, ...]:
        """All that run or wait."""
        running = [slot.sequence for slot in self._slots if slot.sequence is not None]
        return tuple(sequence.submit.request for sequence in [*running, *self._waiting])

    def admit(self, submit: Submit) -> Outcome | None:
        """Takes a request; or answers at once: Failed if it cannot run, Finished if nothing is left to draw."""
        refusal = self._refusal(submit)
        if refusal is not None:
            return refusal
        tokens = [*submit.prompt, *submit.generated]
        sequence = _Sequence(submit, tokens, frozenset(submit.end_tokens))
        ended = self._ended(sequence)
        if ended is None:
            self._waiting.append(sequence)
        return ended

    def cancel(self, request: RequestId) -> bool:
        """Drops a request; its slot is free for the next step. False if it is not here."""
        for sequence in self._waiting:
            if sequence.submit.request == request:
                self._waiting.remove(sequence)
                return True
        for slot in self._slots:
            if slot.sequence is not None and slot.sequence.submit.request == request:
                slot.sequence = None
                return True
        return False

    def _refusal(self, submit: Submit) -> Failed | None:
        request, n_prompt = submit.request, len(submit.prompt)
        if request in self.requests():
            return Failed(request, "invalid_request_error", "a request with this id is running")
        if len(self._waiting) >= MAX_WAITING:
            return Failed(request, "unavailable", f"{MAX_WAITING} requests wait already; try again later")
        if n_prompt == 0:
            return Failed(request, "invalid_request_error", "the prompt has no tokens")
        if n_prompt >= self._context:
            reason = f"the prompt has {n_prompt} tokens, which leaves no room in a context of {self._context}"
            return Failed(request, "context_length_exceeded", reason)
        if not all(0 <= token < self._vocab_size for token in (*submit.prompt, *submit.generated)):
            reason = f"the prompt holds a token id that the vocabulary of {self._vocab_size} does not have"
            return Failed(request, "invalid_request_error", reason)
        return None

    def form_step(self, n_prompt_tokens: int) -> Step | None:
        """The next step, or None if there is nothing to do. n_prompt_tokens: of prompts, at most, but at least one."""
        if self._drawing is not None:
            raise LocalProtocolError("a step runs already")
        copies = self._place_waiting()
        entries = self._decode_entries()
        room = min(max(n_prompt_tokens, 1), self._max_tokens - len(entries))
        for slot, sequence in self._prefilling():
            n_tokens = min(room, sequence.n_pending)
            if n_tokens > 0:
                entries.append(self._entry(slot, sequence, n_tokens))
                room -= n_tokens
        if not entries:
            return None
        self._drawing = [self._sequence_of(entry) for entry in entries if entry.sampling is not None]
        step = Step(self._n_steps, tuple(entries), tuple(copies))
        self._n_steps += 1
        return step

    def complete(self, drawn: Sequence[SampledToken | KernelError]) -> list[Outcome]:
        """The running step is over; `drawn` are the tokens of its entries with sampling, in order.

        An error in place of a token fails that request alone.
        """
        sequences, self._drawing = self._drawing, None
        if sequences is None or len(sequences) != len(drawn):
            raise LocalProtocolError(f"{len(drawn)} tokens for a step that draws {sequences and len(sequences)}")
        outcomes: list[Outcome] = []
        for sequence, token in zip(sequences, drawn, strict=True):
            slot = next((slot for slot in self._slots if slot.sequence is sequence), None)
            if slot is not None:  # else it was cancelled meanwhile
                outcomes += self._take_token(slot, sequence, token)
        return outcomes

    def _take_token(self, slot: _Slot, sequence: _Sequence, token: SampledToken | KernelError) -> list[Outcome]:
        if isinstance(token, KernelError):
            slot.sequence = None
            return [Failed(sequence.submit.request, token.code, str(token))]
        start = sequence.n_answered
        sequence.tokens.append(token.token)
        drawn = Tokens(sequence.submit.request, start, (token,))
        ended = self._ended(sequence)
        if ended is None:
            return [drawn]
        slot.sequence = None
        return [drawn, ended]

    def _ended(self, sequence: _Sequence) -> Finished | None:
        request, n_answered = sequence.submit.request, sequence.n_answered
        if n_answered > 0 and sequence.tokens[-1] in sequence.end_tokens:
            return Finished(request, "stop", n_answered)
        if n_answered >= sequence.submit.max_tokens or len(sequence.tokens) >= self._context:
            return Finished(request, "length", n_answered)
        return None

    def _decode_entries(self) -> list[StepEntry]:
        running = enumerate(slot.sequence for slot in self._slots)
        return [self._entry(i, sequence, 1) for i, sequence in running if sequence and sequence.n_pending == 1]

    def _prefilling(self) -> list[tuple[int, _Sequence]]:
        """Slots with prompt tokens to compute, oldest first."""
        running = [(slot.used, i, slot.sequence) for i, slot in enumerate(self._slots) if slot.sequence is not None]
        ordered = sorted(running, key=lambda item: item[0])
        return [(i, sequence) for _, i, sequence in ordered if sequence.n_pending > 0]

    def _entry(self, index: int, sequence: _Sequence, n_tokens: int) -> StepEntry:
        """The next n_tokens of a sequence; from here on they count as computed."""
        slot, position = self._slots[index], sequence.n_computed
        tokens = tuple(sequence.tokens[position : position + n_tokens])
        sequence.n_computed += n_tokens
        slot.held[position:] = tokens
        submit = sequence.submit
        draws = sequence.n_pending == 0
        return StepEntry(
            index, position, tokens, submit.sampling if draws else None, len(submit.prompt) if draws else 0
        )

    def _sequence_of(self, entry: StepEntry) -> _Sequence:
        sequence = self._slots[entry.slot].sequence
        assert sequence is not None  # entries are made of slots in use
        return sequence

    def _place_waiting(self) -> list[tuple[int, int, int]]:
        """Gives free slots to waiting requests; returns the copies to make before the step."""
        copies = []
        while self._waiting and any(slot.sequence is None for slot in self._slots):
            copy = self._place(self._waiting.popleft())
            if copy is not None:
                copies.append(copy)
        return copies

    def _place(self, sequence: _Sequence) -> tuple[int, int, int] | None:
        """Gives the best free slot to a sequence; the copy that makes it start from what another slot holds."""
        wanted = sequence.tokens[:-1]  # the last token must be computed, to draw from
        alike = [common_prefix(slot.held, wanted) for slot in self._slots]
        free = [i for i, slot in enumerate(self._slots) if slot.sequence is None]
        best = max(free, key=lambda i: (alike[i], -self._slots[i].used))
        source = max(range(len(self._slots)), key=lambda i: alike[i])
        copy = None
        if alike[source] >= alike[best] + LEAST_COPY:
            best = min(free, key=lambda i: self._slots[i].used)
            copy = (best, source, alike[source])
        slot = self._slots[best]
        self._n_placed += 1
        sequence.n_computed = alike[source] if copy else alike[best]
        slot.held = sequence.tokens[: sequence.n_computed]
        slot.sequence, slot.used = sequence, self._n_placed
        return copy


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens a and b begin alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # comparing slices is quick, one token after the other is not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
