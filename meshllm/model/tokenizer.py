"""Text <-> token ids, from the metadata of a GGUF: byte-level BPE and SPM with byte fallback.

Merging is done by the `tokenizers` library; what is around it is here, because it decides about safety: control tokens
are not in the library's vocabulary at all, so no text can be merged into one. They are found by our own search, and
only where the caller asks for it (`parse_special`). User-defined tokens (<think>, <tool_call>) are found always, as
llama.cpp does. Pure.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Final, Self

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from meshllm.model.gguf import GgufFile
from meshllm.model.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from meshllm.model.special_tokens import SpecialTokens
from meshllm.model.vocabulary import TokenKind, Vocabulary, read_vocabulary

_MAX_MERGES: Final = 2**22
_MAX_COMPOSED: Final = 4  # characters that NFC makes one of
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """Of one model. Safe to use from several threads: nothing changes after it was built."""

    def __init__(
        self, vocabulary: Vocabulary, merger: tokenizers.Tokenizer, *, adds_bos: bool, space_prefix: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._merger = merger
        self._space_prefix = space_prefix  # a text, and what follows a special token, begins with a space of its own
        self.adds_bos = adds_bos
        always = vocabulary.of_kind(TokenKind.USER_DEFINED)
        control = vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)
        control = {text: i for text, i in control.items() if len(text) > 1}  # one character cannot be disarmed
        self._user_defined = SpecialTokens(always)
        self._special = SpecialTokens({**always, **control})
        self._control = SpecialTokens(control)
        # Characters that one token can stand for; an unknown token of SPM stands for any number.
        joins = vocabulary.model == "spm" and not vocabulary.of_kind(TokenKind.BYTE)
        self._widest = sys.maxsize if joins else _MAX_COMPOSED * max(map(len, vocabulary.texts), default=1)

    @classmethod
    def from_gguf(cls, gguf: GgufFile) -> Self:
        """Raises ModelFileError that names what is missing or unknown. Some 0.4 s for 128k tokens with 280k merges."""
        vocabulary = read_vocabulary(gguf)
        adds_bos = gguf.find_bool("tokenizer.ggml.add_bos_token")
        if vocabulary.model == "spm":
            prefix = gguf.find_bool("tokenizer.ggml.add_space_prefix")
            merger = _spm_merger(gguf, vocabulary)
            return cls(vocabulary, merger, adds_bos=adds_bos is not False, space_prefix=prefix is not False)
        pre = _pre_tokenizer(gguf)
        merger = _bpe_merger(gguf, vocabulary, pre)
        return cls(vocabulary, merger, adds_bos=pre.adds_bos if adds_bos is None else adds_bos, space_prefix=False)

    @property
    def vocab_size(self) -> int:
        """Tokens; the model may have more rows of logits than that."""
        return len(self._vocabulary)

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._vocabulary.eos_id

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids each of which ends an answer."""
        return self._vocabulary.end_tokens

    def text_of(self, token: int | None) -> str:
        """The text of a token as the vocabulary has it, for templates; "" for None."""
        return "" if token is None else self._vocabulary.texts[token]

    def least_tokens(self, text: str) -> int:
        """A lower bound, at once, of the tokens of a text; characters that the vocabulary lacks count like others."""
        return len(text) // self._widest

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False) -> list[int]:
        """Ids of a text. parse_special: control tokens written in it become those tokens; else they stay text.

        add_bos: the model's BOS is put first if this model wants one and the text does not begin with it already.
        """
        special = self._special if parse_special else self._user_defined
        return self._encode_pieces(special.split(without_surrogates(text)), add_bos)

    def encode_disarmed(self, text: str, mark: str) -> list[int]:
        """Ids of a text in which `disarm` marked foreign control tokens: those stay text, all others are parsed.

        Marks are dropped before merging, so ids are those of the whole text. BOS is added as in encode(add_bos=True).
        """
        pieces = self._special.split(without_surrogates(text))
        unmarked = (piece.replace(mark, "") if isinstance(piece, str) else piece for piece in pieces)
        reparsed = (
            p for piece in unmarked for p in (self._user_defined.split(piece) if isinstance(piece, str) else [piece])
        )
        return self._encode_pieces(reparsed, add_bos=True)

    def disarm(self, text: str, mark: str) -> str:
        """The text with `mark` inside each control token written in it."""
        return self._control.disarm(text, mark)

    def _encode_pieces(self, pieces: Iterable[str | int], add_bos: bool) -> list[int]:
        ordered = list(pieces)
        texts = [self._prepare(piece) for piece in ordered if isinstance(piece, str)]
        # The batch call: unlike encode() it lets other threads run, and it computes no offsets.
        encoded = iter(self._merger.encode_batch_fast(texts, add_special_tokens=False) if texts else ())
        ids: list[int] = []
        for piece in ordered:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(next(encoded).ids)
        if add_bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _prepare(self, text: str) -> str:
        if self._vocabulary.model == "bpe":
            return text
        return ("\u2581" if self._space_prefix else "") + text.replace(" ", "\u2581")

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token, of special ones those of their text; b"" for an id beyond the vocabulary (padding rows)."""
        return self._vocabulary.bytes_of(token) if 0 <= token < len(self._vocabulary) else b""

    def is_control(self, token: int) -> bool:
        """Whether a token is no text: a control token, or an id beyond the vocabulary."""
        kinds = self._vocabulary.kinds
        return not 0 <= token < len(kinds) or kinds[token] == TokenKind.CONTROL

    def decode(self, ids: Sequence[int], *, keep_control: bool = False) -> str:
        """Text of ids; U+FFFD for bytes that are no UTF-8. Control tokens are left out unless kept as their text."""
        raw = b"".join(self.token_bytes(i) for i in ids if keep_control or not self.is_control(i))
        if self._space_prefix and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode(errors="replace")


class StreamingDecoder:
    """Text of ids as they come: never half a character, never more than 3 bytes held back, control tokens left out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """What can be shown after this token; may be empty."""
        if self._tokenizer.is_control(token):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is held back at the end, as U+FFFD; empty when all characters were whole."""
        return self._utf8.decode(b"", final=True)


def without_surrogates(text: str) -> str:
    """JSON may hold half a surrogate pair, which is no character: U+FFFD, as elsewhere; whole pairs become theirs."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _pre_tokenizer(gguf: GgufFile) -> PreTokenizer:
    name = gguf.find_str("tokenizer.ggml.pre")
    found = PRE_TOKENIZERS.get(name or "")
    if found is None:
        known = ", ".join(PRE_TOKENIZERS)
        gguf.refuse(
            f"tokenizer.ggml.pre is {name!r}, this version knows {known}: choose a model with one of these"
            if name
            else f"tokenizer.ggml.pre is missing, expected one of {known}: convert the model again"
        )
    return found


