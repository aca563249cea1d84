"""Search for special tokens: leftmost and longest whatever the set, and none left after disarming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hypothesis import given
from hypothesis import strategies as st

from meshllm.model.special_tokens import SpecialTokens

texts = st.text("abc<|>", max_size=30)
vocabularies = st.sets(st.text("abc<|>", min_size=2, max_size=5), max_size=8).map(
    lambda found: {text: i for i, text in enumerate(sorted(found))}
)


def naive(ids: Mapping[str, int], text: str) -> Iterator[str | int]:
    """One place after the other, the longest first."""
    plain = ""
    while text:
        found = max((token for token in ids if text.startswith(token)), key=len, default=None)
        if found is None:
            plain, text = plain + text[0], text[1:]
            continue
        if plain:
            yield plain
        yield ids[found]
        plain, text = "", text[len(found) :]
    if plain:
        yield plain


@given(vocabularies, texts)
def test_split_is_leftmost_and_longest(ids: dict[str, int], text: str) -> None:
    assert list(SpecialTokens(ids).split(text)) == list(naive(ids, text))


@given(vocabularies, texts)
def test_disarmed_text_holds_none_and_is_the_same_without_marks(ids: dict[str, int], text: str) -> None:
    special = SpecialTokens(ids)
    disarmed = special.disarm(text, "\ufdd0")
    assert all(isinstance(piece, str) for piece in special.split(disarmed))
    assert disarmed.replace("\ufdd0", "") == text


def test_long_chains_and_many_tokens_need_no_deep_recursion() -> None:
    ids = {f"<|reserved_special_token_{i}|>": i for i in range(5000)} | {"x" * 1024: 5000}
    assert list(SpecialTokens(ids).split("a<|reserved_special_token_4999|>" + "x" * 1024)) == ["a", 4999, 5000]
