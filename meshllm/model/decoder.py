"""What a decoder-only transformer is in numbers: all that compiling a program needs to know but the weights. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshllm.model.rope import RopeScaling

MAX_LAYERS: Final = 1024


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Numbers of a model. Widths in values, context in tokens."""

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
    attention_scale: float | None = None  # of q . k; None: 1 / sqrt(head_dim)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer's halves add
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0  # c: logits become c tanh(logit / c); 0: they stay
    attention_soft_cap: float = 0.0  # the same of scores
    window: int = 0  # tokens that a layer with a window attends to, the last among them; 0: no layer has one
    window_period: int = 0  # each so many-th layer has no window
    local_rope_theta: float | None = None  # of layers with a window; they are not stretched

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.n_heads // self.n_kv_heads
