"""Finding special tokens written in a text: leftmost, and of those the longest, in linear time. Pure.

Alternatives of a regular expression are tried one by one at each place, and there can be thousands; folded into a trie
the number of tokens no longer matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

_Trie: TypeAlias = "dict[str, _Trie]"
_END = ""  # key of a node at which a token ends


class SpecialTokens:
    """Texts -> ids. An empty set finds nothing."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        self._pattern = re.compile(_expression(_build_trie(ids)), re.DOTALL) if ids else None

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of the text in order: an id for each special token, the text between as it is, never empty."""
        if self._pattern is None:
            if text:
                yield text
            return
        position = 0
        for match in self._pattern.finditer(text):
            if match.start() > position:
                yield text[position : match.start()]
            yield self._ids[match.group()]
            position = match.end()
        if position < len(text):
            yield text[position:]

    def disarm(self, text: str, mark: str) -> str:
        """The text with `mark` put after the first character of each special token, so that none is found any more.

        Tokens have two characters at least. One pass, and another where a broken token leaves one that overlapped it.
        """
        while self._pattern is not None and self._pattern.search(text):
            text = self._pattern.sub(lambda match: f"{match.group()[0]}{mark}{match.group()[1:]}", text)
        return text


def _build_trie(texts: Iterable[str]) -> _Trie:
    root: _Trie = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[_END] = {}
    return root


def _expression(trie: _Trie) -> str:
    """A regular expression for the texts of a trie, preferring the longest."""
    branches = []
    for char, child in trie.items():
        if char == _END:
            continue
        literal, node = char, child
        while len(node) == 1 and _END not in node:
            ((following, node),) = node.items()
            literal += following
        tail = _expression(node) if node.keys() != {_END} else ""
        branches.append(re.escape(literal) + tail)
    body = "|".join(branches)
    if _END in trie:
        return f"(?:{body})?"
    return f"(?:{body})" if len(branches) > 1 else body
