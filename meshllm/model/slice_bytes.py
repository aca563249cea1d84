"""Which bytes of a model's file a slice needs, beside the head. Pure.

What a slice needs is what its program asks for, so an architecture has to say it once. Rows of a tensor lie side by
side and are taken by themselves. What is cut along its columns (attn_output, ffn_down) is taken whole: a piece of each
row would touch every chunk of the tensor anyway, and a chunk can only be verified whole.
"""

from __future__ import annotations

from meshllm.model.compiler import compile_program
from meshllm.model.gguf import GgufFile
from meshllm.model.hyperparameters import Hyperparameters
from meshllm.model.opcodes import WeightKind
from meshllm.model.slicing import Slice

SEVERAL = 2  # ranks: how many does not change what one of them needs


def slice_ranges(gguf: GgufFile, h: Hyperparameters, part: Slice) -> list[tuple[int, int]]:
    """Half-open ranges of bytes, absolute in the file. Raises SliceError if the slice is no part of the model."""
    formats = {name: tensor.format for name, tensor in gguf.tensors.items()}
    ranges: list[tuple[int, int]] = []
    for request in compile_program(h, part, SEVERAL, formats).weights:
        if request.tensor is None:
            continue
        tensor = gguf.tensors[request.tensor]
        row_bytes = tensor.size // tensor.shape[0]
        rows = (request.rows.start, request.rows.stop) if request.kind is WeightKind.PACKED else (0, tensor.shape[0])
        ranges.append((tensor.offset + rows[0] * row_bytes, tensor.offset + rows[1] * row_bytes))
    return ranges


def head_bytes(gguf: GgufFile, size: int) -> int:
    """Bytes before the first tensor: header, metadata with the vocabulary, index. size: of the whole file."""
    return min((tensor.offset for tensor in gguf.tensors.values()), default=size)
