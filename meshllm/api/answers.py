"""Answers in OpenAI's shapes: whole ones, and the chunks of a stream. Pure: pieces of text in, JSON-able values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshllm.daemon.generation import Finish, Piece
from meshllm.model.tokenizer import Tokenizer
from meshllm.parameters import SampledToken

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str
    chat: bool

    def chunk(self, choices: list[Json], *, usage: Json | None, with_usage: bool) -> Json:
        """One event of a stream. with_usage: the field is there, null but in the last."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        made: Json = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return {**made, "usage": usage} if with_usage else made

    def whole(self, choices: list[Json], usage: Json) -> Json:
        """An answer that is not streamed."""
        kind = "chat.completion" if self.chat else "text_completion"
        head: Json = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, "usage": usage}


def usage_of(n_prompt: int, finishes: Sequence[Finish]) -> Json:
    """The prompt counts once however many choices it has."""
    n_answer = sum(finish.completion_tokens for finish in finishes)
    return {"prompt_tokens": n_prompt, "completion_tokens": n_answer, "total_tokens": n_prompt + n_answer}


def extension(finishes: Sequence[Finish]) -> Json:
    """What we add beside OpenAI's fields: who computed it, and how fast the first choice was decoded."""
    return {"ranks": list(finishes[0].ranks), "decode_tok_s": finishes[0].decode_tok_s} if finishes else {}


@dataclass(slots=True)
class ChoiceWriter:
    """One choice of an answer: turns pieces into chunks or into a whole."""

    tokenizer: Tokenizer
    index: int
    chat: bool
    n_logprobs: int | None
    token_ids: bool
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    _offset: int = 0  # characters before the next token, for completions' text_offset

    def opening(self) -> Json:
        """The first chunk of a chat's choice: the role, before any text."""
        return {
            "index": self.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def chunk(self, piece: Piece) -> Json:
        """A piece of text."""
        return self._with_ids(self._choice(self._delta(piece.text), self._logprobs(piece.tokens), None), piece.tokens)

    def closing(self, finish: Finish) -> Json:
        """The last chunk."""
        return self._with_ids(self._choice({} if self.chat else {"text": ""}, None, finish.reason), ())

    def keep(self, piece: Piece) -> None:
        """Gathers a piece of a whole answer."""
        self.text += piece.text
        self.tokens.extend(piece.tokens)

    def whole(self, finish: Finish) -> Json:
        """The gathered choice."""
        logprobs = self._logprobs(self.tokens)
        if self.chat:
            message: Json = {"role": "assistant", "content": self.text, "refusal": None}
            made: Json = {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": finish.reason}
        else:
            made = self._choice({"text": self.text}, logprobs, finish.reason)
        return self._with_ids(made, self.tokens)

    def _delta(self, text: str) -> Json:
        return {"content": text} if self.chat else {"text": text}

    def _choice(self, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        made: Json = {"index": self.index, "delta": delta} if self.chat else {"index": self.index, **delta}
        return {**made, "logprobs": logprobs, "finish_reason": reason}

    def _with_ids(self, made: Json, tokens: Sequence[SampledToken]) -> Json:
        return {**made, "token_ids": [token.token for token in tokens]} if self.token_ids else made

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if self.n_logprobs is None or not tokens:
            return None
        return (
            {"content": [self._chat_logprob(t) for t in tokens], "refusal": None} if self.chat else self._plain(tokens)
        )

    def _chat_logprob(self, sampled: SampledToken) -> Json:
        top = [self._entry(one.token, one.logprob) for one in sampled.top]
        return {**self._entry(sampled.token, sampled.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float | None) -> Json:
        raw = self.tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    def _plain(self, tokens: Sequence[SampledToken]) -> Json:
        texts = [self._text(sampled.token) for sampled in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [sampled.logprob for sampled in tokens],
            "top_logprobs": [{self._text(one.token): one.logprob for one in sampled.top} for sampled in tokens],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode(errors="replace")
