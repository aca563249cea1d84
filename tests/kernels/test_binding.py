"""The border to C: numbers that both sides share, wrong arguments, and who keeps what alive."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from meshllm._native import ffi, lib

from meshllm.errors import ConfigError, KernelError
from meshllm.kernels import binding
from meshllm.kernels.binding import Kernels, NativeProgram, NativeWeight, Precision, RunStatus, list_isas
from meshllm.kernels.memory import allocate_weights
from meshllm.model import opcodes
from meshllm.model.formats import RUNNABLE_FORMATS, Format
from meshllm.model.opcodes import BufferKind, Op, Opcode, WeightKind, encode_ops

F32, VECTOR, PACKED, TABLE = Format.F32, WeightKind.VECTOR, WeightKind.PACKED, WeightKind.TABLE


def test_numbers_are_those_of_the_header() -> None:
    header = {name: getattr(lib, name) for name in dir(lib) if name.startswith("MESHLLM_")}
    ours = {f"MESHLLM_OP_{op.name}": op.value for op in Opcode}
    ours |= {f"MESHLLM_BUFFER_{kind.name}": kind.value for kind in BufferKind}
    ours |= {f"MESHLLM_WEIGHT_{kind.name}": kind.value for kind in WeightKind}
    ours |= {f"MESHLLM_PARTIAL_{kind.name}": kind.value for kind in Precision}
    assert {name: header[name] for name in ours} == ours
    assert sorted(n for n in header if n.startswith("MESHLLM_OP_")) == sorted(n for n in ours if "_OP_" in n)
    assert all(header[f"MESHLLM_{format_.name}"] == format_ for format_ in RUNNABLE_FORMATS)
    assert header["MESHLLM_BLOCK"] == opcodes.BLOCK
    assert header["MESHLLM_NONE"] == opcodes.NONE


def test_an_op_is_encoded_as_the_struct_is_laid_out() -> None:
    op = Op(Opcode.ATTENTION, out=1, in_=2, in2=3, weight=4, a=5, b=6, c=7, f0=0.5, f1=0.25)
    data = encode_ops([op, Op(Opcode.ADD, out=9)])
    found = ffi.from_buffer("struct meshllm_op[]", data)
    assert len(found) == 2
    first = found[0]
    assert [first.opcode, first.out, getattr(first, "in"), first.in2, first.weight] == [7, 1, 2, 3, 4]
    assert [first.a, first.b, first.c, first.f0, first.f1] == [5, 6, 7, 0.5, 0.25]
    assert [found[1].out, found[1].weight, found[1].a] == [9, binding.NONE, 0]


def test_an_instruction_set_that_cannot_run_is_an_error_that_lists_those_that_can() -> None:
    names = [name for name, runs in list_isas() if runs]
    assert "scalar" in names
    with pytest.raises(ConfigError, match=r"instruction set 'z80' cannot run here; these can: .*scalar"):
        Kernels("z80")
    for name in names:
        assert Kernels(name, 1).isa == name
    with pytest.raises(KernelError, match="at least one"):
        Kernels("", 0)


def make_program(ops: list[Op], weights: list[NativeWeight]) -> NativeProgram:
    return NativeProgram(
        Kernels("", 1), encode_ops(ops), [(0, 8), (0, 8)], weights, (0, 0, 0, 0, 0, 0),
        max_tokens=4, precision=Precision.F32,
    )  # fmt: skip


def test_a_refused_program_names_the_op_and_the_reason() -> None:
    with pytest.raises(KernelError, match="op 1 refused: no such buffer"):
        make_program([Op(Opcode.ADD, out=0, in_=1), Op(Opcode.ADD, out=0, in_=2)], [])
    small = NativeWeight(TABLE, F32, 3, 8, bytes(90))
    with pytest.raises(KernelError, match="program refused: a weight with fewer bytes"):
        make_program([], [small])


def test_a_program_keeps_its_weights_alive_and_a_view_its_program() -> None:
    table = np.arange(24, dtype=np.float32).reshape(3, 8)
    program = make_program(
        [Op(Opcode.EMBED, out=0, weight=0), Op(Opcode.ADD, out=1, in_=0)],
        [NativeWeight(TABLE, F32, 3, 8, table.copy())],
    )
    gc.collect()
    int32 = [np.array(part, np.int32) for part in ([2, 0], [0, 0], [0, 0], [0])]
    program.begin(*int32)
    assert program.run() is RunStatus.FINISHED
    view = program.buffer(1)
    del program
    gc.collect()
    np.testing.assert_array_equal(view[:2], table[[2, 0]])


def test_wrong_arguments_are_refused_before_c_sees_them() -> None:
    kernels = Kernels("", 1)
    with pytest.raises(KernelError):
        kernels.packed_size(Format.Q4_0, 8, 33)
    with pytest.raises(KernelError):
        kernels.packed_size(Format.IQ2_XS, 8, 256)
    size = kernels.packed_size(F32, 8, 8)
    place = allocate_weights(size + 64)
    tensor = np.zeros((8, 8), np.float32)
    for out, rows, cols, data in (
        (place[:size], (0, 8), (0, 8), tensor[:7]),  # too short a file
        (place[: size - 1], (0, 8), (0, 8), tensor),
        (place[1 : size + 1], (0, 8), (0, 8), tensor),
        (place[:size], (1, 9), (0, 8), tensor),
        (place[:size], (0, 8), (1, 9), tensor),
    ):
        with pytest.raises(KernelError):
            kernels.pack(out, F32, rows, cols, 8, np.ascontiguousarray(data))
    with pytest.raises(KernelError):
        kernels.matmul(NativeWeight(PACKED, F32, 8, 8, place[:size]), np.zeros((1, 9), np.float32))
    with pytest.raises(KernelError):
        binding.top_k(np.zeros(4), 2)  # float64
