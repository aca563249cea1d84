"""One answer: the request goes out, its text goes to stdout as it comes, what is known of it at the end comes back."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from meshllm.cli.client import DaemonClient, Json
from meshllm.cli.text import printable


@dataclass(slots=True)
class Answer:
    """What an answer was; `tok_s` is the daemon's own measure of decoding, else this side's."""

    text: str = ""
    finish: str | None = None
    model: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    tok_s: float | None = None
    peers: tuple[str, ...] = ()
    _first_s: float | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Json]:
        """What `--json` prints."""
        return {
            "text": self.text,
            "finish_reason": self.finish,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "decode_tok_s": self.tok_s,
            "peers": list(self.peers),
        }

    def take(self, event: Mapping[str, Json], now: float) -> str:
        """Takes in one event of the stream; the new text in it."""
        if isinstance(model := event.get("model"), str):
            self.model = model
        self._take_usage(event, now)
        text = ""
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta")
            piece = delta.get("content") if isinstance(delta, dict) else choice.get("text")
            text += piece if isinstance(piece, str) else ""
            if isinstance(finish := choice.get("finish_reason"), str):
                self.finish = finish
        if text and self._first_s is None:
            self._first_s = now
        self.text += text
        return text

    def _take_usage(self, event: Mapping[str, Json], now: float) -> None:
        if isinstance(usage := event.get("usage"), dict):
            self.prompt_tokens = _whole(usage.get("prompt_tokens"))
            self.tokens = _whole(usage.get("completion_tokens"))
            if self.tok_s is None and self._first_s is not None and self.tokens > 1 and now > self._first_s:
                self.tok_s = (self.tokens - 1) / (now - self._first_s)
        if isinstance(ours := event.get("meshllm"), dict):
            ranks, tok_s = ours.get("ranks"), ours.get("decode_tok_s")
            self.peers = tuple(str(name) for name in ranks) if isinstance(ranks, list) else self.peers
            self.tok_s = float(tok_s) if isinstance(tok_s, int | float) and tok_s > 0 else self.tok_s


def _whole(value: Json) -> int:
    return value if isinstance(value, int) else 0


def stream_answer(client: DaemonClient, path: str, body: Mapping[str, Json], *, show: bool) -> Answer:
    """Asks for a streamed answer and returns it whole; with `show` its text also goes to stdout as it comes.

    However it ends, the connection is closed, so that the daemon stops; an interrupted line is ended.
    """
    answer = Answer()
    asked: dict[str, Json] = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with closing(client.stream(path, asked)) as events, _whole_line(answer, show=show):
        for event in events:
            text = answer.take(event, time.monotonic())
            if show and text:
                _write(text)
    return answer


def _write(text: str) -> None:
    sys.stdout.write(printable(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


@contextmanager
def _whole_line(answer: Answer, *, show: bool) -> Iterator[None]:
    """Ends the last line of what was shown, also when interrupted or broken off; not when nobody reads any more."""
    try:
        yield
    finally:
        if show and answer.text and not answer.text.endswith("\n") and not isinstance(sys.exception(), OSError):
            sys.stdout.write("\n")
            sys.stdout.flush()


def say(line: str) -> None:
    """A dim line on stderr."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    sys.stderr.write(f"{dim}{line}{plain}\n")
    sys.stderr.flush()
