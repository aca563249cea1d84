"""What slots hold, after any history of steps and copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.engine.kv_cache import SlotHistory
from meshllm.errors import LocalProtocolError

Tokens = st.lists(st.integers(0, 3), max_size=12)


@given(Tokens, Tokens)
def test_common_prefix_is_where_they_part(held: list[int], wanted: list[int]) -> None:
    history = SlotHistory(1, 64)
    history.append(0, 0, held)
    right = next((i for i, (a, b) in enumerate(zip(held, wanted, strict=False)) if a != b), min(len(held), len(wanted)))
    assert history.common_prefix(0, wanted) == right


@given(st.lists(Tokens, min_size=1, max_size=5), Tokens)
def test_longest_common_prefix_is_the_longest_of_all_slots(slots: list[list[int]], wanted: list[int]) -> None:
    history = SlotHistory(len(slots), 64)
    for slot, tokens in enumerate(slots):
        history.append(slot, 0, tokens)
    best, length = history.longest_common_prefix(wanted)
    lengths = [history.common_prefix(slot, wanted) for slot in range(len(slots))]
    assert length == max(lengths)
    assert best == lengths.index(length)


def test_tokens_at_an_earlier_position_replace_what_followed() -> None:
    history = SlotHistory(2, 8)
    history.append(0, 0, [1, 2, 3, 4])
    history.append(0, 2, [9])
    assert history.tokens(0) == [1, 2, 9]
    history.copy(1, 0, 2)
    history.append(1, 2, [5])
    assert (history.tokens(0), history.tokens(1)) == ([1, 2, 9], [1, 2, 5])
    history.truncate(0, 1)
    assert history.tokens(0) == [1]


def test_gaps_overruns_and_copies_of_nothing_are_bugs() -> None:
    history = SlotHistory(2, 4)
    for misuse in (
        lambda: history.append(0, 1, [1]),
        lambda: history.append(0, 0, [1] * 5),
        lambda: history.copy(0, 1, 1),
    ):
        with pytest.raises(LocalProtocolError):
            misuse()
