"""Text of an answer as it streams: whole characters only, and never a part of a stop string.

What may be the start of a stop string is held back until it is known. Where several stop strings match, the one that
starts first ends the text, the longer one where they start together. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshllm.model.tokenizer import StreamingDecoder, Tokenizer


class StopMatcher:
    """Cuts a streamed text before the first stop string. Empty stop strings never match."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted((stop for stop in stops if stop), key=len, reverse=True))
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What can be shown now. After `stopped` became true nothing more comes."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        first = min((at for at, _ in found), default=len(text))
        safe = self._safe_length(text)
        if found and first <= safe:
            self.stopped, self._held = True, ""
            return text[:first]
        # A longer stop string that starts before the one found may still complete: wait for it.
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was held back, at the answer's end; a shorter stop string may still stand in it."""
        text, self._held = self._held, ""
        first = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=len(text))
        self.stopped = self.stopped or first < len(text)
        return text[:first]

    def _safe_length(self, text: str) -> int:
        """How much of the text cannot be the start of a stop string that goes on beyond its end."""
        longest = len(self._stops[0]) - 1 if self._stops else 0
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops if len(stop) > len(text) - start):
                return start
        return len(text)


class TextStream:
    """Tokens in, text to show out."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = StreamingDecoder(tokenizer)
        self._matcher = StopMatcher(stops)

    @property
    def stopped(self) -> bool:
        """A stop string was met: the answer is over."""
        return self._matcher.stopped

    def feed(self, token: int) -> str:
        """The text that this token makes ready to show; may be empty."""
        return self._matcher.feed(self._decoder.feed(token))

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return self._matcher.feed(self._decoder.flush()) + self._matcher.flush()
