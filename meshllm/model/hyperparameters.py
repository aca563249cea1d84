"""Metadata of a GGUF -> frozen Hyperparameters, each value checked, refused with the key that is wrong.

Also the list of tensors that these numbers call for, so that a file whose tensors do not fit its numbers, or that holds
something this version would silently leave out (a bias, experts), is refused when opened, not while it answers. Pure.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Final

from meshllm.model.architectures import ARCHITECTURES
from meshllm.model.decoder import MAX_LAYERS, Hyperparameters
from meshllm.model.formats import RUNNABLE_FORMATS
from meshllm.model.gguf import GgufFile
from meshllm.model.gguf_values import GgufArray
from meshllm.model.metadata_keys import Keys
from meshllm.model.rope import MAX_CONTEXT, RopeScaling, read_rope_scaling

__all__ = ["Hyperparameters", "RopeScaling", "check_tensors", "expected_tensors", "read_hyperparameters"]

# Bounds keep every product of two of these, times a batch, inside 64 bits and reject nonsense early.
MAX_WIDTH: Final = 2**20
MAX_VOCAB: Final = 2**21

_LEFT_OUT: Final = re.compile(
    r"(blk\.\d+\.attn_rot_embd|rope_freqs|rope\.freqs)(\.weight)?"
)  # used or derived elsewhere


def read_hyperparameters(gguf: GgufFile) -> Hyperparameters:
    """The checked numbers of a model that this version runs. Raises ModelFileError that names the key."""
    name = gguf.find_str("general.architecture")
    if not gguf.tensors:
        gguf.refuse("holds no weights, at most a vocabulary: choose a file with the whole model")
    architecture = ARCHITECTURES.get(name or "")
    if name is None or architecture is None:
        known = ", ".join(ARCHITECTURES)
        gguf.refuse(f"general.architecture is {name!r}, this version runs {known}: choose such a model")
    keys = Keys(gguf, name)
    if (experts := gguf.find_int(f"{name}.expert_count") or 0) > 0:
        keys.refuse("expert_count", experts, "0: mixtures of experts do not run in this version")
    h = architecture.refine(_read_common(gguf, keys, name), keys)
    if h.rope_scaling.kind == "longrope":  # beyond it other factors hold, for the whole sequence
        h = replace(h, context_length=min(h.context_length, h.rope_scaling.original_context))
    return h


def _read_common(gguf: GgufFile, keys: Keys, architecture: str) -> Hyperparameters:
    """What all architectures have."""
    dim = keys.integer("embedding_length", MAX_WIDTH)
    n_heads = keys.integer("attention.head_count", MAX_WIDTH)
    n_kv_heads = keys.integer("attention.head_count_kv", MAX_WIDTH, default=n_heads)
    if n_heads % n_kv_heads:
        keys.refuse("attention.head_count_kv", n_kv_heads, f"a divisor of the {n_heads} query heads")
    if dim % n_heads and not keys.has("attention.key_length"):
        keys.refuse("embedding_length", dim, f"a multiple of the {n_heads} heads")
    head_dim = keys.integer("attention.key_length", MAX_WIDTH, default=dim // n_heads or 1)
    value_dim = keys.integer("attention.value_length", MAX_WIDTH, default=head_dim)
    if value_dim != head_dim:
        keys.refuse("attention.value_length", value_dim, f"{head_dim} as attention.key_length")
    rope_dim = keys.integer("rope.dimension_count", head_dim, default=head_dim)
    if rope_dim % 2:
        keys.refuse("rope.dimension_count", rope_dim, "an even number")
    return Hyperparameters(
        architecture=architecture,
        dim=dim,
        ffn_dim=keys.integer("feed_forward_length", MAX_WIDTH),
        n_layers=keys.integer("block_count", MAX_LAYERS),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(gguf, keys),
        context_length=keys.integer("context_length", MAX_CONTEXT),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope_theta=keys.number("rope.freq_base", 1.0, 1e12, default=10000.0),
        rope_dim=rope_dim,
        rope_scaling=read_rope_scaling(keys),
        tied_head="output.weight" not in gguf.tensors,
    )


def expected_tensors(h: Hyperparameters) -> dict[str, tuple[int, int]]:
    """Name -> (rows, cols) of every tensor that the architecture needs."""
    layer = ARCHITECTURES[h.architecture].layer_tensors(h)
    shapes = {"token_embd.weight": (h.vocab_size, h.dim), "output_norm.weight": (1, h.dim)}
    if not h.tied_head:
        shapes["output.weight"] = (h.vocab_size, h.dim)
    if h.rope_scaling.kind == "longrope":
        shapes.update({f"rope_factors_{name}.weight": (1, h.rope_dim // 2) for name in ("short", "long")})
    for i in range(h.n_layers):
        shapes.update({f"blk.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def check_tensors(gguf: GgufFile, h: Hyperparameters) -> None:
    """Raises ModelFileError unless each needed tensor is there, in shape and in a runnable format, and no other."""
    expected = expected_tensors(h)
    for name, shape in expected.items():
        tensor = gguf.tensors.get(name)
        if tensor is None:
            gguf.refuse(f"tensor {name} is missing: the file is no complete {h.architecture} model; get it again")
        if tensor.shape != shape:
            gguf.refuse(f"tensor {name} has shape {tensor.shape}, expected {shape} from the metadata: convert it again")
        if tensor.format not in RUNNABLE_FORMATS:
            known = ", ".join(sorted(f.name for f in RUNNABLE_FORMATS))
            gguf.refuse(
                f"tensor {name} is in format {tensor.format.name}, this version runs {known}: choose such a file"
            )
    factors = gguf.tensors.get("rope_freqs.weight")
    if factors is not None and math.prod(factors.shape) != h.rope_dim // 2:
        gguf.refuse(
            f"tensor rope_freqs.weight has shape {factors.shape}, expected {h.rope_dim // 2} values: convert it again"
        )
    for name in gguf.tensors:
        if name not in expected and not _LEFT_OUT.fullmatch(name):
            gguf.refuse(f"tensor {name} belongs to a variant of {h.architecture} that this version does not run")


def _vocab_size(gguf: GgufFile, keys: Keys) -> int:
    """Rows of the embedding, which is what logits have; never fewer than the tokenizer has tokens."""
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    n_tokens = tokens.count if isinstance(tokens, GgufArray) else 0
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        return keys.integer("vocab_size", MAX_VOCAB, default=n_tokens)
    rows = embedding.shape[0]
    if not 1 <= rows <= MAX_VOCAB or n_tokens > rows:
        gguf.refuse(
            f"token_embd.weight has {rows} rows for {n_tokens} tokens of the vocabulary: convert the model again"
        )
    return rows
