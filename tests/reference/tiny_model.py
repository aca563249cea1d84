"""Random models of any shape as GGUF files, written by the `gguf` package: not our code on both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Quant
from reference.random_blocks import random_blocks

from meshllm.model.formats import Format
from meshllm.model.model_file import ModelFile


@dataclass(frozen=True)
class Shape:
    """What to write. quant: of the matrices, quants: of some by the name before ".weight"; norms are f32."""

    quant: str = "F32"
    dim: int = 64
    ffn_dim: int = 96
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 100
    tied: bool = True
    rope_dim: int | None = None
    linear_factor: float | None = None
    rope_factors: bool = False
    seed: int = 0
    quants: dict[str, str] = field(default_factory=dict)


def write_tiny_model(path: Path, s: Shape) -> Path:
    rng = np.random.default_rng(s.seed)
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(s.n_layers)
    w.add_context_length(512)
    w.add_embedding_length(s.dim)
    w.add_feed_forward_length(s.ffn_dim)
    w.add_head_count(s.n_heads)
    w.add_head_count_kv(s.n_kv_heads)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(10000.0)
    rope_dim = s.rope_dim or s.head_dim
    w.add_rope_dimension_count(rope_dim)
    if s.linear_factor is not None:
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(s.linear_factor)

    def matrix(name: str, rows: int, cols: int) -> None:
        values = rng.normal(0, 1 / np.sqrt(cols), (rows, cols)).astype(np.float32)
        quant = s.quants.get(name.split(".")[-2], s.quant)
        kind = Quant[quant]
        try:
            stored = gguf.quants.quantize(values, kind)
        except NotImplementedError:
            stored = random_blocks(Format[quant], rows, cols, rng, 1 / np.sqrt(cols))
        w.add_tensor(name, stored, raw_dtype=kind)

    def norm(name: str) -> None:
        w.add_tensor(name, (1 + 0.1 * rng.normal(size=s.dim)).astype(np.float32))

    heads, kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    matrix("token_embd.weight", s.vocab_size, s.dim)
    for i in range(s.n_layers):
        norm(f"blk.{i}.attn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", heads, s.dim)
        matrix(f"blk.{i}.attn_k.weight", kv, s.dim)
        matrix(f"blk.{i}.attn_v.weight", kv, s.dim)
        matrix(f"blk.{i}.attn_output.weight", s.dim, heads)
        norm(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.ffn_gate.weight", s.ffn_dim, s.dim)
        matrix(f"blk.{i}.ffn_up.weight", s.ffn_dim, s.dim)
        matrix(f"blk.{i}.ffn_down.weight", s.dim, s.ffn_dim)
    norm("output_norm.weight")
    if not s.tied:
        matrix("output.weight", s.vocab_size, s.dim)
    if s.rope_factors:  # as llama 3.1 has them: 1 for high frequencies, 8 for low ones, a ramp between
        w.add_tensor("rope_freqs.weight", np.linspace(1, 8, rope_dim // 2).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def read_tensor(model_file: ModelFile, name: str) -> npt.NDArray[np.float32]:
    """A tensor dequantized by the `gguf` package, f32 [rows, cols]."""
    info = model_file.gguf.tensors[name]
    rows, cols = info.shape
    stored = np.frombuffer(model_file.tensor(name), np.uint8).reshape(rows, -1)
    values = gguf.quants.dequantize(stored, Quant(int(info.format)))
    return np.ascontiguousarray(values, np.float32).reshape(rows, cols)
