"""How a byte-level BPE vocabulary wants its text cut before merging, by the name in tokenizer.ggml.pre.

The cut decides digits, contractions, spaces and case, so a wrong one gives other tokens without any error: an unknown
name is refused, never taken for gpt-2. Patterns are those of each family's tokenizer.json and of llama.cpp's
`llm_tokenizer_bpe`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """patterns cut one after the other, each match and each rest becoming a piece of its own."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token as a whole is taken, whatever merging would give
    nfc: bool = False  # text is composed first
    adds_bos: bool = False  # where the file does not say


_LLAMA_BPE: Final = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS: Final = MappingProxyType(
    {
        "gpt-2": PreTokenizer((_GPT2,)),
        "smollm": PreTokenizer((r"\p{N}", _GPT2)),
        "qwen2": PreTokenizer((_QWEN2,), nfc=True),
        "llama-bpe": _LLAMA_BPE,
        "llama3": _LLAMA_BPE,
        "llama-v3": _LLAMA_BPE,
    }
)
