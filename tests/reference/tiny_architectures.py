"""Small random models of every architecture, written from the format's description: metadata and tensors by hand, so
that a test does not ask the code under test what a file holds. Weights are F32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf_files import gguf_bytes

Arrays = dict[str, npt.NDArray[np.float32]]
DIM, FFN, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 100


@dataclass(frozen=True)
class Tiny:
    """A model to write. keys: metadata after "ARCHITECTURE."; factors: tensors that divide frequencies."""

    architecture: str
    head_dim: int = 16
    n_layers: int = 2
    kv_heads: int = KV_HEADS
    tied: bool = True
    keys: dict[str, object] = field(default_factory=dict)
    factors: dict[str, tuple[float, ...]] = field(default_factory=dict)
    context: int = 512

    def metadata(self) -> dict[str, object]:
        common = {
            "block_count": self.n_layers,
            "context_length": self.context,
            "embedding_length": DIM,
            "feed_forward_length": FFN,
            "attention.head_count": HEADS,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10000.0,
        }
        named = {f"{self.architecture}.{key}": value for key, value in {**common, **self.keys}.items()}
        return {"general.architecture": self.architecture, **named}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """(rows, cols), or (n,) of a vector."""
        found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, DIM), "output_norm.weight": (DIM,)}
        if not self.tied:
            found["output.weight"] = (VOCAB, DIM)
        for i in range(self.n_layers):
            found.update({f"blk.{i}.{name}": shape for name, shape in self._layer().items()})
        return found | {name: (len(values),) for name, values in self.factors.items()}

    def _layer(self) -> dict[str, tuple[int, ...]]:
        q, kv = HEADS * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (DIM,),
            "attn_output.weight": (DIM, q),
            "ffn_norm.weight": (DIM,),
            "ffn_down.weight": (DIM, FFN),
        }
        if self.architecture == "phi3":
            return layer | {"attn_qkv.weight": (q + 2 * kv, DIM), "ffn_up.weight": (2 * FFN, DIM)}
        layer |= {"attn_q.weight": (q, DIM), "attn_k.weight": (kv, DIM), "attn_v.weight": (kv, DIM)}
        layer |= {"ffn_gate.weight": (FFN, DIM), "ffn_up.weight": (FFN, DIM)}
        if self.architecture == "qwen2":
            layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if self.architecture in ("qwen3", "gemma3"):
            layer |= {"attn_q_norm.weight": (self.head_dim,), "attn_k_norm.weight": (self.head_dim,)}
        if self.architecture == "gemma3":
            layer |= {"post_attention_norm.weight": (DIM,), "post_ffw_norm.weight": (DIM,)}
        return layer

    def arrays(self, seed: int = 0) -> Arrays:
        """Matrices that keep the size of what passes, norms about 1 and a last one that makes some tokens likely."""
        rng = np.random.default_rng(seed)
        found = {}
        for name, shape in self.shapes().items():
            if name in self.factors:
                values: npt.NDArray[Any] = np.array(self.factors[name])
            elif "norm" in name:
                values = 1 + 0.2 * rng.normal(size=shape)
            elif name.endswith("bias"):
                values = rng.normal(size=shape)
            else:
                values = rng.normal(0, shape[1] ** -0.5, shape)
            found[name] = np.float32(3 * values if name == "output_norm.weight" else values)
        return found

    def write(self, path: Path) -> Arrays:
        """The file, and what is in it."""
        arrays = self.arrays()
        tensors = [(name, values.shape[::-1], 0, values.tobytes()) for name, values in arrays.items()]
        path.write_bytes(gguf_bytes(self.metadata(), tensors))
        return arrays


_YARN: dict[str, object] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}
_LLAMA3: dict[str, object] = {
    "rope.scaling.type": "llama3",
    "rope.scaling.factor": 8.0,
    "rope.scaling.low_freq_factor": 1.0,
    "rope.scaling.high_freq_factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
_LINEAR: dict[str, object] = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
_SHORT = (1.0, 1.05, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0)
_LONGROPE: dict[str, object] = {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 64}

TINY_MODELS = {
    "llama": Tiny("llama", tied=False),
    "llama-linear": Tiny("llama", keys=_LINEAR),
    "llama-llama3": Tiny("llama", head_dim=32, keys=_LLAMA3),
    "llama-yarn": Tiny("llama", head_dim=32, keys=_YARN),
    "llama-factors": Tiny("llama", factors={"rope_freqs.weight": tuple(np.linspace(1, 8, 8))}),
    "qwen2": Tiny("qwen2", tied=False),
    "qwen2-yarn": Tiny("qwen2", head_dim=32, keys=_YARN),
    "qwen3": Tiny("qwen3", head_dim=32),
    "gemma3": Tiny("gemma3", head_dim=32, n_layers=7, kv_heads=1, keys={"attention.sliding_window": 8}),
    "gemma3-linear-capped": Tiny(
        "gemma3",
        head_dim=32,
        n_layers=6,
        keys={
            **_LINEAR,
            "attention.sliding_window": 5,
            "rope.freq_base": 1e6,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3-capped-scores": Tiny(
        "gemma3", n_layers=2, keys={"attention.sliding_window": 5, "attn_logit_softcapping": 2.0}
    ),
    "smollm3": Tiny("smollm3", n_layers=5),
    "phi3": Tiny("phi3", tied=False, keys={"attention.sliding_window": 9}),
    "phi3-longrope": Tiny(
        "phi3",
        keys=_LONGROPE,
        factors={"rope_factors_short.weight": _SHORT, "rope_factors_long.weight": tuple(9 * f for f in _SHORT)},
    ),
    "phi3-partly-turned": Tiny("phi3", keys={"rope.dimension_count": 12}),
    "granite": Tiny(
        "granite",
        keys={"attention.scale": 0.1, "embedding_scale": 6.0, "residual_scale": 0.4, "logit_scale": 2.0},
    ),
}
