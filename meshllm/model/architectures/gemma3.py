"""Gemma 3, text: embeddings scaled by sqrt(dim), heads normed, norms before and after each half of a layer, GeGLU.

Five of six layers see a window only and turn by a base of their own, unstretched. The file's norms hold 1 + weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshllm.model.architectures import qwen3
from meshllm.model.architectures.layer import Architecture, Layer, Shapes
from meshllm.model.decoder import MAX_LAYERS, Hyperparameters
from meshllm.model.metadata_keys import Keys
from meshllm.model.rope import MAX_CONTEXT

WINDOW_PERIOD: Final = 6
LOCAL_ROPE_THETA: Final = 10000.0
LAYERS_OF_27B: Final = 62  # the one size whose scores are scaled by 1 / sqrt(dim / heads); its file does not say so
MAX_CAP: Final = 1e6


def refine(h: Hyperparameters, keys: Keys) -> Hyperparameters:
    """Window, bases, scales and soft caps, with what the converters leave out."""
    width = h.dim / h.n_heads if h.n_layers == LAYERS_OF_27B else h.head_dim
    return replace(
        h,
        embedding_scale=h.dim**0.5,
        attention_scale=keys.switched_number("attention.scale", MAX_CAP, off=width**-0.5),
        attention_soft_cap=keys.switched_number("attn_logit_softcapping", MAX_CAP, off=0.0),
        logit_soft_cap=keys.switched_number("final_logit_softcapping", MAX_CAP, off=0.0),
        rope_theta=keys.number("rope.freq_base", 1.0, 1e12, default=1e6),
        local_rope_theta=keys.number("rope.freq_base_swa", 1.0, 1e12, default=LOCAL_ROPE_THETA),
        window=keys.integer("attention.sliding_window", MAX_CONTEXT),
        window_period=keys.integer("attention.sliding_window_pattern", MAX_LAYERS, default=WINDOW_PERIOD),
    )


def layer_tensors(h: Hyperparameters) -> Shapes:
    """Those of qwen3 and two norms after."""
    norm = (1, h.dim)
    return {**qwen3.layer_tensors(h), "post_attention_norm.weight": norm, "post_ffw_norm.weight": norm}


def write_layer(layer: Layer) -> None:
    """x += norm(attention(norm(x))); x += norm(down(gelu(gate(norm(x))) * up(norm(x))))."""
    layer.project_heads()
    layer.norm_heads()
    layer.rotate(neox=True)
    layer.attend()
    layer.add_attention(post_norm="post_attention_norm.weight")
    layer.project_hidden()
    layer.contract(gelu=True)
    layer.add_hidden(post_norm="post_ffw_norm.weight")


GEMMA3 = Architecture(refine, layer_tensors, write_layer)
