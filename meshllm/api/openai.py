"""Requests in OpenAI's shapes and their checks. Pure: a decoded body in, a value that can be trusted out.

Fields that we do not know are ignored, as OpenAI's clients expect; fields that we know and cannot serve are refused by
name. A null is as if the field were absent; `stream_options` without `stream` changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from meshllm.api.messages import Message, template_message
from meshllm.errors import InvalidRequestError
from meshllm.limits import MAX_SEED, MAX_STOP_CHARS, MAX_STOPS, MAX_TEMPERATURE, MAX_TOP_K, TOP_K_OFF
from meshllm.parameters import MAX_TOP_LOGPROBS, MIN_REPETITION_PENALTY, SamplingParameters

MAX_CHOICES: Final = 8
MAX_MESSAGE_CHARS: Final = 1000  # of an error

Count: TypeAlias = Annotated[int, Meta(ge=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class StreamOptions(msgspec.Struct):
    """How a stream is to end."""

    include_usage: bool | None = None


class Common(msgspec.Struct, kw_only=True):
    """What chat and plain completions share."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=TOP_K_OFF, le=MAX_TOP_K)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    logit_bias: dict[str, object] | None = None

    def refuse_unserved(self) -> None:
        """Raises InvalidRequestError for a known field whose silent absence would change the answer."""
        if self.logit_bias:
            raise InvalidRequestError("logit_bias is not supported", "logit_bias")

    @property
    def n_choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """In a stream: one more chunk with it at the end."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def stops(self) -> tuple[str, ...]:
        """Stop strings; empty ones match nothing and are left out. Raises InvalidRequestError."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(given) > MAX_STOPS:
            raise InvalidRequestError(f"stop holds {len(given)} strings, at most {MAX_STOPS} are allowed", "stop")
        if any(len(stop) > MAX_STOP_CHARS for stop in given):
            raise InvalidRequestError(f"stop holds a string of over {MAX_STOP_CHARS} characters", "stop")
        return tuple(stop for stop in given if stop)

    def checked_seed(self) -> int | None:
        """Raises InvalidRequestError for a seed that 64 bits do not hold."""
        if self.seed is not None and self.seed > MAX_SEED:
            raise InvalidRequestError(f"seed: expected an integer from 0 to {MAX_SEED}", "seed")
        return self.seed

    def sampling(self, logprobs: int | None) -> SamplingParameters:
        """As the sampler takes it; OpenAI's defaults. The seed is set later."""
        return SamplingParameters(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logprobs=logprobs,
        )


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def refuse_unserved(self) -> None:
        """See Common."""
        super().refuse_unserved()
        if self.echo or self.suffix or (self.best_of or 1) > 1:
            name = "echo" if self.echo else "suffix" if self.suffix else "best_of"
            raise InvalidRequestError(f"{name} is not supported", name)

    def checked_prompt(self) -> str | list[int]:
        """One prompt. Raises InvalidRequestError for several."""
        if isinstance(self.prompt, str):
            return self.prompt
        tokens = [part for part in self.prompt if isinstance(part, int)]
        if len(tokens) == len(self.prompt):
            return tokens
        if len(self.prompt) == 1 and not isinstance(self.prompt[0], int):
            return self.prompt[0]
        raise InvalidRequestError("prompt holds several prompts: send one request for each", "prompt")


class ResponseFormat(msgspec.Struct):
    """Only "text" is served."""

    type: str


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: object = None
    chat_template_kwargs: dict[str, object] | None = None

    def refuse_unserved(self) -> None:
        """See Common. A tool call cannot be forced: the model decides."""
        super().refuse_unserved()
        if self.response_format is not None and self.response_format.type != "text":
            raise InvalidRequestError(
                f'response_format "{self.response_format.type}" is not supported, only "text"', "response_format"
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError('tool_choice may be "none" or "auto": a call cannot be forced', "tool_choice")

    def checked_messages(self) -> list[dict[str, object]]:
        """As a chat template takes them. Raises InvalidRequestError that names the message."""
        return [template_message(message, i) for i, message in enumerate(self.messages)]

    def checked_tools(self) -> list[object] | None:
        """Tools for the template; none where the request forbids their use."""
        return list(self.tools) if self.tools and self.tool_choice != "none" else None

    def variables(self) -> dict[str, object]:
        """Further variables for the template, such as enable_thinking. Raises InvalidRequestError for one that is
        ours.
        """
        given = self.chat_template_kwargs or {}
        for name in ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "self", "tokenizer"):
            if name in given:
                raise InvalidRequestError(f"chat_template_kwargs may not set {name}", "chat_template_kwargs")
        return dict(given)

    def token_limit(self) -> int | None:
        """max_completion_tokens, or max_tokens, its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def n_logprobs(self) -> int | None:
        """None: none wanted. Raises InvalidRequestError for alternatives without logprobs."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize."""

    content: str
    add_special: bool = False
    parse_special: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    keep_special: bool = True


class PullRequest(msgspec.Struct, kw_only=True):
    """POST /models/pull. source: name or hash of a model that a peer serves. name: to keep it under. state_dir: of the
    command that asks, so that it does not look for the file elsewhere.
    """

    source: str
    name: str | None = None
    state_dir: str


ErrorType: TypeAlias = Literal["invalid_request_error", "server_error"]


def error_object(message: str, status: int, code: str, param: str | None) -> dict[str, object]:
    """OpenAI's error shape; a message that quotes a long value is cut."""
    message = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"
    kind: ErrorType = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
