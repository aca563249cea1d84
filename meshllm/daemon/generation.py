"""One answer, at its root: prompt tokens in, pieces of text out. What the API calls; it sees no mesh.

A request is checked before it is submitted, so that what can never be answered fails at once. Leaving `open` ends the
generation on all devices. Stop strings are matched here, on text, since only the root knows text.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, assert_never, cast

import msgspec
import trio

from meshllm.daemon.control_loop import ControlLoop
from meshllm.daemon.readers import Delivery
from meshllm.daemon.served_model import ServedModel
from meshllm.errors import ContextLengthError, InvalidRequestError, MeshLLMError, UnavailableError
from meshllm.mesh.messages import Failed, Finished, ModelHash, RequestId, Submit, Tokens
from meshllm.model.chat_template import ChatTemplate, JsonValue, Message
from meshllm.model.text_stream import TextStream
from meshllm.model.tokenizer import Tokenizer
from meshllm.parameters import SampledToken, SamplingParameters
from meshllm.status import Status

FinishReason: TypeAlias = Literal["stop", "length"]
MAX_SEED: Final = 2**64 - 1

# For a file that brings none: ChatML, which most small models know.
_CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
        self._control = control
        self._context = context

    def status(self) -> Status:
        """Everything that is known of this daemon and its mesh."""
        return self._control.status()

    def reload(self) -> None:
        """Looks for a model again, if none is served."""
        self._control.reload()

    def model(self, name: str | None = None) -> ServedModel:
        """The model served, if `name` is None, its name or its hash. Raises NoModelError or ModelFileError."""
        return self._control.model(name)

    def tokenizer(self) -> Tokenizer:
        """Of the model served."""
        return self.model().file.tokenizer

    def context_length(self) -> int:
        """Positions that prompt and answer may take together."""
        limit = min(self._context, self.model().file.hyperparameters.context_length)
        layout = self._control.status().layout
        return limit if layout is None else min(limit, layout.context)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None,
        variables: Mapping[str, object],
    ) -> list[int]:
        """Prompt ids of a conversation by the model's own template. Raises InvalidRequestError in the template's
        words.
        """
        file = self.model().file
        template = file.chat_template or ChatTemplate(_CHATML, "", "")

        def encode() -> list[int]:
            return template.encode_chat(
                file.tokenizer,
                cast("Sequence[Message]", messages),
                cast("Sequence[JsonValue] | None", tools),
                True,
                **cast("Mapping[str, JsonValue]", variables),
            )

        return await trio.to_thread.run_sync(encode, abandon_on_cancel=True)  # a long text takes long

    async def encode_text(self, text: str, *, parse_special: bool = True, add_bos: bool = True) -> list[int]:
        """Ids of a raw prompt."""
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
            raise ContextLengthError(
                f"the prompt has {n_prompt} tokens, the context holds {context} and an answer needs one:"
                " shorten the prompt, or start the daemons with a larger --context",
                param,
            )
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
            self._control.open_request(request.submit) as deliveries,
            aclosing(self._pieces(deliveries, text)) as pieces,
        ):
            yield pieces

    async def _pieces(
        self, deliveries: trio.MemoryReceiveChannel[Delivery], text: TextStream
    ) -> AsyncGenerator[Piece | Finish, None]:
        clock = _DecodeClock()
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
                    yield Piece(shown, tokens[:n_used])
                    if text.stopped:
                        yield self._finish("stop", clock)
                        return
                case Finished(reason=reason):
                    rest = text.flush()
                    if rest:
                        yield Piece(rest, ())
                    yield self._finish("stop" if reason == "stop" or text.stopped else "length", clock)
                    return
                case Failed():
                    raise _error_of(delivery)
                case never:
                    assert_never(never)
        raise UnavailableError("the daemon is stopping: ask again when it runs")

    def _finish(self, reason: FinishReason, clock: _DecodeClock) -> Finish:
        status = self._control.status()
        names = {peer.id: peer.name for peer in status.peers}
        ranks = status.layout.ranks if status.layout is not None else ()
        return Finish(reason, clock.tokens, clock.tok_s(), tuple(names.get(node, node) for node in ranks))


@dataclass(slots=True)
class _DecodeClock:
    """Tokens and the time between the first and the last of them."""

    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    _at_first: int = 0

    def take(self, n: int, now: float) -> None:
        if not self.tokens:
            self.first_s, self._at_first = now, n
        self.tokens, self.last_s = self.tokens + n, now

    def tok_s(self) -> float | None:
        took = self.last_s - self.first_s
        return (self.tokens - self._at_first) / took if took > 0 and self.tokens > self._at_first else None


def _error_of(failed: Failed) -> MeshLLMError:
    known: dict[str, type[MeshLLMError]] = {error.code: error for error in (InvalidRequestError, ContextLengthError)}
    return known.get(failed.code, UnavailableError)(failed.reason)
