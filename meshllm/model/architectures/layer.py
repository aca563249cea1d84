"""What the layers of all architectures are made of: a verb for each step of attention and of the feed-forward, which
emits the ops for this rank's slice. Kernels know no architecture, and neither does anything here. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from meshllm.model.decoder import Hyperparameters
from meshllm.model.metadata_keys import Keys
from meshllm.model.opcodes import ExchangeKind
from meshllm.model.program_builder import ProgramBuilder
from meshllm.model.slicing import Range, Slice

Shapes: TypeAlias = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """[heads x head_dim] of the slice."""

    q: int
    k: int
    v: int
    out: int
    frequencies: int  # a weight
    local_frequencies: int  # of layers with a window


@dataclass(frozen=True, slots=True)
class HiddenBuffers:
    """[hidden units of the slice]."""

    gate: int
    up: int


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    """f32 buffers that all layers use. None where the slice has none of it."""

    x: int  # residual stream [dim], the same on all ranks
    normed: int  # [dim]
    partial: int  # [dim]: this rank's part of a sum over ranks
    attention: AttentionBuffers | None
    hidden: HiddenBuffers | None


@dataclass(frozen=True, slots=True)
class Layer:
    """Writes one layer. Verbs on attention and feed-forward do nothing where the slice has none of it."""

    b: ProgramBuilder
    h: Hyperparameters
    part: Slice
    buffers: LayerBuffers
    index: int

    @property
    def window(self) -> int:
        """Tokens that this layer attends to; 0 for all."""
        period = self.h.window_period
        return 0 if period and (self.index + 1) % period == 0 else self.h.window

    def project_heads(self) -> None:
        """q, k, v = their projections of norm(x)."""
        if own := self.buffers.attention:
            self._norm("attn_norm.weight")
            for out, tensor, rows in zip((own.q, own.k, own.v), _QKV, self._head_rows(), strict=True):
                self._project(out, f"{tensor}.weight", rows)

    def project_fused_heads(self) -> None:
        """The same from one tensor that holds the rows of q, of k and of v, one after the other."""
        if own := self.buffers.attention:
            self._norm("attn_norm.weight")
            n_q, n_kv = self.h.n_heads * self.h.head_dim, self.h.n_kv_heads * self.h.head_dim
            for out, rows, first in zip((own.q, own.k, own.v), self._head_rows(), (0, n_q, n_q + n_kv), strict=True):
                self._project(out, "attn_qkv.weight", _moved(rows, first))

    def add_head_biases(self) -> None:
        """q, k, v += their biases."""
        if own := self.buffers.attention:
            for out, tensor, rows in zip((own.q, own.k, own.v), _QKV, self._head_rows(), strict=True):
                self.b.bias(out, self._name(f"{tensor}.bias"), rows)

    def norm_heads(self) -> None:
        """Each head of q and of k = its norm."""
        if own := self.buffers.attention:
            for x, tensor in ((own.q, "attn_q_norm.weight"), (own.k, "attn_k_norm.weight")):
                self.b.norm(x, x, self._name(tensor), self.h.rms_eps, self.h.head_dim)

    def rotate(self, *, neox: bool) -> None:
        """q and k turned by their positions, in pairs (i, i + half) or (2i, 2i + 1)."""
        if own := self.buffers.attention:
            local = self.window and self.h.local_rope_theta is not None
            frequencies = own.local_frequencies if local else own.frequencies
            factor = 1.0 if local else self.h.rope_scaling.attention_factor
            for x, heads in ((own.q, self.part.heads), (own.k, self._kv_heads())):
                self.b.rope(x, frequencies, len(heads), self.h.head_dim, neox=neox, factor=factor)

    def attend(self) -> None:
        """partial = output projection of what q attends to, after k and v joined the cache."""
        if own := self.buffers.attention:
            h = self.h
            self.b.append(own.k, own.v, self.index)
            self.b.attend(
                own.out,
                own.q,
                layer=self.index,
                first_head=self.part.heads.start - self._kv_heads().start * h.group,
                scale=h.head_dim**-0.5 if h.attention_scale is None else h.attention_scale,
                soft_cap=h.attention_soft_cap,
                window=self.window,
            )
            columns = _values_of(self.part.heads, h.head_dim)
            self.b.project(self.buffers.partial, own.out, self._name("attn_output.weight"), Range(0, h.dim), columns)

    def add_attention(self, post_norm: str | None = None) -> None:
        """x += the ranks' partials, scaled, or normed as a sum."""
        self._add(self.buffers.attention is not None, "attention", post_norm)

    def project_hidden(self, *, fused: bool = False) -> None:
        """gate, up = their projections of norm(x). fused: from one tensor, the rows of gate first."""
        if own := self.buffers.hidden:
            self._norm("ffn_norm.weight")
            names = ("ffn_up.weight", "ffn_up.weight") if fused else ("ffn_gate.weight", "ffn_up.weight")
            self._project(own.gate, names[0], self.part.ffn)
            self._project(own.up, names[1], _moved(self.part.ffn, self.h.ffn_dim if fused else 0))

    def contract(self, *, gelu: bool = False) -> None:
        """partial = down projection of activation(gate) * up."""
        if own := self.buffers.hidden:
            self.b.gate(own.gate, own.gate, own.up, gelu=gelu)
            whole = Range(0, self.h.dim)
            self.b.project(self.buffers.partial, own.gate, self._name("ffn_down.weight"), whole, self.part.ffn)

    def add_hidden(self, post_norm: str | None = None) -> None:
        """x += the ranks' partials, scaled, or normed as a sum."""
        self._add(self.buffers.hidden is not None, "ffn", post_norm)

    def _norm(self, tensor: str) -> None:
        self.b.norm(self.buffers.normed, self.buffers.x, self._name(tensor), self.h.rms_eps)

    def _add(self, adds: bool, kind: ExchangeKind, post_norm: str | None) -> None:
        x, normed, partial = self.buffers.x, self.buffers.normed, self.buffers.partial
        if post_norm is None:
            if adds:
                self.b.scale(partial, self.h.residual_scale)
            self.b.add_over_ranks(x, partial if adds else None, kind)
            return
        sum_ = self.b.sum_over_ranks(normed, partial if adds else None, kind)
        self.b.norm(normed, sum_, self._name(post_norm), self.h.rms_eps)
        self.b.add(x, normed)

    def _project(self, out: int, tensor: str, rows: Range) -> None:
        self.b.project(out, self.buffers.normed, self._name(tensor), rows, Range(0, self.h.dim))

    def _kv_heads(self) -> Range:
        return self.part.kv_heads(self.h.group)

    def _head_rows(self) -> tuple[Range, Range, Range]:
        kv = _values_of(self._kv_heads(), self.h.head_dim)
        return _values_of(self.part.heads, self.h.head_dim), kv, kv

    def _name(self, tensor: str) -> str:
        return f"blk.{self.index}.{tensor}"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of models. refine: numbers that only it has, from metadata. layer_tensors: what a layer must have, by
    name after "blk.N.". write_layer: its ops.
    """

    refine: Callable[[Hyperparameters, Keys], Hyperparameters]
    layer_tensors: Callable[[Hyperparameters], Shapes]
    write_layer: Callable[[Layer], None]


_QKV = ("attn_q", "attn_k", "attn_v")


def _values_of(heads: Range, head_dim: int) -> Range:
    return Range(heads.start * head_dim, heads.stop * head_dim)


def _moved(rows: Range, by: int) -> Range:
    return Range(rows.start + by, rows.stop + by)
