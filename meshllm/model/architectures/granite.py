"""Granite 3, dense: llama with scales on embeddings, scores, what each half of a layer adds, and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshllm.model.architectures import llama
from meshllm.model.architectures.layer import Architecture
from meshllm.model.decoder import Hyperparameters
from meshllm.model.metadata_keys import Keys

MAX_SCALE: Final = 1e6


def refine(h: Hyperparameters, keys: Keys) -> Hyperparameters:
    """The four scales; logits are divided by theirs."""
    return replace(
        h,
        attention_scale=keys.switched_number("attention.scale", MAX_SCALE, off=h.head_dim**-0.5),
        embedding_scale=keys.switched_number("embedding_scale", MAX_SCALE, off=1.0),
        residual_scale=keys.switched_number("residual_scale", MAX_SCALE, off=1.0),
        logit_scale=1 / keys.switched_number("logit_scale", MAX_SCALE, off=1.0),
    )


GRANITE = Architecture(refine, llama.layer_tensors, llama.write_layer)
