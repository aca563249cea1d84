"""How fast an answer came, as its reader saw it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DecodeClock:
    """Tokens and the time between the first and the last of them."""

    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    _at_first: int = 0

    def take(self, n: int, now: float) -> None:
        """n tokens came at `now`, in seconds."""
        if not self.tokens:
            self.first_s, self._at_first = now, n
        self.tokens, self.last_s = self.tokens + n, now

    def tok_s(self) -> float | None:
        """Tokens a second after the first; None before there are two."""
        took = self.last_s - self.first_s
        return (self.tokens - self._at_first) / took if took > 0 and self.tokens > self._at_first else None
