"""Metadata of a GGUF -> frozen Hyperparameters, each value checked, refused with the key that is wrong.

Also the list of tensors that these numbers call for, so that a file whose tensors do not fit its numbers, or that holds
something this version would silently leave out (a bias, experts), is refused when opened, not while it answers. Pure.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from meshllm.model.formats import RUNNABLE_FORMATS
from meshllm.model.gguf import GgufFile
from meshllm.model.gguf_values import GgufArray

ARCHITECTURES: Final = ("llama",)
# Bounds keep every product of two of these, times a batch, inside 64 bits and reject nonsense early.
MAX_WIDTH: Final = 2**20
MAX_LAYERS: Final = 1024
MAX_VOCAB: Final = 2**21
MAX_CONTEXT: Final = 2**27

_LEFT_OUT: Final = re.compile(
    r"(blk\.\d+\.attn_rot_embd|rope_freqs|rope\.freqs)(\.weight)?"
)  # used or derived elsewhere


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Stretching of rotary positions. linear: positions divided by factor.

    Factors of single frequencies (llama3) are in the tensor rope_freqs.weight and need no entry here.
    """

    kind: Literal["none", "linear"] = "none"
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Numbers of a decoder-only transformer. Widths in values, context in tokens."""

    architecture: str
    dim: int  # residual width
    ffn_dim: int  # hidden units of the feed-forward
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_dim: int  # leading values of a head that are rotated
    rope_scaling: RopeScaling
    tied_head: bool  # logits use token_embd.weight

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.n_heads // self.n_kv_heads


def read_hyperparameters(gguf: GgufFile) -> Hyperparameters:
    """The checked numbers of a model that this version runs. Raises ModelFileError that names the key."""
    architecture = gguf.find_str("general.architecture")
    if not gguf.tensors:
        gguf.refuse("holds no weights, at most a vocabulary: choose a file with the whole model")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        gguf.refuse(f"general.architecture is {architecture!r}, this version runs {known}: choose such a model")
    keys = _Keys(gguf, architecture)
    dim = keys.integer("embedding_length", MAX_WIDTH)
    n_heads = keys.integer("attention.head_count", MAX_WIDTH)
    n_kv_heads = keys.integer("attention.head_count_kv", MAX_WIDTH, default=n_heads)
    if n_heads % n_kv_heads:
        keys.refuse("attention.head_count_kv", n_kv_heads, f"a divisor of the {n_heads} query heads")
    if dim % n_heads and f"{architecture}.attention.key_length" not in gguf.metadata:
        keys.refuse("embedding_length", dim, f"a multiple of the {n_heads} heads")
    head_dim = keys.integer("attention.key_length", MAX_WIDTH, default=dim // n_heads or 1)
    value_dim = keys.integer("attention.value_length", MAX_WIDTH, default=head_dim)
    if value_dim != head_dim:
        keys.refuse("attention.value_length", value_dim, f"{head_dim} as attention.key_length")
    rope_dim = keys.integer("rope.dimension_count", head_dim, default=head_dim)
    if rope_dim % 2:
        keys.refuse("rope.dimension_count", rope_dim, "an even number")
    if (experts := gguf.find_int(f"{architecture}.expert_count") or 0) > 0:
        keys.refuse("expert_count", experts, "0: mixtures of experts do not run in this version")
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
        rope_scaling=_rope_scaling(gguf, keys),
        tied_head="output.weight" not in gguf.tensors,
    )


def expected_tensors(h: Hyperparameters) -> dict[str, tuple[int, int]]:
    """Name -> (rows, cols) of every tensor that the architecture needs."""
    heads, kv = h.n_heads * h.head_dim, h.n_kv_heads * h.head_dim
    layer = {
        "attn_norm": (1, h.dim),
        "attn_q": (heads, h.dim),
        "attn_k": (kv, h.dim),
        "attn_v": (kv, h.dim),
        "attn_output": (h.dim, heads),
        "ffn_norm": (1, h.dim),
        "ffn_gate": (h.ffn_dim, h.dim),
        "ffn_up": (h.ffn_dim, h.dim),
        "ffn_down": (h.dim, h.ffn_dim),
    }
    shapes = {"token_embd.weight": (h.vocab_size, h.dim), "output_norm.weight": (1, h.dim)}
    if not h.tied_head:
        shapes["output.weight"] = (h.vocab_size, h.dim)
    for i in range(h.n_layers):
        shapes.update({f"blk.{i}.{name}.weight": shape for name, shape in layer.items()})
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


class _Keys:
    """Numbers under the architecture's prefix."""

    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        self._gguf = gguf
        self._prefix = architecture

    def refuse(self, key: str, found: object, expected: str) -> None:
        self._gguf.refuse(f"{self._prefix}.{key} is {found}, expected {expected}: get another conversion of the model")

    def integer(self, key: str, limit: int, default: int | None = None) -> int:
        """A count from 1 to limit; an array with one value a layer is accepted where all are equal."""
        full = f"{self._prefix}.{key}"
        if isinstance(self._gguf.metadata.get(full), GgufArray):
            found: int | None = self._same_in_all_layers(full)
        else:
            found = self._gguf.find_int(full)
        value = default if found is None else found
        if value is None:
            self._gguf.refuse(f"{full} is missing: get another conversion of the model")
        if not 1 <= value <= limit:
            self.refuse(key, value, f"1 to {limit}")
        return value

    def _same_in_all_layers(self, full: str) -> int:
        numbers = self._gguf.find_numbers(full)
        if numbers is None or not numbers.size or numbers.dtype.kind not in "iu" or not np.all(numbers == numbers[0]):
            self._gguf.refuse(f"{full} differs between layers, which this version does not run: choose another model")
        return int(numbers[0])

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number, low < value <= high."""
        full = f"{self._prefix}.{key}"
        found = self._gguf.find_float(full)
        value = default if found is None else float(found)
        if value is None:
            self._gguf.refuse(f"{full} is missing: get another conversion of the model")
        if not (math.isfinite(value) and low < value <= high):
            self.refuse(key, value, f"over {low:g}, at most {high:g}")
        return value


def _rope_scaling(gguf: GgufFile, keys: _Keys) -> RopeScaling:
    prefix = gguf.find_str("general.architecture")
    kind = gguf.find_str(f"{prefix}.rope.scaling.type")
    if kind is None and f"{prefix}.rope.scale_linear" in gguf.metadata:
        return RopeScaling("linear", keys.number("rope.scale_linear", 0.0, 1e6))
    if kind == "linear":
        return RopeScaling("linear", keys.number("rope.scaling.factor", 0.0, 1e6, default=1.0))
    if kind not in (None, "none"):
        keys.refuse("rope.scaling.type", kind, "none or linear")
    return RopeScaling()


def _vocab_size(gguf: GgufFile, keys: _Keys) -> int:
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
