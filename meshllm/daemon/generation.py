"""One answer, at its root: prompt tokens in, pieces of text out. What the API calls; it sees no mesh.

A request is checked before it is submitted, so that what can never be answered fails at once. Leaving `open` ends the
generation on all devices. Stop strings are matched here, on text, since only the root knows text.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, assert_never, cast

import msgspec
import trio

from meshllm.daemon.control_loop import ControlLoop
from meshllm.daemon.decode_clock import DecodeClock
from meshllm.daemon.served_model import ServedModel
from meshllm.errors import ContextLengthError, InvalidRequestError, MeshLLMError, ModelFileError, UnavailableError
from meshllm.limits import MAX_SEED
from meshllm.mesh.actions import Delivery, Resuming
from meshllm.mesh.messages import Failed, Finished, ModelHash, RequestId, Submit, Tokens
from meshllm.model.chat_template import CHATML, ChatTemplate, JsonValue, Message
from meshllm.model.text_stream import TextStream
from meshllm.model.tokenizer import Tokenizer
from meshllm.parameters import SampledToken, SamplingParameters
from meshllm.status import Status

FinishReason: TypeAlias = Literal["stop", "length"]
_FAILURES: Final[dict[str, type[MeshLLMError]]] = {  # by Failed.code; any other is UnavailableError
    error.code: error for error in (InvalidRequestError, ContextLengthError, ModelFileError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A checked request. max_tokens None: as many as the context holds. seed None: drawn here."""

    prompt: tuple[int, ...]
    sampling: SamplingParameters
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def with_choice(self, index: int) -> GenerationRequest:
        """The same for a further choice: another seed, so another draw."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) & MAX_SEED)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that can be answered, ready to be opened."""

    submit: Submit
    stop: tuple[str, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.submit.prompt


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became ready, and the tokens that came with it; either may be empty."""

    text: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer. ranks: names of the devices that computed it; decode_tok_s: after the first token."""

    reason: FinishReason
    completion_tokens: int
    decode_tok_s: float | None
    ranks: tuple[str, ...]


class Generator:
    """Answers requests on the model that this daemon serves."""

    def __init__(self, control: ControlLoop, context: int) -> None:
        """context: positions a sequence may have by configuration."""
        self.control = control
        self._context = context

    def status(self) -> Status:
        """Everything that is known of this daemon and its mesh."""
        return self.control.status()

    def model(self, name: str | None = None) -> ServedModel:
        """The model served, if `name` is None, its name or its hash. Raises NoModelError or ModelFileError."""
        return self.control.model(name)

    def tokenizer(self) -> Tokenizer:
        """Of the model served."""
        return self.model().file.tokenizer

    def context_length(self) -> int:
        """Positions that prompt and answer may take together."""
        limit = min(self._context, self.model().file.hyperparameters.context_length)
        layout = self.control.status().layout
        return limit if layout is None else min(limit, layout.context)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None,
        variables: Mapping[str, object],
    ) -> list[int]:
        """Prompt ids of a conversation by the model's own template. Raises InvalidRequestError in the template's
        words, ContextLengthError.
        """
        file, context = self.model().file, self.context_length()
        template = file.chat_template or ChatTemplate(CHATML, "", "")

        def encode() -> list[int]:
            text, mark = template.render_disarmed(
                file.tokenizer,
                cast("Sequence[Message]", messages),
                cast("Sequence[JsonValue] | None", tools),
                True,
                **cast("Mapping[str, JsonValue]", variables),
            )
            _check_length(file.tokenizer, text, context, "messages")
            return file.tokenizer.encode_disarmed(text, mark)

        return await trio.to_thread.run_sync(encode, abandon_on_cancel=True)  # a long text takes long

    async def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt. Raises ContextLengthError."""
        _check_length(self.tokenizer(), text, self.context_length(), "prompt")
        return await self.encode_text(text)

    async def encode_text(self, text: str, *, parse_special: bool = True, add_bos: bool = True) -> list[int]:
        """Ids of any text."""
        tokenizer = self.tokenizer()

        def encode() -> list[int]:
            return tokenizer.encode(text, parse_special=parse_special, add_bos=add_bos)

        return await trio.to_thread.run_sync(encode, abandon_on_cancel=True)

    def check(self, request: GenerationRequest, param: str) -> CheckedRequest:
        """Raises InvalidRequestError or ContextLengthError if it can never be answered. param: where its prompt is."""
        served, n_prompt = self.model(), len(request.prompt)
        vocab_size, context = served.file.hyperparameters.vocab_size, self.context_length()
        if not n_prompt:
            raise InvalidRequestError("the prompt holds no token: give it some text", param)
        bad = next((token for token in request.prompt if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(f"token id {bad} is not in the vocabulary of 0 to {vocab_size - 1}", param)
        if n_prompt >= context:
            raise _too_long(f"{n_prompt} tokens", context, param)
        room = context - n_prompt
        seed = secrets.randbits(64) if request.seed is None else request.seed
        submit = Submit(
            request=RequestId(secrets.token_hex(16)),
            model=ModelHash(served.sha256),
            prompt=request.prompt,
            generated=(),
            max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
            end_tokens=() if request.ignore_eos else tuple(sorted(served.file.tokenizer.end_tokens)),
            sampling=msgspec.structs.replace(request.sampling, seed=seed),
        )
        return CheckedRequest(submit, request.stop)

    @asynccontextmanager
    async def open(self, request: CheckedRequest) -> AsyncIterator[AsyncIterator[Piece | Finish]]:
        """The answer as it comes; its last item is the Finish. Leaving cancels it.

        Iterating raises UnavailableError, ContextLengthError or another MeshLLMError where the mesh fails it.
        """
        text = TextStream(self.tokenizer(), request.stop)
        async with (
            self.control.open_request(request.submit) as deliveries,
            aclosing(self._pieces(deliveries, text)) as pieces,
        ):
            yield pieces

    async def _pieces(
        self, deliveries: trio.MemoryReceiveChannel[Delivery], text: TextStream
    ) -> AsyncGenerator[Piece | Finish, None]:
        clock, resuming = DecodeClock(), True
        ranks: dict[str, None] = {}  # of all layouts that had a part in it
        async for delivery in deliveries:
            match delivery:
                case Tokens(tokens=tokens):
                    shown, n_used = "", 0
                    for token in tokens:
                        shown += text.feed(token.token)
                        n_used += 1
                        if text.stopped:
                            break
                    clock.take(n_used, time.monotonic())
                    if resuming:  # later another layout may be in force, which has no part in it
                        ranks |= dict.fromkeys(self._ranks())
                        resuming = False
                    yield Piece(shown, tokens[:n_used])
                    if text.stopped:
                        yield _finish("stop", clock, ranks)
                        return
                case Resuming():
                    resuming = True
                case Finished(reason=reason):
                    if rest := text.flush():
                        yield Piece(rest, ())
                    yield _finish("stop" if reason == "stop" or text.stopped else "length", clock, ranks)
                    return
                case Failed():
                    raise _FAILURES.get(delivery.code, UnavailableError)(delivery.reason)
                case never:
                    assert_never(never)
        raise UnavailableError("the daemon is stopping: ask again when it runs")

    def _ranks(self) -> tuple[str, ...]:
        status = self.control.status()
        names = {peer.id: peer.name for peer in status.peers}
        ranks = status.layout.ranks if status.layout is not None else ()
        return tuple(names.get(node, node) for node in ranks)


def _finish(reason: FinishReason, clock: DecodeClock, ranks: Iterable[str]) -> Finish:
    return Finish(reason, clock.tokens, clock.tok_s(), tuple(ranks))


def _check_length(tokenizer: Tokenizer, text: str, context: int, param: str) -> None:
    """Before it is encoded: megabytes of text, which no context holds, would take seconds and gigabytes."""
    least = tokenizer.least_tokens(text)
    if least >= context:
        raise _too_long(f"{len(text)} characters, so {least} tokens or more", context, param)


def _too_long(found: str, context: int, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"the prompt has {found}, the context holds {context} tokens and an answer needs one: shorten the prompt, or"
        " start the daemons with a larger --context",
        param,
    )
