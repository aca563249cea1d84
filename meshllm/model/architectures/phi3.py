"""Phi 3, 3.5 and 4, dense: llama with q, k, v in one tensor and gate, up in another; rotary pairs (i, i + half).

Where frequencies have factors (longrope) only the original context is served: beyond it others hold for the whole
sequence, so that what is in the cache would be wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshllm.model.architectures.layer import Architecture, Layer, Shapes
from meshllm.model.decoder import Hyperparameters
from meshllm.model.metadata_keys import Keys
from meshllm.model.rope import MAX_CONTEXT, read_longrope

WINDOW: Final = "attention.sliding_window"


def refine(h: Hyperparameters, keys: Keys) -> Hyperparameters:
    """The window, of all layers if any. Converters write longrope's numbers without its name."""
    return replace(
        h,
        window=0 if keys.is_off(WINDOW) else keys.integer(WINDOW, MAX_CONTEXT),
        rope_scaling=read_longrope(keys) if keys.has("rope.scaling.attn_factor") else h.rope_scaling,
    )


def layer_tensors(h: Hyperparameters) -> Shapes:
    """Four matrices, two norms."""
    heads, kv = h.n_heads * h.head_dim, h.n_kv_heads * h.head_dim
    return {
        "attn_norm.weight": (1, h.dim),
        "attn_qkv.weight": (heads + 2 * kv, h.dim),
        "attn_output.weight": (h.dim, heads),
        "ffn_norm.weight": (1, h.dim),
        "ffn_up.weight": (2 * h.ffn_dim, h.dim),
        "ffn_down.weight": (h.dim, h.ffn_dim),
    }


def write_layer(layer: Layer) -> None:
    """As llama's."""
    layer.project_fused_heads()
    layer.rotate(neox=True)
    layer.attend()
    layer.add_attention()
    layer.project_hidden(fused=True)
    layer.contract()
    layer.add_hidden()


PHI3 = Architecture(refine, layer_tensors, write_layer)
