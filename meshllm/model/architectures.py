"""What a layer of each architecture is: one short function that writes its ops for one slice. Kernels know no
architecture. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from meshllm.model.hyperparameters import Hyperparameters
from meshllm.model.program_builder import ProgramBuilder
from meshllm.model.slicing import Range, Slice


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    """f32 buffers that all layers use. None where the slice has none of it."""

    x: int  # residual stream [dim], the same on all ranks
    normed: int  # [dim]
    partial: int  # [dim]: this rank's part of a sum over ranks
    attention: AttentionBuffers | None
    gate: int | None  # [hidden units of the slice]
    up: int | None


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """[heads x head_dim] of the slice."""

    q: int
    k: int
    v: int
    out: int
    frequencies: int  # a weight


class LayerWriter(Protocol):
    """Writes layer `layer`."""

    def __call__(
        self, b: ProgramBuilder, h: Hyperparameters, part: Slice, buffers: LayerBuffers, layer: int
    ) -> None: ...


def write_llama_layer(b: ProgramBuilder, h: Hyperparameters, part: Slice, buffers: LayerBuffers, layer: int) -> None:
    """x += attention(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x))). Llama 1 to 3, SmolLM2, TinyLlama, Mistral.

    Rotary pairs are (2i, 2i + 1): converters to GGUF permute the rows of q and k of this architecture so.
    """
    name = f"blk.{layer}"
    if buffers.attention is not None:
        _write_attention(b, h, part, buffers, buffers.attention, layer)
    b.add_over_ranks(buffers.x, buffers.partial if buffers.attention is not None else None, "attention")
    if buffers.gate is not None and buffers.up is not None:
        b.norm(buffers.normed, buffers.x, f"{name}.ffn_norm.weight", h.rms_eps)
        whole = Range(0, h.dim)
        b.project(buffers.gate, buffers.normed, f"{name}.ffn_gate.weight", part.ffn, whole)
        b.project(buffers.up, buffers.normed, f"{name}.ffn_up.weight", part.ffn, whole)
        b.gate(buffers.gate, buffers.gate, buffers.up)
        b.project(buffers.partial, buffers.gate, f"{name}.ffn_down.weight", whole, part.ffn)
    b.add_over_ranks(buffers.x, buffers.partial if buffers.gate is not None else None, "ffn")


def _write_attention(
    b: ProgramBuilder, h: Hyperparameters, part: Slice, buffers: LayerBuffers, own: AttentionBuffers, layer: int
) -> None:
    name, whole = f"blk.{layer}", Range(0, h.dim)
    kv_heads = part.kv_heads(h.group)
    q_rows, kv_rows = _values_of(part.heads, h.head_dim), _values_of(kv_heads, h.head_dim)
    b.norm(buffers.normed, buffers.x, f"{name}.attn_norm.weight", h.rms_eps)
    b.project(own.q, buffers.normed, f"{name}.attn_q.weight", q_rows, whole)
    b.project(own.k, buffers.normed, f"{name}.attn_k.weight", kv_rows, whole)
    b.project(own.v, buffers.normed, f"{name}.attn_v.weight", kv_rows, whole)
    b.rope(own.q, own.frequencies, len(part.heads), h.head_dim, neox=False)
    b.rope(own.k, own.frequencies, len(kv_heads), h.head_dim, neox=False)
    first_head = part.heads.start - kv_heads.start * h.group
    b.attend(own.out, own.q, own.k, own.v, layer=layer, first_head=first_head, scale=h.head_dim**-0.5)
    b.project(buffers.partial, own.out, f"{name}.attn_output.weight", whole, q_rows)


def _values_of(heads: Range, head_dim: int) -> Range:
    return Range(heads.start * head_dim, heads.stop * head_dim)


LAYER_WRITERS: Final[Mapping[str, LayerWriter]] = {"llama": write_llama_layer}
