"""Qwen 2 and 2.5, DeepSeek-R1-Distill-Qwen: llama with biases on q, k and v, and rotary pairs (i, i + half)."""

from __future__ import annotations

from meshllm.model.architectures import llama
from meshllm.model.architectures.layer import Architecture, Layer, Shapes
from meshllm.model.decoder import Hyperparameters


def layer_tensors(h: Hyperparameters) -> Shapes:
    """Those of llama and three biases."""
    kv = (1, h.n_kv_heads * h.head_dim)
    biases = {"attn_q.bias": (1, h.n_heads * h.head_dim), "attn_k.bias": kv, "attn_v.bias": kv}
    return {**llama.layer_tensors(h), **biases}


def write_layer(layer: Layer) -> None:
    """x += attention(norm(x)); x += feed-forward of llama."""
    layer.project_heads()
    layer.add_head_biases()
    layer.rotate(neox=True)
    layer.attend()
    layer.add_attention()
    llama.write_feed_forward(layer)


QWEN2 = Architecture(llama.refine, layer_tensors, write_layer)
