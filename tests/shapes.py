"""Shapes of models that are only planned for."""

from __future__ import annotations

from meshllm.model.slicing import ModelShape


def shape(
    n_heads: int,
    n_kv_heads: int,
    *,
    n_layers: int = 30,
    dim: int = 576,
    head_dim: int = 64,
    ffn_dim: int = 1536,
    vocab: int = 49152,
    bytes_per_weight: float = 0.625,
) -> ModelShape:
    """A model with Q4-like weights."""

    def of(weights: int) -> int:
        return int(weights * bytes_per_weight)

    return ModelShape(
        n_layers=n_layers,
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_dim=ffn_dim,
        vocab_size=vocab,
        context_length=8192,
        head_bytes=of(n_layers * 2 * dim * head_dim),
        kv_head_bytes=of(n_layers * 2 * dim * head_dim),
        ffn_unit_bytes=of(n_layers * 3 * dim),
        vocab_row_bytes=of(dim),
        fixed_bytes=n_layers * 2 * dim * 4,
        head_align=1,
        ffn_align=32,
    )


LLAMA_1B = shape(32, 8, n_layers=16, dim=2048, ffn_dim=8192, vocab=128256)
