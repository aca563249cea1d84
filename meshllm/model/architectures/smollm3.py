"""SmolLM3: llama with every fourth layer unturned (NoPE). No key of the file says which: it belongs to the name."""

from __future__ import annotations

from typing import Final

from meshllm.model.architectures import llama
from meshllm.model.architectures.layer import Architecture, Layer

UNTURNED_PERIOD: Final = 4


def write_layer(layer: Layer) -> None:
    """x += attention(norm(x)); x += feed-forward of llama."""
    layer.project_heads()
    if (layer.index + 1) % UNTURNED_PERIOD:
        layer.rotate(neox=False)
    layer.attend()
    layer.add_attention()
    llama.write_feed_forward(layer)


SMOLLM3 = Architecture(llama.refine, llama.layer_tensors, write_layer)
