"""GGUF files written from Python values, for tests: any metadata and tensors, and a whole one-layer model.

Written apart from the reader, from the format's specification, so that neither can hide a fault of the other.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

Tensor = tuple[str, tuple[int, ...], int, bytes]  # name, dimensions as in the file, format, data


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    """Type and value as a converter would write them: bool, u32, f32, string, array of strings, i32 or f32."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(str(v)) for v in value)
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case list():
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(value)


def gguf_bytes(metadata: Mapping[str, object], tensors: Sequence[Tensor] = (), *, alignment: int = 32) -> bytes:
    """A whole version 3 file. bytes as a metadata value: type and value, verbatim."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + (value if isinstance(value, bytes) else _value(value))
    data = b""
    for name, dimensions, form, raw in tensors:
        head += _text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, form, len(data))
        data += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + data if tensors else head


TINY: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "</s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}


def tiny_tensors() -> list[Tensor]:
    """Zeros in F32 for the numbers in TINY; the head is tied."""
    shapes = {
        "token_embd": (32, 4),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (32, 16),
        "blk.0.attn_v": (32, 16),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_norm": (32,),
        "blk.0.ffn_gate": (32, 64),
        "blk.0.ffn_up": (32, 64),
        "blk.0.ffn_down": (64, 32),
    }
    return [(f"{name}.weight", shape, 0, bytes(4 * int(np.prod(shape)))) for name, shape in shapes.items()]


def tiny_model(number: int = 0) -> bytes:
    """A whole runnable file; other numbers give other bytes."""
    return gguf_bytes({**TINY, "general.name": f"tiny {number}"}, tiny_tensors())
