"""Both completion endpoints: several choices of one prompt, side by side, whole or as a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import trio
from starlette.requests import Request
from starlette.responses import Response

from meshllm.api.answers import AnswerHead, ChoiceWriter, Json, extension, usage_of
from meshllm.api.body import read_request
from meshllm.api.openai import ChatRequest, Common, CompletionRequest
from meshllm.api.streams import Emit, EventStream, json_response, unless_gone
from meshllm.daemon.generation import CheckedRequest, Finish, GenerationRequest, Generator, Piece

PIECES_AHEAD: Final = 64  # of a choice, before a slow reader holds its delivery back
KEEP_ALIVE_S: Final = (
    10.0  # without news, an empty chunk says that the answer still comes: proxies close silent streams
)

_Item: TypeAlias = tuple[int, Piece | Finish | Exception]


@dataclass(frozen=True, slots=True)
class _Work:
    """A checked request, ready to run."""

    generator: Generator
    head: AnswerHead
    choices: tuple[CheckedRequest, ...]
    writers: tuple[ChoiceWriter, ...]
    with_usage: bool

    @property
    def n_prompt(self) -> int:
        return len(self.choices[0].prompt)


async def complete_chat(request: Request, generator: Generator) -> Response:
    """POST /v1/chat/completions."""
    asked = await read_request(request, ChatRequest)
    messages, tools, variables = asked.checked_messages(), asked.checked_tools(), asked.variables()
    n_logprobs = asked.n_logprobs()
    asked.refuse_unserved()
    generator.model(asked.model)
    prompt = await generator.encode_chat(messages, tools, variables)
    work = _prepare(generator, asked, prompt, asked.token_limit(), n_logprobs, chat=True)
    return await _answer(request, work, asked)


async def complete_text(request: Request, generator: Generator) -> Response:
    """POST /v1/completions."""
    asked = await read_request(request, CompletionRequest)
    asked.refuse_unserved()
    given = asked.checked_prompt()
    generator.model(asked.model)
    prompt = await generator.encode_prompt(given) if isinstance(given, str) else given
    work = _prepare(generator, asked, prompt, asked.max_tokens, asked.logprobs, chat=False)
    return await _answer(request, work, asked)


def _prepare(
    generator: Generator,
    asked: Common,
    prompt: Sequence[int],
    max_tokens: int | None,
    n_logprobs: int | None,
    *,
    chat: bool,
) -> _Work:
    wanted = GenerationRequest(
        prompt=tuple(prompt),
        sampling=asked.sampling(n_logprobs),
        max_tokens=max_tokens,
        stop=asked.stops(),
        ignore_eos=bool(asked.ignore_eos),
        seed=asked.checked_seed(),
    )
    choices = range(asked.n_choices)
    tokenizer = generator.tokenizer()
    head = AnswerHead(
        id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
        model=generator.model().name,
        chat=chat,
    )
    return _Work(
        generator=generator,
        head=head,
        choices=tuple(generator.check(wanted.with_choice(i), "messages" if chat else "prompt") for i in choices),
        writers=tuple(ChoiceWriter(tokenizer, i, chat, n_logprobs, bool(asked.return_token_ids)) for i in choices),
        with_usage=asked.wants_usage,
    )


async def _answer(request: Request, work: _Work, asked: Common) -> Response:
    if asked.stream:
        return EventStream(partial(_stream, work, token_ids=bool(asked.return_token_ids)))
    return await unless_gone(request.receive, partial(_whole, work, token_ids=bool(asked.return_token_ids)))


async def _whole(work: _Work, *, token_ids: bool) -> Response:
    finishes: dict[int, Finish] = {}
    async with _running(work) as items:
        async for index, item in items:
            match item:
                case Piece():
                    work.writers[index].keep(item)
                case Finish():
                    finishes[index] = item
                case error:
                    raise error
    ordered = [finishes[i] for i in range(len(work.writers))]
    choices = [writer.whole(finish) for writer, finish in zip(work.writers, ordered, strict=True)]
    made = work.head.whole(choices, usage_of(work.n_prompt, ordered))
    made["meshllm"] = extension(ordered)
    return json_response({**made, **_prompt_ids(work, token_ids)})


async def _stream(work: _Work, emit: Emit, *, token_ids: bool) -> None:
    """The role at once, so that a reader sees life before a long prompt is read; then text; then ends."""
    first = _prompt_ids(work, token_ids)

    async def write(choice: Json) -> None:
        nonlocal first
        await emit({**work.head.chunk([choice], usage=None, with_usage=work.with_usage), **first})
        first = {}

    if work.head.chat:
        for writer in work.writers:
            await write(writer.opening())
    finishes: dict[int, Finish] = {}
    async with _running(work) as items:
        while len(finishes) < len(work.writers):
            with trio.move_on_after(KEEP_ALIVE_S) as waiting:
                index, item = await items.receive()
            if waiting.cancelled_caught:
                running = next(writer for writer in work.writers if writer.index not in finishes)
                await write(running.chunk(Piece("", ())))
                continue
            writer = work.writers[index]
            match item:
                case Piece(text, tokens):
                    if text or (tokens and (token_ids or writer.n_logprobs is not None)):
                        await write(writer.chunk(item))
                case Finish():
                    finishes[index] = item
                    await write(writer.closing(item))
                case error:
                    raise error
    if work.with_usage:
        ordered = [finishes[i] for i in range(len(work.writers))]
        last = work.head.chunk([], usage=usage_of(work.n_prompt, ordered), with_usage=True)
        await emit({**last, "meshllm": extension(ordered)})


def _prompt_ids(work: _Work, token_ids: bool) -> Json:
    return {"prompt_token_ids": list(work.choices[0].prompt)} if token_ids else {}


@asynccontextmanager
async def _running(work: _Work) -> AsyncIterator[trio.MemoryReceiveChannel[_Item]]:
    """Pieces of all choices as they come, each with its choice's index; each choice ends with a Finish or an error.

    Leaving ends all of them.
    """
    send, receive = trio.open_memory_channel[_Item](PIECES_AHEAD)

    async def run(index: int, choice: CheckedRequest, channel: trio.MemorySendChannel[_Item]) -> None:
        async with channel:
            try:
                async with work.generator.open(choice) as pieces:
                    async for piece in pieces:
                        await channel.send((index, piece))
            except Exception as error:  # a task's border: raised where it is read
                await channel.send((index, error))

    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:
        async with send:
            for i, choice in enumerate(work.choices):
                nursery.start_soon(run, i, choice, send.clone())
        try:
            yield receive
        except Exception as error:  # raised outside the nursery, which would wrap it in a group
            errors.append(error)
        nursery.cancel_scope.cancel()
    if errors:
        raise errors[0]
