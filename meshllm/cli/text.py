"""Sizes, times and names as people read them. Pure, and without rich: `ask` must start fast.

Names and reasons come from other devices: control characters in them are shown as escapes, never obeyed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

BAR_CELLS = 10


def printable(text: str, keep: str = "") -> str:
    """`text` with control characters, but those of `keep`, written out, so that a terminal cannot be driven by it."""
    return "".join(
        letter if letter in keep or unicodedata.category(letter) not in ("Cc", "Cf", "Zl", "Zp") or letter == "\u200d"
        else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )  # fmt: skip


def in_bytes(n: int | None) -> str:
    """A size for people: "92.9 MB". Powers of 1000, as shops and disks count."""
    if n is None:
        return "?"
    size = float(n)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def in_time(seconds: float) -> str:
    """A span for people: "4 s", "12 min", "3 h 20 min", "5 d 2 h"."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def in_microseconds(us: float) -> str:
    """A round trip for people: "85 µs", "1.4 ms"."""
    return f"{us:.0f} µs" if us < 999.5 else f"{us / 1000:.1f} ms"


def bar(part: float, cells: int = BAR_CELLS) -> str:
    """A bar of `cells` characters of which `part` (0..1) is filled, in eighths."""
    eighths = round(max(0.0, min(1.0, part)) * cells * 8)
    if part > 0 and eighths == 0:
        eighths = 1
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "") + " " * (cells - full - (1 if rest else 0))


def closing_line(tokens: int, tok_s: float | None, peers: Sequence[str], finish: str | None) -> str:
    """The one line after an answer: "42 tokens · 61.3 tok/s · kitchen + attic"."""
    parts = [f"{tokens} token{'s' if tokens != 1 else ''}"]
    if tok_s is not None:
        parts.append(f"{tok_s:.1f} tok/s")
    if peers:
        parts.append(" + ".join(printable(name) for name in peers))
    if finish == "length":
        parts.append("cut off at its length limit")
    return " · ".join(parts)
