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
# Words are cut where capitals follow small letters. Letters without case, and marks, go with either.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIX|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O: Final = _CASED.replace("SUFFIX", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")
_TEKKEN: Final = _CASED.replace("SUFFIX", "").replace("DIGITS", r"\p{N}")
_DEEPSEEK3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_AND_HANGUL: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """patterns cut one after the other, each match and each rest becoming a piece of its own."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token as a whole is taken, whatever merging would give
    nfc: bool = False  # text is composed first
    adds_bos: bool = False  # where the file does not say


_DIGITS_APART: Final = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA_BPE: Final = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS: Final = MappingProxyType(
    {
        "gpt-2": PreTokenizer((_GPT2,)),
        "smollm": _DIGITS_APART,
        "starcoder": _DIGITS_APART,
        "refact": _DIGITS_APART,  # Granite 3
        "qwen2": PreTokenizer((_QWEN2,), nfc=True),
        "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
        "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
        "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}")),
        "llama-bpe": _LLAMA_BPE,
        "llama3": _LLAMA_BPE,
        "llama-v3": _LLAMA_BPE,
        "smaug-bpe": PreTokenizer((_LLAMA3,)),
        "dbrx": PreTokenizer((_LLAMA3,)),  # Phi 4, Granite 4
        "gpt-4o": PreTokenizer((_GPT4O,)),  # Phi 4 mini
        "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),  # Mistral Nemo and since
    }
)
