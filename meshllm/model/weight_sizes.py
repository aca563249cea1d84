"""Tensor sizes of a file -> ModelShape: bytes by head, hidden unit and vocabulary row, and where cuts may fall. Pure.

Only names and sizes count, so a model whose layers differ in format is summed as it is. A tensor that no cut touches is
fixed: every rank holds it. The embedding table is left out, for it is never packed, except as the head of a tied model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Literal, Protocol, TypeAlias

from meshllm.model.decoder import Hyperparameters
from meshllm.model.formats import Format
from meshllm.model.slicing import ModelShape

_Part: TypeAlias = Literal["head", "kv", "ffn", "vocab", "fixed"]

# The part of a tensor by the last but one word of its name: blk.7.attn_q.weight, blk.7.attn_q.bias.
_PARTS: Final[dict[str, _Part]] = {
    "attn_q": "head",
    "attn_output": "head",
    "attn_k": "kv",
    "attn_v": "kv",
    "ffn_gate": "ffn",
    "ffn_up": "ffn",
    "ffn_down": "ffn",
    "output": "vocab",
}
_EMBEDDING: Final = "token_embd.weight"
_HEAD_CUT: Final = "attn_output"  # cut along its rows of values: on blocks
_FFN_CUT: Final = "ffn_down"
_FUSED_HEADS: Final = ".attn_qkv."  # rows of q, k and v


class SizedTensor(Protocol):
    """What is needed of a tensor; gguf.TensorInfo has it."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> Format: ...
    @property
    def size(self) -> int: ...


def measure_shape(h: Hyperparameters, tensors: Iterable[SizedTensor]) -> ModelShape:
    """The shape of a model with these tensors. Fractions of bytes are rounded up."""
    sizes: dict[_Part, int] = dict.fromkeys(("head", "kv", "ffn", "vocab", "fixed"), 0)
    head_align = ffn_align = 1
    for tensor in tensors:
        part = _part(tensor.name, h.tied_head)
        if part is None:
            continue
        if _FUSED_HEADS in tensor.name:
            sizes["kv"] += (kv := tensor.size * 2 * h.n_kv_heads // (h.n_heads + 2 * h.n_kv_heads))
            sizes["head"] += tensor.size - kv
            continue
        sizes[part] += tensor.size
        block = tensor.format.block_values
        if f".{_HEAD_CUT}.weight" in tensor.name:
            head_align = math.lcm(head_align, block // math.gcd(block, h.head_dim))
        if f".{_FFN_CUT}.weight" in tensor.name:
            ffn_align = math.lcm(ffn_align, block)
    return ModelShape(
        n_layers=h.n_layers,
        dim=h.dim,
        n_heads=h.n_heads,
        n_kv_heads=h.n_kv_heads,
        head_dim=h.head_dim,
        ffn_dim=h.ffn_dim,
        vocab_size=h.vocab_size,
        context_length=h.context_length,
        head_bytes=-(-sizes["head"] // h.n_heads),
        kv_head_bytes=-(-sizes["kv"] // h.n_kv_heads),
        ffn_unit_bytes=-(-sizes["ffn"] // h.ffn_dim),
        vocab_row_bytes=-(-sizes["vocab"] // h.vocab_size),
        fixed_bytes=sizes["fixed"],
        head_align=head_align if h.n_heads % head_align == 0 else h.n_heads,
        ffn_align=ffn_align,
    )


def _part(name: str, tied_head: bool) -> _Part | None:
    if name == _EMBEDDING:
        return "vocab" if tied_head else None
    words = name.split(".")
    return _PARTS.get(words[-2], "fixed") if len(words) >= 2 else "fixed"
