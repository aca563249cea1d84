"""The vocabulary of a GGUF: texts, kinds and scores of tokens, the ids with a meaning, and the bytes of each token.

Everything is checked here once, so that tokenizer and decoder need not ask again. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal

from meshllm.model.gguf import GgufFile
from meshllm.model.gguf_values import GgufArray

MAX_TOKENS: Final = 2**21
MAX_TOKEN_CHARS: Final = 1024  # longest seen: 256; the cost of finding the merges of an SPM token grows with its square

# Texts that end an answer wherever a control token has them, for files that name only one end id (as llama.cpp does).
_END_TEXTS: Final = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "</s>",
        "<|eot|>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    )
)
_MODELS: Final[dict[str, Literal["bpe", "spm"]]] = {"gpt2": "bpe", "llama": "spm"}


def _byte_level_table() -> dict[int, int]:
    """Byte for each character of byte-level BPE (GPT-2's bytes_to_unicode, backwards); others go beyond Latin-1."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    table = dict.fromkeys(range(256), 0xFFFD)
    table.update({byte if byte in printable else next(shifted): byte for byte in range(256)})
    return table


_BYTE_LEVEL: Final = _byte_level_table()


class TokenKind(IntEnum):
    """tokenizer.ggml.token_type"""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4  # always matched in text, also in what a user wrote: not dangerous
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id. model: byte-level BPE, or SPM (sentencepiece: scores, spaces as U+2581, bytes as <0xNN>)."""

    model: Literal["bpe", "spm"]
    texts: list[str]
    kinds: list[int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_tokens: frozenset[int]

    def __len__(self) -> int:
        return len(self.texts)

    def bytes_of(self, token: int) -> bytes:
        """Bytes that a token stands for; of special tokens those of their text. About 1 us: no table is kept."""
        text, kind = self.texts[token], self.kinds[token]
        if self.model == "spm":
            return _spm_bytes(text, kind)
        if kind != TokenKind.NORMAL:
            return text.encode()
        try:
            return text.translate(_BYTE_LEVEL).encode("latin-1")
        except UnicodeEncodeError:  # a text that byte-level BPE cannot have made: as written
            return text.encode()

    def of_kind(self, *kinds: TokenKind) -> dict[str, int]:
        """Text -> id of tokens of these kinds."""
        return {t: i for i, (t, k) in enumerate(zip(self.texts, self.kinds, strict=True)) if k in kinds and t}


def read_vocabulary(gguf: GgufFile) -> Vocabulary:
    """Raises ModelFileError that names the key."""
    name = gguf.find_str("tokenizer.ggml.model")
    if name not in _MODELS:
        gguf.refuse(
            f"tokenizer.ggml.model is {name!r}, this version knows gpt2 (BPE) and llama (SPM): choose such a model"
        )
    array = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(array, GgufArray) and not 0 < array.count <= MAX_TOKENS:
        gguf.refuse(f"tokenizer.ggml.tokens has {array.count} tokens, expected 1 to {MAX_TOKENS}: get the file again")
    texts = gguf.find_strings("tokenizer.ggml.tokens")
    if texts is None:
        gguf.refuse("tokenizer.ggml.tokens is missing: the file holds no vocabulary; convert the model again")
    if (longest := max(map(len, texts))) > MAX_TOKEN_CHARS:
        gguf.refuse(f"tokenizer.ggml.tokens has a token of {longest} characters, at most {MAX_TOKEN_CHARS} are allowed")
    kinds = _read_kinds(gguf, len(texts))
    bos, eos, unknown, eot, eom = (
        _read_id(gguf, f"tokenizer.ggml.{key}_token_id", len(texts)) for key in ("bos", "eos", "unknown", "eot", "eom")
    )
    for i in (bos, eos, eot, eom):  # some converters leave these as normal tokens, or as the user's
        if i is not None and kinds[i] in (TokenKind.NORMAL, TokenKind.USER_DEFINED):
            kinds[i] = TokenKind.CONTROL
    ends = {i for i in (eos, eot, eom) if i is not None}
    for i, text in enumerate(texts):
        if text in _END_TEXTS and kinds[i] == TokenKind.USER_DEFINED and text != "</s>":  # which is HTML, of Gemma
            kinds[i] = TokenKind.CONTROL
        if text in _END_TEXTS and kinds[i] == TokenKind.CONTROL:
            ends.add(i)
    return Vocabulary(_MODELS[name], texts, kinds, bos, eos, unknown, frozenset(ends))


def _read_kinds(gguf: GgufFile, n_tokens: int) -> list[int]:
    numbers = gguf.find_numbers("tokenizer.ggml.token_type")
    if numbers is None:
        return [TokenKind.NORMAL] * n_tokens
    if len(numbers) != n_tokens:
        gguf.refuse(
            f"tokenizer.ggml.token_type has {len(numbers)} entries for {n_tokens} tokens: convert the model again"
        )
    return [int(kind) for kind in numbers.tolist()]


def _read_id(gguf: GgufFile, key: str, n_tokens: int) -> int | None:
    found = gguf.find_int(key)
    if found is not None and not 0 <= found < n_tokens:
        if found in (0xFFFFFFFF, -1):  # how converters write "none"
            return None
        gguf.refuse(f"{key} is {found}, expected an id under {n_tokens}: convert the model again")
    return found


def _spm_bytes(text: str, kind: int) -> bytes:
    if kind == TokenKind.BYTE:
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            return text.encode()
    return text.replace("\u2581", " ").encode()
