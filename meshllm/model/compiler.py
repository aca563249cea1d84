"""Hyperparameters and a slice -> the program that one rank runs. Pure: nothing of the file's weights is looked at.

The whole step is embedding, layers, the choice of output rows, the last norm and the logits of this rank's part of the
vocabulary. A rank whose slice lacks heads, hidden units or vocabulary skips their ops but keeps every EXCHANGE, so
that all ranks stop at the same places.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshllm.errors import SliceError
from meshllm.model.architectures import ARCHITECTURES
from meshllm.model.architectures.layer import AttentionBuffers, HiddenBuffers, Layer, LayerBuffers
from meshllm.model.decoder import Hyperparameters
from meshllm.model.formats import Format
from meshllm.model.opcodes import CacheShape, Program
from meshllm.model.program_builder import ProgramBuilder
from meshllm.model.rope import RopeScaling, inverse_frequencies
from meshllm.model.slicing import Range, Slice

EMBEDDING = "token_embd.weight"
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight")  # divide frequencies, where the file has one


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
    b.scale(buffers.x, h.embedding_scale)
    for index in range(h.n_layers):
        ARCHITECTURES[h.architecture].write_layer(Layer(b, h, part, buffers, index))
    b.select(buffers.x)
    logits = None
    if part.vocab:
        logits = b.buffer("logits", len(part.vocab))
        b.norm(buffers.normed, buffers.x, "output_norm.weight", h.rms_eps)
        head = EMBEDDING if h.tied_head else "output.weight"
        b.project(logits, buffers.normed, head, part.vocab, Range(0, h.dim))
        b.scale(logits, h.logit_scale, h.logit_soft_cap)
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


def _place_buffers(b: ProgramBuilder, h: Hyperparameters, part: Slice) -> LayerBuffers:
    x, normed, partial = (b.buffer(name, h.dim) for name in ("x", "normed", "partial"))
    attention = hidden = None
    if part.heads:
        q_width, kv_width = len(part.heads) * h.head_dim, len(part.kv_heads(h.group)) * h.head_dim
        q, k, v = b.buffer("q", q_width), b.buffer("k", kv_width), b.buffer("v", kv_width)
        attention = AttentionBuffers(q, k, v, b.buffer("attention", q_width), *_place_frequencies(b, h))
    if part.ffn:
        hidden = HiddenBuffers(b.buffer("gate", len(part.ffn)), b.buffer("up", len(part.ffn)))
    return LayerBuffers(x, normed, partial, attention, hidden)


def _place_frequencies(b: ProgramBuilder, h: Hyperparameters) -> tuple[int, int]:
    """Those of layers that see all, and of those with a window: the same unless these have a base of their own."""
    divisor = next((name for name in ROPE_FACTORS if b.has_tensor(name)), None)
    told_twice = divisor is not None and h.rope_scaling.kind == "llama3"  # the tensor is made of those numbers
    scaling = RopeScaling() if told_twice else h.rope_scaling
    wide = b.vector(inverse_frequencies(h.rope_theta, h.rope_dim, scaling), divisor)
    if h.local_rope_theta is None:
        return wide, wide
    return wide, b.vector(inverse_frequencies(h.local_rope_theta, h.rope_dim, RopeScaling()), None)
