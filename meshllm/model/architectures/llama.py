"""Llama 1 to 3.x, SmolLM2, TinyLlama, Mistral dense, DeepSeek-R1-Distill-Llama.

Rotary pairs are (2i, 2i + 1): converters to GGUF permute the rows of q and k of this architecture so.
"""

from __future__ import annotations

from meshllm.model.architectures.layer import Architecture, Layer, Shapes
from meshllm.model.decoder import Hyperparameters
from meshllm.model.metadata_keys import Keys


def refine(h: Hyperparameters, keys: Keys) -> Hyperparameters:
    """Nothing of its own."""
    return h


def layer_tensors(h: Hyperparameters) -> Shapes:
    """Seven matrices, two norms."""
    heads, kv = h.n_heads * h.head_dim, h.n_kv_heads * h.head_dim
    return {
        "attn_norm.weight": (1, h.dim),
        "attn_q.weight": (heads, h.dim),
        "attn_k.weight": (kv, h.dim),
        "attn_v.weight": (kv, h.dim),
        "attn_output.weight": (h.dim, heads),
        "ffn_norm.weight": (1, h.dim),
        "ffn_gate.weight": (h.ffn_dim, h.dim),
        "ffn_up.weight": (h.ffn_dim, h.dim),
        "ffn_down.weight": (h.dim, h.ffn_dim),
    }


def write_layer(layer: Layer) -> None:
    """x += attention(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x)))."""
    layer.project_heads()
    layer.rotate(neox=False)
    layer.attend()
    layer.add_attention()
    write_feed_forward(layer)


def write_feed_forward(layer: Layer) -> None:
    """The second half of a layer, which most architectures share."""
    layer.project_hidden()
    layer.contract()
    layer.add_hidden()


LLAMA = Architecture(refine, layer_tensors, write_layer)
