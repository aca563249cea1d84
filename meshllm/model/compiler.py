"""Hyperparameters and a slice -> the program that one rank runs. Pure: nothing of the file's weights is looked at.

The whole step is embedding, layers, the choice of output rows, the last norm and the logits of this rank's part of the
vocabulary. A rank whose slice lacks heads, hidden units or vocabulary skips their ops but keeps every EXCHANGE, so
that all ranks stop at the same places.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshllm.errors import SliceError
from meshllm.model.architectures import LAYER_WRITERS, AttentionBuffers, LayerBuffers
from meshllm.model.formats import Format
from meshllm.model.hyperparameters import Hyperparameters
from meshllm.model.opcodes import CacheShape, Program
from meshllm.model.program_builder import ProgramBuilder
from meshllm.model.slicing import Range, Slice

EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"


def whole_slice(h: Hyperparameters) -> Slice:
    """All of the model, for one rank."""
    return Slice(heads=Range(0, h.n_heads), ffn=Range(0, h.ffn_dim), vocab=Range(0, h.vocab_size))


def compile_program(h: Hyperparameters, part: Slice, world_size: int, formats: Mapping[str, Format]) -> Program:
    """The program of the rank that holds `part` among `world_size` ranks. formats: of the file's tensors, by name.

    Raises SliceError where the slice is no part of the model or a cut falls inside a block of a quantized tensor.
    """
    check_slice(h, part)
    b = ProgramBuilder(formats, world_size)
    buffers = _place_buffers(b, h, part)
    b.embed(buffers.x, EMBEDDING, h.vocab_size)
    for layer in range(h.n_layers):
        LAYER_WRITERS[h.architecture](b, h, part, buffers, layer)
    b.select(buffers.x)
    logits = None
    if part.vocab:
        logits = b.buffer("logits", len(part.vocab))
        b.norm(buffers.normed, buffers.x, "output_norm.weight", h.rms_eps)
        head = EMBEDDING if h.tied_head else "output.weight"
        b.project(logits, buffers.normed, head, part.vocab, Range(0, h.dim))
    kv_heads = part.kv_heads(h.group)
    cache = CacheShape(h.n_layers if kv_heads else 0, len(kv_heads), h.head_dim, h.group)
    return b.finish(cache, buffers.x, logits, part.vocab)


def check_slice(h: Hyperparameters, part: Slice) -> None:
    """Raises SliceError unless every range lies within the model."""
    limits = {"heads": (part.heads, h.n_heads), "ffn": (part.ffn, h.ffn_dim), "vocab": (part.vocab, h.vocab_size)}
    for name, (found, limit) in limits.items():
        if not 0 <= found.start <= found.stop <= limit:
            raise SliceError(
                f"slice {name} {found.start} to {found.stop} is not within 0 to {limit}: another model's layout"
            )


def inverse_frequencies(h: Hyperparameters) -> tuple[float, ...]:
    """Radians a position of each rotary pair: theta^(-2i / rope_dim), divided by a linear scaling's factor (RoFormer,
    Su 2021).
    """
    factor = h.rope_scaling.factor if h.rope_scaling.kind == "linear" else 1.0
    return tuple(h.rope_theta ** (-2.0 * i / h.rope_dim) / factor for i in range(h.rope_dim // 2))


def _place_buffers(b: ProgramBuilder, h: Hyperparameters, part: Slice) -> LayerBuffers:
    x, normed, partial = (b.buffer(name, h.dim) for name in ("x", "normed", "partial"))
    attention = gate = up = None
    if part.heads:
        q_width, kv_width = len(part.heads) * h.head_dim, len(part.kv_heads(h.group)) * h.head_dim
        q, k, v = b.buffer("q", q_width), b.buffer("k", kv_width), b.buffer("v", kv_width)
        divisor = ROPE_FACTORS if b.has_tensor(ROPE_FACTORS) else None
        attention = AttentionBuffers(q, k, v, b.buffer("attention", q_width), b.vector(inverse_frequencies(h), divisor))
    if part.ffn:
        gate, up = b.buffer("gate", len(part.ffn)), b.buffer("up", len(part.ffn))
    return LayerBuffers(x, normed, partial, attention, gate, up)
