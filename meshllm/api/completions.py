"""Both completion endpoints: several choices of one prompt, side by side, whole or as a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import trio
from starlette.requests import Request
from starlette.responses import Response

from meshllm.api.answers import AnswerHead, ChoiceWriter, Json, extension, usage_of
from meshllm.api.body import decode_body
from meshllm.api.openai import ChatRequest, Common, CompletionRequest
from meshllm.api.streams import EventStream, json_response, read_body, unless_gone
from meshllm.daemon.generation import CheckedRequest, Finish, GenerationRequest, Generator, Piece

PIECES_AHEAD = 64  # of a choice, before a slow reader holds its delivery back

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
    asked = decode_body(await read_body(request), ChatRequest)
    messages, tools, variables = asked.checked_messages(), asked.checked_tools(), asked.variables()
    n_logprobs = asked.n_logprobs()
    generator.model(asked.model)
    prompt = await generator.encode_chat(messages, tools, variables)
    work = _prepare(generator, asked, prompt, asked.token_limit(), n_logprobs, chat=True)
    return await _answer(request, work, asked)


async def complete_text(request: Request, generator: Generator) -> Response:
    """POST /v1/completions."""
    asked = decode_body(await read_body(request), CompletionRequest)
    given = asked.checked_prompt()
    generator.model(asked.model)
    prompt = await generator.encode_text(given) if isinstance(given, str) else given
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
        choices=tuple(generator.check(wanted.with_choice(i)) for i in choices),
        writers=tuple(ChoiceWriter(tokenizer, i, chat, n_logprobs, bool(asked.return_token_ids)) for i in choices),
        with_usage=asked.wants_usage,
    )


async def _answer(request: Request, work: _Work, asked: Common) -> Response:
    if asked.stream:
        return EventStream(lambda: _events(work, bool(asked.return_token_ids)))
    return await unless_gone(request.receive, lambda: _whole(work, bool(asked.return_token_ids)))


async def _whole(work: _Work, token_ids: bool) -> Response:
    finishes: dict[int, Finish] = {}
    async with _running(work) as items:
        async for index, item in items:
            if isinstance(item, Finish):
                finishes[index] = item
            else:
                work.writers[index].keep(item)
    ordered = [finishes[i] for i in range(len(work.writers))]
    choices = [writer.whole(finish) for writer, finish in zip(work.writers, ordered, strict=True)]
    made = work.head.whole(choices, usage_of(work.n_prompt, ordered))
    made["meshllm"] = extension(ordered)
    return json_response({**made, **_prompt_ids(work, token_ids)})


async def _events(work: _Work, token_ids: bool) -> AsyncIterator[Json]:
    """The role at once, so that a reader sees life before a long prompt is read; then text; then ends."""
    first = _prompt_ids(work, token_ids)
    if work.head.chat:
        for writer in work.writers:
            yield {**work.head.chunk([writer.opening()], usage=None, with_usage=work.with_usage), **first}
            first = {}
    finishes: dict[int, Finish] = {}
    async with _running(work) as items:
        async for index, item in items:
            writer = work.writers[index]
            if isinstance(item, Finish):
                finishes[index] = item
                choice = writer.closing(item)
            elif item.text or token_ids or writer.n_logprobs is not None:
                choice = writer.chunk(item)
            else:
                continue
            yield {**work.head.chunk([choice], usage=None, with_usage=work.with_usage), **first}
            first = {}
    if work.with_usage:
        ordered = [finishes[i] for i in range(len(work.writers))]
        last = work.head.chunk([], usage=usage_of(work.n_prompt, ordered), with_usage=True)
        yield {**last, "meshllm": extension(ordered)}


def _prompt_ids(work: _Work, token_ids: bool) -> Json:
    return {"prompt_token_ids": list(work.choices[0].prompt)} if token_ids else {}


@asynccontextmanager
async def _running(work: _Work) -> AsyncIterator[AsyncIterator[tuple[int, Piece | Finish]]]:
    """Pieces of all choices as they come, each with its choice's index. Leaving ends all of them."""
    send, receive = trio.open_memory_channel[_Item](PIECES_AHEAD)

    async def run(index: int, choice: CheckedRequest, channel: trio.MemorySendChannel[_Item]) -> None:
        async with channel:
            try:
                async with work.generator.open(choice) as pieces:
                    async for piece in pieces:
                        await channel.send((index, piece))
            except Exception as error:  # a task's border: raised where it is read
                await channel.send((index, error))

    async def items() -> AsyncIterator[tuple[int, Piece | Finish]]:
        async for index, item in receive:
            if isinstance(item, Exception):
                raise item
            yield index, item

    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:
        async with send:
            for i, choice in enumerate(work.choices):
                nursery.start_soon(run, i, choice, send.clone())
        try:
            yield items()
        except Exception as error:  # raised outside the nursery, which would wrap it in a group
            errors.append(error)
        nursery.cancel_scope.cancel()
    if errors:
        raise errors[0]
