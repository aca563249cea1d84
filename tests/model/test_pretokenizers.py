"""Where each family cuts a text before merging. The cuts stand written out: no vocabulary is needed to see them."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from meshllm.model.pretokenizers import PRE_TOKENIZERS


def cuts(name: str, text: str) -> list[str]:
    patterns = PRE_TOKENIZERS[name].patterns
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("names", "text", "pieces"),
    [
        ("gpt-2", "It's 2024!", "It|'s| 2024|!"),
        ("smollm refact starcoder", "It's 2024!", "It|'s| |2|0|2|4|!"),
        ("qwen2 deepseek-r1-qwen", "IT'S 2024!\n", "IT|'S| |2|0|2|4|!\n"),
        ("llama-bpe smaug-bpe dbrx", "IT'S 20245 x(y)\n\n", "IT|'S| |202|45| x|(y|)\n\n"),
        ("tekken", "don't stopNow 2024/\n", "don|'t| stop|Now| |2|0|2|4|/\n"),
        ("tekken", "HTTPServer  caféÉ", "HTTPServer| | café|É"),
        ("gpt-4o", "don't STOP'S stopNow 2024/\n", "don't| STOP'S| stop|Now| |202|4|/\n"),
        ("deepseek-v3", "It's 2024, (ok) x_y\n", "It|'s| |202|4|,| (|ok|)| x|_y|\n"),
        ("deepseek-v3", "日本語とkana", "日本語と|kana"),
        ("deepseek-coder", "It's x1 = 20;\n\tok", "It|'|s| x|1| = |2|0|;|\n|\tok"),
        ("deepseek-coder", "a 日本 b", "a| |日本| b"),
    ],
)
def test_texts_are_cut_as_the_family_does(names: str, text: str, pieces: str) -> None:
    for name in names.split():
        assert cuts(name, text) == pieces.split("|"), name


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize("text", ["", "a", "don't\u00a0\r\n\r\n 日本語 12345 \u0301x", "\t \n ?!/ÀÉ ß Ǆ \U0001f999"])
def test_cuts_lose_nothing(name: str, text: str) -> None:
    assert "".join(cuts(name, text)) == text
