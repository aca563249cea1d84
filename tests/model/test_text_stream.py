"""Stop strings over streamed text: nothing of them is ever shown, nothing else is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.model.model_file import ModelFile
from meshllm.model.text_stream import StopMatcher, TextStream

PIECES = ["mn", "op", "q", "rst", "uv", "wx"]


def stream(stops: list[str], pieces: list[str]) -> tuple[list[str], int]:
    """What was shown after each piece, and how many pieces were taken."""
    matcher, shown = StopMatcher(stops), []
    for i, piece in enumerate(pieces):
        shown.append(matcher.feed(piece))
        if matcher.stopped:
            return shown, i + 1
    return [*shown, matcher.flush()], len(pieces)


@pytest.mark.parametrize(
    ("stops", "text", "steps"),
    [
        (["pqrstu"], "mno", 5),
        (["n"], "m", 1),
        (["stuv", "qr"], "mnop", 4),
        ([], "mnopqrstuvwx", 6),
        (["wxy"], "mnopqrstuvwx", 6),
    ],
)
def test_stop_01_text_ends_before_the_first_match(stops: list[str], text: str, steps: int) -> None:
    shown, taken = stream(stops, PIECES)
    assert ("".join(shown), taken) == (text, steps)


def test_stop_01_no_part_of_a_stop_string_is_shown_early() -> None:
    shown, _ = stream(["pqrstu"], PIECES)
    assert not any(letter in piece for piece in shown for letter in "pqr")


def test_stop_01_on_real_tokens(smollm2_path: Path) -> None:
    with ModelFile.open(smollm2_path) as model:
        text, shown = TextStream(model.tokenizer, ["pqrstu"]), []
        for token in (14295, 371, 97, 37159, 9836, 26386):
            shown.append(text.feed(token))
            if text.stopped:
                break
        assert ("".join(shown), len(shown)) == ("mno", 5)


@given(st.lists(st.text("ab", max_size=3)), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_cut_is_the_same_however_the_text_comes(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
    shown, _ = stream(stops, pieces)
    assert "".join(shown) == text[:cut]