def _bpe_merger(gguf: GgufFile, vocabulary: Vocabulary, pre: PreTokenizer) -> tokenizers.Tokenizer:
    lines = gguf.find_strings("tokenizer.ggml.merges")
    if lines is None or len(lines) > _MAX_MERGES:
        found = "missing" if lines is None else f"{len(lines)} entries long, at most {_MAX_MERGES} are allowed"
        gguf.refuse(f"tokenizer.ggml.merges is {found}: convert the model again with a current converter")
    ids = vocabulary.of_kind(TokenKind.NORMAL, TokenKind.USER_DEFINED)
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    unknown = next((left + right for left, right in merges if left + right not in ids), None)
    if unknown is not None:  # the library would panic, which ends more than this call
        words = f"it makes {unknown!r}, which is none"
        gguf.refuse(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens ({words}): convert the model again")
    try:
        model = models.BPE(ids, merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises its base class and nothing finer; the text names the merge
        gguf.refuse(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens ({error}): convert the model again")
    merger = tokenizers.Tokenizer(model)
    if pre.nfc:
        merger.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merger.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    return merger


def _spm_merger(gguf: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """SPM as BPE: every way to put a token together from two is a merge, better scores first."""
    scores = gguf.find_numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary):
        found = "missing" if scores is None else f"{len(scores)} entries long for {len(vocabulary)} tokens"
        gguf.refuse(f"tokenizer.ggml.scores is {found}: convert the model again")
    pieces = vocabulary.of_kind(TokenKind.NORMAL, TokenKind.USER_DEFINED)
    ranked = []
    for text, i in pieces.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in pieces and right in pieces:
                ranked.append((-float(scores[i]), -len(left), -len(right), left, right))
    ranked.sort()
    merges = [(left, right) for *_, left, right in ranked]
    unknown = vocabulary.unknown_id
    ids = {**pieces, **vocabulary.of_kind(TokenKind.BYTE)}
    if unknown is not None:
        ids[vocabulary.texts[unknown]] = unknown
    return tokenizers.Tokenizer(
        models.BPE(
            ids,
            merges,
            unk_token=None if unknown is None else vocabulary.texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
