"""Tokenizers: golden ids of six families, the cases from the field, and what holds for any text."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import ModelFileError
from meshllm.model.chat_template import ChatTemplate
from meshllm.model.gguf import open_gguf
from meshllm.model.model_file import ModelFile
from meshllm.model.tokenizer import StreamingDecoder, Tokenizer

FAMILIES = ("smollm2", "llama-3.1", "qwen2.5", "qwen3", "mistral-7b", "gemma-3")
ModelOf = Callable[[str], ModelFile]
Writer = Callable[..., bytes]


def tokenizer_of(raw: bytes) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(memoryview(raw), "m.gguf"))


# --- golden facts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", ["tokenizer_vectors", "llamacpp_tokenizer_agreed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_other_programs(
    facts: str, family: str, golden: Callable[[str], Any], model_of: ModelOf
) -> None:
    tokenizer = model_of(family).tokenizer
    asked = [case for case in golden(facts)["cases"] if case.get(family) is not None]
    assert len(asked) >= 160
    wrong = [c["text"] for c in asked if tokenizer.encode(c["text"], parse_special=True) != c[family]]
    assert not wrong


@pytest.mark.parametrize("case", ["TOK-01"], indirect=True)
@pytest.mark.parametrize("family", ["llama-3.1", "qwen3", "smollm2"])
def test_word_that_is_a_token_is_taken_whole_where_the_family_says_so(
    case: dict[str, Any], family: str, model_of: ModelOf
) -> None:
    expected = case["expected"]
    wanted = expected["ids"] if family == "llama-3.1" else expected["other_families"][family]
    tokenizer = model_of(family).tokenizer
    assert [tokenizer.encode(text, parse_special=False) for text in case["input"]["texts"]] == wanted


@pytest.mark.parametrize("case", ["TOK-03"], indirect=True)
@pytest.mark.parametrize("family", ["llama-3.1", "qwen3", "smollm2"])
def test_digits_and_contractions_are_cut_as_the_family_does(
    case: dict[str, Any], family: str, model_of: ModelOf
) -> None:
    tokenizer = model_of(family).tokenizer
    for text in case["input"]["texts"]:
        assert tokenizer.encode(text, parse_special=False) == case["expected"][text][family]


@pytest.mark.parametrize("case", ["TOK-03"], indirect=True)
@pytest.mark.parametrize("pre", ["deepseek-llm", "default", "GPT-2", ""])
def test_unknown_pre_tokenizer_is_refused_by_name(
    case: dict[str, Any], pre: str, write_gguf: Writer, tiny: Any
) -> None:
    assert "refused" in case["how_to_check"]
    with pytest.raises(ModelFileError, match=rf"tokenizer\.ggml\.pre is ({pre!r}|missing), .*smollm"):
        tokenizer_of(write_gguf({**tiny[0], "tokenizer.ggml.pre": pre}))


@pytest.mark.parametrize("case", ["TOK-05"], indirect=True)
def test_prompt_begins_with_one_bos(case: dict[str, Any], model_of: ModelOf) -> None:
    model, messages = model_of("llama-3.1"), case["input"]["messages"]
    tokenizer, template = model.tokenizer, model.chat_template
    assert template is not None
    starts = case["expected"]["llama-3.1_starts"]
    assert template.encode_chat(tokenizer, messages)[: len(starts)] == starts
    hi = tokenizer.encode("Hi", parse_special=False)
    bos = tokenizer.bos_id
    assert tokenizer.encode("Hi", parse_special=True, add_bos=True) == [bos, *hi]
    assert tokenizer.encode("<|begin_of_text|>Hi", parse_special=True, add_bos=True) == [bos, *hi]
    small = model_of("smollm2")
    assert small.chat_template is not None
    assert small.chat_template.encode_chat(small.tokenizer, messages)[:2] == [1, 9690]
    assert small.tokenizer.encode("Hi", parse_special=True, add_bos=True) == small.tokenizer.encode(
        "Hi", parse_special=True
    )


@pytest.mark.parametrize("case", ["TOK-07"], indirect=True)
def test_byte_that_no_token_has_is_left_out(case: dict[str, Any], model_of: ModelOf) -> None:
    model = model_of("smollm2")
    ids = [model.tokenizer.encode(text, parse_special=True) for text in case["input"]["texts"]]
    assert ids == case["expected"]["ids"]
    assert model.chat_template is not None
    empty, dropped = (
        model.chat_template.encode_chat(model.tokenizer, [{"role": "user", "content": text}]) for text in ("", "\x04")
    )
    assert dropped == empty


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["UTF-01"], indirect=True)
@pytest.mark.parametrize("family", ["smollm2", "llama-3.1", "qwen3"])
def test_character_of_several_tokens_comes_whole(case: dict[str, Any], family: str, model_of: ModelOf) -> None:
    key = next(key for key in case["input"]["emit_ids"] if key.startswith(family))
    ids = case["input"]["emit_ids"][key]
    tokenizer = model_of(family).tokenizer
    decoder = StreamingDecoder(tokenizer)
    deltas = [delta for i in ids if (delta := decoder.feed(i))]
    assert decoder.flush() == ""
    assert "".join(deltas) == case["expected"]["joined"][family] == tokenizer.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)
    if family == "smollm2":
        assert [tokenizer.token_bytes(i).hex() for i in ids] == case["input"]["piece_bytes_smollm2"]
        assert deltas == case["expected"]["deltas_smollm2"]


@pytest.mark.parametrize("case", ["UTF-03"], indirect=True)
@pytest.mark.parametrize(("family", "key"), [("smollm2", "emit_ids_smollm2"), ("llama-3.1", "also_llama-3.1")])
def test_byte_that_cannot_become_a_character_holds_nothing_back(
    case: dict[str, Any], family: str, key: str, model_of: ModelOf
) -> None:
    decoder = StreamingDecoder(model_of(family).tokenizer)
    first, second = (decoder.feed(i) for i in case["input"][key])
    assert "Hello" in second
    assert first + second + decoder.flush() == case["expected"]["content"]


def test_half_a_character_at_the_end_is_shown_as_replacement(model_of: ModelOf) -> None:
    decoder = StreamingDecoder(model_of("smollm2").tokenizer)
    assert decoder.feed(10813) == ""
    assert decoder.flush() == "\ufffd"


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data())
def test_streamed_text_is_the_text_decoded_at_once(family: str, model_of: ModelOf, data: st.DataObject) -> None:
    tokenizer = model_of(family).tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=12))
    decoder = StreamingDecoder(tokenizer)
    streamed = "".join(decoder.feed(i) for i in ids) + decoder.flush()
    if family == "mistral-7b":  # a text begins with a space of SPM's own, a continuation does not
        streamed = streamed.removeprefix(" ")
    assert streamed == tokenizer.decode(ids)


def test_control_tokens_are_no_text_unless_asked_for(model_of: ModelOf) -> None:
    tokenizer = model_of("smollm2").tokenizer
    ids = tokenizer.encode("<|im_start|>Hi", parse_special=True)
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(ids, keep_control=True) == "<|im_start|>Hi"
    assert tokenizer.is_control(1)
    assert tokenizer.is_control(10**9)
    assert tokenizer.token_bytes(10**9) == b""


# --- any text ---------------------------------------------------------------------------------------------------------

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "</s>", "<s>", "<unk>", "<think>")
hostile = st.lists(st.one_of(st.sampled_from(SPECIALS), st.text(max_size=6), st.sampled_from("<|>_ims")), max_size=8)
hostile_text = hostile.map("".join)


@pytest.mark.parametrize("family", ["llama-3.1", "qwen3", "mistral-7b", "gemma-3"])
@given(text=hostile_text)
def test_text_comes_back_from_its_ids(family: str, text: str, model_of: ModelOf) -> None:
    tokenizer = model_of(family).tokenizer
    wanted = unicodedata.normalize("NFC", text) if family == "qwen3" else text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False), keep_control=True) == wanted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "unit", ["", " ", "=", "\n", "the ", "\u1100\u1161\u11a8", "\u03b1\u0313\u0300\u0345", "<|im_end|>"]
)
@given(n=st.integers(1, 3000))
def test_least_tokens_are_no_more_than_there_are(family: str, unit: str, n: int, model_of: ModelOf) -> None:
    tokenizer, text = model_of(family).tokenizer, unit * n
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, parse_special=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_of_megabytes_is_known_to_be_long(family: str, model_of: ModelOf) -> None:
    assert model_of(family).tokenizer.least_tokens("word " * 1_000_000) > 4096


@pytest.mark.parametrize("family", FAMILIES)
@given(text=hostile_text)
def test_text_never_becomes_a_control_token_unasked(family: str, text: str, model_of: ModelOf) -> None:
    tokenizer = model_of(family).tokenizer
    assert not any(tokenizer.is_control(i) for i in tokenizer.encode(text, parse_special=False))


def test_half_a_surrogate_pair_is_a_replacement_character(model_of: ModelOf) -> None:
    tokenizer = model_of("llama-3.1").tokenizer
    assert tokenizer.decode(tokenizer.encode("a\ud83db", parse_special=True)) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83e\udd99", parse_special=True)) == "🦙"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("unit", ["hello world ", "a", " ", "\n", "1", "'", "<|", "🦙", "<|im_start|>", "x \n"])
def test_cost_of_encoding_grows_with_length_alone(family: str, unit: str, model_of: ModelOf) -> None:
    # 100 kB take under 0.3 s on an idle machine; a quadratic path would take minutes.
    tokenizer = model_of(family).tokenizer
    text = unit * (100_000 // len(unit.encode()))
    start = time.perf_counter()
    tokenizer.encode(text, parse_special=True)
    assert time.perf_counter() - start < 3.0


# --- files that cannot be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.model", "bert", "tokenizer.ggml.model is 'bert'"),
        ("tokenizer.ggml.merges", ["a c"], "tokenizer.ggml.merges does not fit"),
        ("tokenizer.ggml.merges", ["b a"], "it makes 'ba', which is none"),
        ("tokenizer.ggml.token_type", [1, 1], "token_type has 2 entries for 4 tokens"),
        ("tokenizer.ggml.eos_token_id", 4, "eos_token_id is 4, expected an id under 4"),
        ("tokenizer.ggml.eos_token_id", "3", "eos_token_id is str, expected an integer"),
        ("tokenizer.ggml.tokens", ["a", "b", "ab", "x" * 1025], "a token of 1025 characters"),
        ("tokenizer.ggml.tokens", [1], "tokenizer.ggml.tokens is an array of I32, expected an array of strings"),
    ],
)
def test_vocabulary_that_cannot_be_is_refused_by_its_key(
    write_gguf: Writer, tiny: Any, key: str, value: object, words: str
) -> None:
    with pytest.raises(ModelFileError) as caught:
        tokenizer_of(write_gguf({**tiny[0], key: value}))
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["tokens", "merges", "model"])
def test_missing_key_is_named(write_gguf: Writer, tiny: Any, key: str) -> None:
    metadata = {k: v for k, v in tiny[0].items() if k != f"tokenizer.ggml.{key}"}
    with pytest.raises(ModelFileError, match=rf"tokenizer\.ggml\.{key} is (missing|None)"):
        tokenizer_of(write_gguf(metadata))


def test_spm_without_scores_is_refused(write_gguf: Writer, tiny: Any) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores is missing"):
        tokenizer_of(write_gguf({**tiny[0], "tokenizer.ggml.model": "llama"}))


def test_end_tokens_are_all_that_end_an_answer(model_of: ModelOf) -> None:
    assert model_of("llama-3.1").tokenizer.end_tokens == {128001, 128009}
    assert model_of("smollm2").tokenizer.end_tokens == {0, 2}
    assert model_of("mistral-7b").tokenizer.end_tokens == {2}
    assert model_of("gemma-3").tokenizer.end_tokens == {1, 106}


def test_end_token_is_control_though_the_file_calls_it_the_users(write_gguf: Writer, tiny: Any) -> None:
    """As files of Phi 3 do; but "</s>" so called is HTML, of Gemma."""
    tokens = ["a", "b", "ab", "<|endoftext|>", "<|end|>", "</s>", "<think>"]
    kinds = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 1, 1, 4, 4, 4, 4]}
    tokenizer = tokenizer_of(write_gguf({**tiny[0], **kinds}))
    assert tokenizer.end_tokens == {3, 4}
    assert [i for i in range(len(tokens)) if tokenizer.is_control(i)] == [3, 4]
    assert tokenizer.encode("ab<think>", parse_special=False) == [2, 6]
    assert not {3, 4} & set(tokenizer.encode("a<|end|><|endoftext|>", parse_special=False))


SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "[X]"],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 3],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -4.0, -2.0, -3.0, -1.0, 0.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


@pytest.mark.parametrize(("prefix", "ids"), [(None, [6]), (True, [6]), (False, [4])])
def test_spm_text_begins_with_a_space_where_the_file_wants_it(
    prefix: bool | None, ids: list[int], write_gguf: Writer
) -> None:
    keys = {} if prefix is None else {"tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = tokenizer_of(write_gguf({**SPM, **keys}))
    assert tokenizer.encode("a", parse_special=True) == ids
    assert tokenizer.encode("[X]a", parse_special=True) == [7, *ids]
    assert tokenizer.decode(ids) == "a"


@pytest.mark.parametrize(("wanted", "first"), [(None, [1]), (True, [1]), (False, [])])
def test_spm_prompt_has_one_bos_whoever_writes_it(wanted: bool | None, first: list[int], write_gguf: Writer) -> None:
    keys = {} if wanted is None else {"tokenizer.ggml.add_bos_token": wanted}
    tokenizer = tokenizer_of(write_gguf({**SPM, **keys}))
    assert tokenizer.encode("a", parse_special=True, add_bos=True) == [*first, 6]
    assert tokenizer.encode("<s>a", parse_special=True, add_bos=True) == [1, 6]
    template = ChatTemplate("{{ bos_token }}[X]{{ messages[0].content }}", "<s>", "</s>")
    assert template.encode_chat(tokenizer, [{"role": "user", "content": "a"}]) == [1, 7, 6]
    silent = ChatTemplate("[X]{{ messages[0].content }}", "<s>", "</s>")
    assert silent.encode_chat(tokenizer, [{"role": "user", "content": "a"}]) == [*first, 7, 6]
