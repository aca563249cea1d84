"""Packs the weights of one program out of a mapped file: one tensor after the other, straight into place.

What is resident afterwards is the slice; pages of the file that packing touched are given back. The embedding table is
not packed: it stays in the map, where one row a token is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshllm.errors import ModelFileError
from meshllm.kernels.binding import Float32, Kernels, NativeWeight, dequantize_row
from meshllm.kernels.memory import ALIGNMENT, Bytes, allocate_weights
from meshllm.model.formats import Format
from meshllm.model.model_file import ModelFile
from meshllm.model.opcodes import Program, WeightKind, WeightRequest

READ_AHEAD: Final = 4  # weights on their way from disk while one is packed: 834 MB in 1.2 to 3 s instead of 4.3


@dataclass(frozen=True, slots=True)
class Weights:
    """In the order of the program's requests. packed_bytes: what they take beside the map of the file."""

    native: tuple[NativeWeight, ...]
    packed_bytes: int
    model_file: ModelFile
    tables: tuple[str, ...]  # tensors that stay in the map

    def forget_tables(self) -> None:
        """Rows that were read need not stay in this process's memory; the system's file cache keeps them."""
        for name in self.tables:
            self.model_file.drop_pages(name)


def load_weights(kernels: Kernels, model_file: ModelFile, program: Program) -> Weights:
    """Packs all weights that the program asks for. The file must stay as it is while the result is used.

    Raises ModelFileError where a tensor is missing or in a format without kernels, KernelError without memory.
    """
    sizes = [_packed_size(kernels, request) for request in program.weights]
    arena = allocate_weights(sum(sizes))
    native, start = [], 0
    _announce(model_file, program.weights[:READ_AHEAD])
    for i, (request, size) in enumerate(zip(program.weights, sizes, strict=True)):
        _announce(model_file, program.weights[i + READ_AHEAD : i + READ_AHEAD + 1])
        native.append(_load(kernels, model_file, request, arena[start : start + size]))
        start += size
    tables = tuple(_name_of(request) for request in program.weights if request.kind is WeightKind.TABLE)
    return Weights(tuple(native), start, model_file, tables)


def _announce(model_file: ModelFile, requests: Sequence[WeightRequest]) -> None:
    for request in requests:
        if request.kind is WeightKind.PACKED and request.rows and _name_of(request) in model_file.gguf.tensors:
            model_file.will_need(_name_of(request), slice(request.rows.start, request.rows.stop))


def _packed_size(kernels: Kernels, request: WeightRequest) -> int:
    n_rows, n_cols = len(request.rows), len(request.cols)
    match request.kind:
        case WeightKind.TABLE:
            return 0
        case WeightKind.VECTOR:
            size = 4 * n_cols
        case WeightKind.PACKED:
            size = kernels.packed_size(request.format, n_rows, n_cols)
    return -(-size // ALIGNMENT) * ALIGNMENT


def _load(kernels: Kernels, model_file: ModelFile, request: WeightRequest, place: Bytes) -> NativeWeight:
    n_rows, n_cols = len(request.rows), len(request.cols)
    match request.kind:
        case WeightKind.TABLE:
            data = model_file.tensor(_name_of(request))
            return NativeWeight(request.kind, request.format, n_rows, n_cols, data)
        case WeightKind.VECTOR:
            vector = place.view(np.float32)[:n_cols]
            vector[:] = _read_vector(model_file, request)
            return NativeWeight(request.kind, Format.F32, 1, n_cols, vector)
        case WeightKind.PACKED:
            name = _name_of(request)
            file_cols = model_file.gguf.tensors[name].shape[1]
            rows, cols = (request.rows.start, request.rows.stop), (request.cols.start, request.cols.stop)
            place = place[: kernels.packed_size(request.format, n_rows, n_cols)]
            kernels.pack(place, request.format, rows, cols, file_cols, model_file.tensor(name))
            model_file.drop_pages(name)
            return NativeWeight(request.kind, request.format, n_rows, n_cols, place)


def _read_vector(model_file: ModelFile, request: WeightRequest) -> Float32:
    values = np.array(request.values, np.float64)
    if request.tensor is None:
        return values.astype(np.float32)
    stored = dequantize_row(request.format, model_file.tensor(request.tensor), request.cols.stop)[request.cols.start :]
    if not request.values:
        return stored
    if not np.all(np.isfinite(stored) & (stored > 0)):
        raise ModelFileError(f"{model_file.name}: tensor {request.tensor} holds a factor not over 0: get it again")
    return (values / stored).astype(np.float32)


def _name_of(request: WeightRequest) -> str:
    assert request.tensor is not None  # only vectors are made of values alone
    return request.tensor
