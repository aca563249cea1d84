"""What an architecture writes a program with: one method an idea ("project x by this tensor"), which places buffers,
asks for the cut of the weight that this rank holds, quantizes an input once for all products that need it, and ends a
sum over ranks in an EXCHANGE.

Pure. One builder makes one program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshllm.errors import SliceError
from meshllm.model.formats import Format
from meshllm.model.opcodes import (
    BLOCK,
    Buffer,
    BufferKind,
    CacheShape,
    ExchangeKind,
    Op,
    Opcode,
    Program,
    WeightKind,
    WeightRequest,
)
from meshllm.model.slicing import Range


class ProgramBuilder:
    """Collects ops. formats: of the file's tensors by name. world_size: ranks that share the model; 1 needs no
    exchange.
    """

    def __init__(self, formats: Mapping[str, Format], world_size: int) -> None:
        self._formats = formats
        self._world_size = world_size
        self._ops: list[Op] = []
        self._buffers: list[Buffer] = []
        self._weights: list[WeightRequest] = []
        self._weight_index: dict[WeightRequest, int] = {}
        self._quantized: dict[int, int] = {}  # f32 buffer -> q8 buffer that holds its present value
        self._exchanges: list[ExchangeKind] = []

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor of that name."""
        return name in self._formats

    def buffer(self, name: str, width: int) -> int:
        """A new f32 buffer."""
        return self._new_buffer(name, BufferKind.F32, width)

    def embed(self, out: int, tensor: str, n_rows: int) -> None:
        """out[t] = row token[t] of the whole table."""
        cut = (Range(0, n_rows), Range(0, self._buffers[out].width))
        self._emit(Op(Opcode.EMBED, out=out, weight=self._weight(WeightKind.TABLE, tensor, *cut)))

    def norm(self, out: int, in_: int, tensor: str, eps: float, width: int | None = None) -> None:
        """out = RMS norm of in_ times the tensor, over groups of `width` values; None: over all of them."""
        width = width or self._buffers[in_].width
        weight = self._weight(WeightKind.VECTOR, tensor, Range(0, 1), Range(0, width))
        self._emit(Op(Opcode.RMSNORM, out=out, in_=in_, weight=weight, a=width, f0=eps))

    def project(self, out: int, in_: int, tensor: str, rows: Range, cols: Range) -> None:
        """out = in_ times the cut of a matrix [rows, cols]. Raises SliceError if cols cut a block of its format."""
        format_ = self._formats[tensor]
        if format_.block_values > 1:
            if cols.start % BLOCK or len(cols) % BLOCK:
                raise SliceError(
                    f"columns {cols.start} to {cols.stop} of {tensor} ({format_.name}) cut a block of {BLOCK}: "
                    f"choose cuts at multiples of {BLOCK}"
                )
            in_ = self._quantize(in_)
        self._emit(Op(Opcode.MATMUL, out=out, in_=in_, weight=self._weight(WeightKind.PACKED, tensor, rows, cols)))

    def bias(self, out: int, tensor: str, values: Range) -> None:
        """out += these values of a tensor."""
        weight = self._weight(WeightKind.VECTOR, tensor, Range(0, 1), values)
        self._emit(Op(Opcode.BIAS, out=out, weight=weight))

    def vector(self, values: Sequence[float], divisor: str | None) -> int:
        """A weight of given values, divided by a tensor's if one is named."""
        format_ = Format.F32 if divisor is None else self._formats[divisor]
        cut = (Range(0, 1), Range(0, len(values)))
        return self._request(WeightRequest(WeightKind.VECTOR, divisor, format_, *cut, values=tuple(values)))

    def rope(self, x: int, frequencies: int, n_heads: int, head_dim: int, *, neox: bool, factor: float = 1.0) -> None:
        """Rotates each head of x by its position."""
        self._emit(Op(Opcode.ROPE, out=x, weight=frequencies, a=n_heads, b=head_dim, c=int(neox), f0=factor))

    def append(self, k: int, v: int, layer: int) -> None:
        """Appends k and v to the cache of a layer."""
        self._emit(Op(Opcode.KV_APPEND, in_=k, in2=v, a=layer))

    def attend(
        self, out: int, q: int, *, layer: int, first_head: int, scale: float, soft_cap: float = 0.0, window: int = 0
    ) -> None:
        """out = attention of q. first_head: of q, counted from the first KV head's group. window: the last so many
        tokens, 0 for all.
        """
        self._emit(Op(Opcode.ATTENTION, out=out, in_=q, a=layer, b=first_head, c=window, f0=scale, f1=soft_cap))

    def gate(self, out: int, gate: int, up: int, *, gelu: bool = False) -> None:
        """out = activation(gate) * up."""
        self._emit(Op(Opcode.GATE, out=out, in_=gate, in2=up, a=int(gelu)))

    def add_over_ranks(self, out: int, partial: int | None, kind: ExchangeKind) -> None:
        """out += the sum of all ranks' partials; None: this rank adds nothing."""
        if self._world_size > 1:
            self._exchanges.append(kind)
            self._emit(Op(Opcode.EXCHANGE, out=out, in_=partial))
        elif partial is not None:
            self._emit(Op(Opcode.ADD, out=out, in_=partial))

    def sum_over_ranks(self, sum_: int, partial: int | None, kind: ExchangeKind) -> int:
        """The buffer that holds the sum of all ranks' partials: sum_, or on one rank the partial itself."""
        if self._world_size == 1:
            return sum_ if partial is None else partial
        self._exchanges.append(kind)
        self._emit(Op(Opcode.EXCHANGE, out=sum_, in_=partial, a=1))
        return sum_

    def add(self, out: int, in_: int) -> None:
        """out += in_."""
        self._emit(Op(Opcode.ADD, out=out, in_=in_))

    def scale(self, out: int, factor: float, soft_cap: float = 0.0) -> None:
        """out *= factor, then c tanh(out / c) for a soft cap c over 0; nothing is emitted where neither changes it."""
        if factor != 1.0 or soft_cap:
            self._emit(Op(Opcode.SCALE, out=out, f0=factor, f1=soft_cap))

    def select(self, x: int) -> None:
        """x = its rows that are outputs of the batch; only these from here on."""
        self._emit(Op(Opcode.SELECT, out=x, in_=x))

    def finish(self, cache: CacheShape, residual: int, logits: int | None, vocab: Range) -> Program:
        """The program."""
        return Program(
            ops=tuple(self._ops),
            buffers=tuple(self._buffers),
            weights=tuple(self._weights),
            cache=cache,
            exchanges=tuple(self._exchanges),
            residual=residual,
            logits=logits,
            vocab=vocab,
        )

    def _quantize(self, in_: int) -> int:
        if (known := self._quantized.get(in_)) is not None:
            return known
        source = self._buffers[in_]
        name = f"{source.name}.q8"
        same = (i for i, buffer in enumerate(self._buffers) if buffer.name == name)
        out = next(same, None)
        if out is None:
            out = self._new_buffer(name, BufferKind.Q8, source.width)
        self._emit(Op(Opcode.QUANTIZE, out=out, in_=in_))
        self._quantized[in_] = out
        return out

    def _emit(self, op: Op) -> None:
        self._ops.append(op)
        if op.out is not None:
            self._quantized.pop(op.out, None)

    def _new_buffer(self, name: str, kind: BufferKind, width: int) -> int:
        self._buffers.append(Buffer(name, kind, width))
        return len(self._buffers) - 1

    def _weight(self, kind: WeightKind, tensor: str, rows: Range, cols: Range) -> int:
        return self._request(WeightRequest(kind, tensor, self._formats[tensor], rows, cols))

    def _request(self, request: WeightRequest) -> int:
        index = self._weight_index.setdefault(request, len(self._weights))
        if index == len(self._weights):
            self._weights.append(request)
        return index
