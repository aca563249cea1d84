"""Qwen 3, dense: llama whose query and key heads are normed before they turn, in pairs (i, i + half).

A head's width is a number of its own, not dim / heads.
"""

from __future__ import annotations

from meshllm.model.architectures import llama
from meshllm.model.architectures.layer import Architecture, Layer, Shapes
from meshllm.model.decoder import Hyperparameters


def layer_tensors(h: Hyperparameters) -> Shapes:
    """Those of llama and two norms of a head."""
    norm = (1, h.head_dim)
    return {**llama.layer_tensors(h), "attn_q_norm.weight": norm, "attn_k_norm.weight": norm}


def write_layer(layer: Layer) -> None:
    """x += attention(norm(x)); x += feed-forward of llama."""
    layer.project_heads()
    layer.norm_heads()
    layer.rotate(neox=True)
    layer.attend()
    layer.add_attention()
    llama.write_feed_forward(layer)


QWEN3 = Architecture(llama.refine, layer_tensors, write_layer)
