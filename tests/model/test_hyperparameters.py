"""Hyperparameters: right numbers from a right file, and a refusal that names the key or tensor from any other."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import ModelFileError
from meshllm.model.gguf import open_gguf
from meshllm.model.hyperparameters import (
    Hyperparameters,
    RopeScaling,
    check_tensors,
    expected_tensors,
    read_hyperparameters,
)
from meshllm.model.model_file import ModelFile

Writer = Callable[..., bytes]


def load(raw: bytes | bytearray) -> Hyperparameters:
    gguf = open_gguf(memoryview(raw), "m.gguf")
    found = read_hyperparameters(gguf)
    check_tensors(gguf, found)
    return found


def refusal(raw: bytes | bytearray) -> str:
    with pytest.raises(ModelFileError, match=r"^m\.gguf: [^\n]+$") as caught:
        load(raw)
    return str(caught.value)


def test_real_model_has_the_numbers_it_is_known_for(smollm2_path: Path) -> None:
    with ModelFile.open(smollm2_path) as model:
        h = model.hyperparameters
    assert (h.dim, h.ffn_dim, h.n_layers, h.n_heads, h.n_kv_heads, h.head_dim) == (576, 1536, 30, 9, 3, 64)
    assert (h.vocab_size, h.context_length, h.rope_theta, h.tied_head, h.group) == (49152, 8192, 100000.0, True, 3)


def test_small_model_is_accepted_with_defaults(write_gguf: Writer, tiny: Any) -> None:
    h = load(write_gguf(*tiny))
    assert (h.head_dim, h.rope_dim, h.rope_theta, h.rope_scaling) == (8, 8, 10000.0, RopeScaling())
    assert set(expected_tensors(h)) == {name for name, *_ in tiny[1]}


@pytest.mark.parametrize("case", ["GGUF-05"], indirect=True)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", 2**32 - 1),
        ("attention.head_count", 0),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 10),
        ("attention.head_count_kv", 2),
        ("embedding_length", 0),
        ("context_length", 0),
        ("feed_forward_length", 0),
        ("rope.dimension_count", 0),
        ("rope.dimension_count", 66),
        ("rope.dimension_count", 63),
    ],
)
def test_number_that_cannot_be_is_refused_by_its_key(
    case: dict[str, Any], smollm2_path: Path, key: str, value: int
) -> None:
    assert case["id"] == "GGUF-05"
    raw = bytearray(smollm2_path.read_bytes())
    place = raw.index(f"llama.{key}".encode() + struct.pack("<I", 4)) + len(f"llama.{key}") + 4
    raw[place : place + 4] = struct.pack("<I", value)
    assert f"llama.{key} is {value}, expected " in refusal(raw)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "mamba", "general.architecture is 'mamba', this version runs llama"),
        ("llama.expert_count", 8, "llama.expert_count is 8"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "rms_epsilon is nan"),
        ("llama.attention.layer_norm_rms_epsilon", "small", "rms_epsilon is str, expected a number"),
        ("llama.rope.freq_base", -1.0, "rope.freq_base is -1"),
        ("llama.rope.scaling.type", "dynamic", "rope.scaling.type is dynamic, expected none, linear, llama3, yarn"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.factor is missing"),
        ("llama.attention.value_length", 4, "value_length is 4"),
        ("llama.feed_forward_length", [64, 32], "differs between layers"),
        ("tokenizer.ggml.tokens", ["a", "b", "c", "d", "e"], "4 rows for 5 tokens"),
    ],
)
def test_what_this_version_does_not_run_is_refused_by_name(
    write_gguf: Writer, tiny: Any, key: str, value: object, words: str
) -> None:
    metadata, tensors = tiny
    assert words in refusal(write_gguf({**metadata, key: value}, tensors))


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length"])
def test_missing_number_is_named(write_gguf: Writer, tiny: Any, key: str) -> None:
    metadata, tensors = tiny
    del metadata[f"llama.{key}"]
    assert f"llama.{key} is missing" in refusal(write_gguf(metadata, tensors))


def test_same_number_for_every_layer_is_one_number(write_gguf: Writer, tiny: Any) -> None:
    metadata, tensors = tiny
    assert load(write_gguf({**metadata, "llama.feed_forward_length": [64]}, tensors)).ffn_dim == 64


@pytest.mark.parametrize(
    "keys", [{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"llama.rope.scale_linear": 4.0}]
)
def test_linear_scaling_is_read_in_both_spellings(write_gguf: Writer, tiny: Any, keys: dict[str, object]) -> None:
    metadata, tensors = tiny
    assert load(write_gguf({**metadata, **keys}, tensors)).rope_scaling == RopeScaling("linear", 4.0)


def test_missing_misshapen_or_foreign_tensor_is_named(write_gguf: Writer, tiny: Any) -> None:
    metadata, tensors = tiny
    assert "tensor blk.0.ffn_down.weight is missing" in refusal(write_gguf(metadata, tensors[:-1]))
    wrong = [*tensors[:-1], ("blk.0.ffn_down.weight", (32, 64), 0, bytes(4 * 32 * 64))]
    assert "has shape (64, 32), expected (32, 64)" in refusal(write_gguf(metadata, wrong))
    bias = [*tensors, ("blk.0.attn_q.bias", (32,), 0, bytes(128))]
    assert "tensor blk.0.attn_q.bias belongs to a variant" in refusal(write_gguf(metadata, bias))
    packed = [*tensors[:-1], ("blk.0.ffn_down.weight", (64, 32), 39, bytes(2 * 32 * 17))]
    assert "in format MXFP4, this version runs" in refusal(write_gguf(metadata, packed))
    factors = [*tensors, ("rope_freqs.weight", (3,), 0, bytes(12))]
    assert "rope_freqs.weight has shape (1, 3), expected 4 values" in refusal(write_gguf(metadata, factors))


def test_file_with_a_vocabulary_alone_says_so(write_gguf: Writer, tiny: Any) -> None:
    assert "no weights" in refusal(write_gguf(tiny[0]))
