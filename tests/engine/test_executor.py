"""The engine against the numpy reference, on small random models of odd shapes, whole and split over ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from reference.numpy_interpreter import NumpyInterpreter, Rows, run_ranks
from reference.ranks import Ranks, cut, slices
from reference.tiny_model import Shape, read_tensor, write_tiny_model

from meshllm.engine.executor import Batch, BatchStoppedError, Executor, Finished
from meshllm.engine.weights import load_weights
from meshllm.errors import KernelError, SliceError
from meshllm.kernels.binding import Kernels
from meshllm.model.compiler import compile_program, whole_slice
from meshllm.model.model_file import ModelFile
from meshllm.model.slicing import Range, Slice

EMPTY = Range(0, 0)

# Odd on purpose: head_dim != dim / n_heads, hidden units no multiple of 256 (nor of 32 where the format allows it).
SHAPES = {
    "f32": Shape(quant="F32", dim=50, ffn_dim=37, n_heads=5, n_kv_heads=5, head_dim=6, vocab_size=71),
    "f32-group-untied": Shape(quant="F32", dim=36, ffn_dim=131, n_heads=6, n_kv_heads=2, head_dim=10, tied=False),
    "f16": Shape(quant="F16", dim=72, ffn_dim=45, n_heads=4, n_kv_heads=1, head_dim=18, vocab_size=33),
    "f16-linear": Shape(quant="F16", dim=64, ffn_dim=50, linear_factor=4.0, tied=False),
    "f32-factors": Shape(quant="F32", dim=48, ffn_dim=80, head_dim=24, rope_factors=True),
    "f32-part-rope": Shape(quant="F32", dim=48, head_dim=20, rope_dim=12, linear_factor=2.0, rope_factors=True),
    "q8_0": Shape(quant="Q8_0", dim=96, ffn_dim=160, n_heads=4, n_kv_heads=2, head_dim=40, vocab_size=77),
    "q4_0": Shape(quant="Q4_0", dim=160, ffn_dim=96, n_heads=5, n_kv_heads=5, head_dim=32, tied=False),
    "q4_1": Shape(quant="Q4_1", dim=64, ffn_dim=224, n_heads=8, n_kv_heads=2, head_dim=16, vocab_size=130),
    "q5_0": Shape(quant="Q5_0", dim=96, ffn_dim=160, n_heads=3, n_kv_heads=1, head_dim=32),
    "q5_1": Shape(quant="Q5_1", dim=64, ffn_dim=96, tied=False),
    "iq4_nl": Shape(quant="IQ4_NL", dim=64, ffn_dim=128),
    "bf16": Shape(quant="BF16", dim=50, ffn_dim=37, n_heads=5, n_kv_heads=5, head_dim=6),
    "q2_k": Shape(quant="Q2_K", dim=256, ffn_dim=512, head_dim=64),
    "q3_k": Shape(quant="Q3_K", dim=256, ffn_dim=256, head_dim=64, tied=False),
    "q4_k": Shape(quant="Q4_K", dim=256, ffn_dim=512, head_dim=64),
    "q5_k": Shape(quant="Q5_K", dim=512, ffn_dim=256, head_dim=64),
    "q6_k": Shape(quant="Q6_K", dim=256, ffn_dim=768, head_dim=128),
    "q4_0-factors": Shape(quant="Q4_0", dim=64, ffn_dim=352, head_dim=24, rope_factors=True),
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 30, 31, 32, 7]


def open_tiny(folder: Path, shape: Shape) -> ModelFile:
    return ModelFile.open(write_tiny_model(folder / "tiny.gguf", shape))


def make_reference(model: ModelFile, parts: list[Slice], *, rounded: bool) -> list[NumpyInterpreter]:
    formats = {name: tensor.format for name, tensor in model.gguf.tensors.items()}
    return [
        NumpyInterpreter(
            compile_program(model.hyperparameters, part, len(parts), formats),
            lambda name: read_tensor(model, name),
            n_slots=2,
            context=64,
            rounded=rounded,
        )
        for part in parts
    ]


def rounding_tolerance(shape: Shape) -> float:
    """For two executions that round alike but add in another order: one value that rounds to the next int8 moves the
    whole row by some 1e-3, and then many more round differently; f32 activations do not have this.
    """
    return 1.5e-2 if "Q" in shape.quant else 1e-3


def relative_error(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


# As "Q4_K_M" of a model whose width is no multiple of 256: each tensor in what fits it.
MIXED = {"attn_q": "Q5_0", "attn_v": "Q8_0", "attn_output": "Q4_K", "ffn_down": "Q6_K", "token_embd": "Q8_0"}
MORE_SHAPES = {
    "mixed": Shape(quant="Q5_0", dim=96, ffn_dim=1536, head_dim=64, quants=MIXED),
    "ffn-1504": Shape(quant="Q4_0", dim=64, ffn_dim=1504),
    "ffn-14464": Shape(quant="Q4_0", dim=64, ffn_dim=14464, n_layers=1),
}


@pytest.mark.parametrize("name", MORE_SHAPES)
def test_shape_05_rows_of_other_lengths_than_256_and_formats_side_by_side(
    name: str, tmp_path: Path, kernels: Kernels
) -> None:
    check_with_reference(MORE_SHAPES[name], tmp_path, kernels)


@pytest.mark.parametrize("name", SHAPES)
def test_engine_computes_what_the_reference_computes(name: str, tmp_path: Path, kernels: Kernels) -> None:
    check_with_reference(SHAPES[name], tmp_path, kernels)


def check_with_reference(shape: Shape, folder: Path, kernels: Kernels) -> None:
    """The engine's logits are those of the reference that rounds alike, and near those of the one that does not."""
    with open_tiny(folder, shape) as model:
        whole = [whole_slice(model.hyperparameters)]
        rounded, exact = (make_reference(model, whole, rounded=rounded) for rounded in (True, False))
        ranks = Ranks.load(kernels, model, whole, n_slots=2, context=64, max_tokens=16)
        n = len(TOKENS)
        outputs = [0, 4, n - 1]
        ranks.step(TOKENS, 0, outputs)
        rows = Rows(TOKENS, range(n), [0] * n, outputs)
        right, ideal = run_ranks(rounded, rows), run_ranks(exact, rows)
        for i in range(len(outputs)):
            assert relative_error(ranks.logits(i), right[i]) < rounding_tolerance(shape)
            assert relative_error(ranks.logits(i), ideal[i]) < 3e-2  # what rounding activations costs
        ranks.close()


@pytest.mark.parametrize("name", ["f32", "f16", "q8_0", "q4_1"])
def test_decode_continues_what_prefill_began(name: str, tmp_path: Path, kernels: Kernels) -> None:
    """Any split of a sequence into steps, and any neighbours in the batch, give the same logits."""
    shape = SHAPES[name]
    with open_tiny(tmp_path, shape) as model:
        ranks = Ranks.load(kernels, model, [whole_slice(model.hyperparameters)], context=64, max_tokens=16)
        n = len(TOKENS)
        ranks.step(TOKENS, 0, [n - 1])
        right = ranks.logits(0)
        ranks.step(TOKENS[:5], 0, [], slot=1)
        for i in range(5, n - 1):
            ranks.step(TOKENS[i : i + 1], i, [0], slot=1)
        other = [8, 8, 8]
        ranks.run(Batch.of([*other, TOKENS[-1]], [0, 1, 2, n - 1], [0, 0, 0, 1], [3]))
        assert relative_error(ranks.logits(0), right) < rounding_tolerance(shape)
        ranks.close()


LAYOUTS = {
    "two": ("q4_1", [4], [96], [50]),
    "two-uneven": ("q4_1", [2], [192], [1]),
    "no-heads": ("q4_1", [8], [96], [100]),
    "no-ffn": ("q4_1", [4], [0], [64]),
    "no-vocabulary": ("q4_1", [4], [32], [130]),
    "three-shared-kv-head": ("q4_1", [2, 6], [64, 128], [40, 80]),
    "four-one-without-heads": ("q4_1", [2, 4, 8], [64, 96, 160], [30, 60, 90]),
    "odd-cuts": ("f32-group-untied", [1, 2, 5], [10, 11, 77], [0, 99, 99]),
    "heads-of-one-group": ("f16", [1, 3], [7, 20], [11, 22]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["f32", "f16", "q8_0"])
def test_ranks_together_compute_what_one_computes(
    layout: str, precision: str, tmp_path: Path, kernels: Kernels
) -> None:
    name, heads, ffn, vocab = LAYOUTS[layout]
    shape = SHAPES[name]
    if precision == "q8_0" and shape.dim % 32:
        pytest.skip("the planner chooses f16 where the width is no multiple of 32")
    with open_tiny(tmp_path, shape) as model:
        parts = slices(cut(shape.n_heads, *heads), cut(shape.ffn_dim, *ffn), cut(shape.vocab_size, *vocab))
        one = Ranks.load(kernels, model, [whole_slice(model.hyperparameters)], context=64, max_tokens=16)
        all_ = Ranks.load(kernels, model, parts, precision=precision, context=64, max_tokens=16)  # type: ignore[arg-type]
        tolerance = {"f32": 0.0, "f16": 3e-3, "q8_0": 2e-2}[precision] + rounding_tolerance(shape)
        for ranks in (one, all_):
            ranks.step(TOKENS[:7], 0, [])
            ranks.step(TOKENS[7:], 7, [0, 5])
        for row in range(2):
            assert relative_error(all_.logits(row), one.logits(row)) < tolerance
        one.close()
        all_.close()


def test_slot_copy_carries_a_prefix_to_another_slot(tmp_path: Path, kernels: Kernels) -> None:
    shape = SHAPES["f16"]
    with open_tiny(tmp_path, shape) as model:
        ranks = Ranks.load(kernels, model, [whole_slice(model.hyperparameters)], context=64, max_tokens=16)
        ranks.step(TOKENS, 0, [len(TOKENS) - 1])
        right = ranks.logits(0)
        ranks.executors[0].copy_slot(1, 0, 9)
        ranks.step(TOKENS[9:], 9, [len(TOKENS) - 10], slot=1)
        assert relative_error(ranks.logits(0), right) < rounding_tolerance(shape)
        ranks.close()


def make_executor(model: ModelFile, kernels: Kernels, part: Slice | None = None, world_size: int = 1) -> Executor:
    formats = {name: tensor.format for name, tensor in model.gguf.tensors.items()}
    program = compile_program(model.hyperparameters, part or whole_slice(model.hyperparameters), world_size, formats)
    weights = load_weights(kernels, model, program)
    return Executor(kernels, program, weights, n_slots=2, context=8, max_tokens=4, precision="f16")


def test_what_does_not_fit_is_refused_and_the_executor_lives_on(tmp_path: Path, kernels: Kernels) -> None:
    with open_tiny(tmp_path, SHAPES["f32"]) as model:
        executor = make_executor(model, kernels)
        for bad in (
            Batch.of([], [], [], []),
            Batch.of([1] * 5, range(5), [0] * 5, []),  # over max_tokens
            Batch.of([1], [8], [0], []),  # past the context
            Batch.of([1], [-1], [0], []),
            Batch.of([1], [0], [2], []),  # no such slot
            Batch.of([71], [0], [0], []),  # no such token
            Batch.of([-1], [0], [0], []),
            Batch.of([1, 1], [0, 1], [0, 0], [1, 0]),  # outputs do not grow
            Batch.of([1], [0], [0], [1]),
        ):
            with pytest.raises(KernelError):
                executor.begin(bad)
        with pytest.raises(KernelError, match="output row 0 of no finished step"):
            executor.logits(0)
        executor.begin(Batch.of([1], [0], [0], [0]))
        assert isinstance(executor.run(), Finished)
        assert np.isfinite(executor.logits(0)).all()
        executor.close()
        with pytest.raises(KernelError, match="closed"):
            executor.run()


def test_partials_of_a_wrong_length_are_refused(tmp_path: Path, kernels: Kernels) -> None:
    with open_tiny(tmp_path, SHAPES["f32"]) as model:
        h = model.hyperparameters
        part = Slice(EMPTY, Range(0, h.ffn_dim), EMPTY)
        executor = make_executor(model, kernels, part, world_size=2)
        executor.begin(Batch.of([1], [0], [0], [0]))
        exchange = executor.run()
        assert not isinstance(exchange, Finished)
        assert exchange.kind == "attention"
        assert len(exchange.partial) == 0
        assert exchange.size == 2 * h.dim
        with pytest.raises(KernelError, match=f"99 bytes, expected {exchange.size}"):
            executor.supply([bytes(99)])
        executor.supply([bytes(exchange.size)])
        exchange = executor.run()
        assert not isinstance(exchange, Finished)
        assert (exchange.index, exchange.kind, len(exchange.partial)) == (1, "ffn", exchange.size)


def test_a_rank_without_vocabulary_offers_no_candidates(tmp_path: Path, kernels: Kernels) -> None:
    with open_tiny(tmp_path, SHAPES["f32"]) as model:
        h = model.hyperparameters
        executor = make_executor(model, kernels, Slice(Range(0, h.n_heads), Range(0, h.ffn_dim), EMPTY))
        executor.begin(Batch.of([1], [0], [0], [0]))
        executor.run()
        assert executor.logits(0).shape == (0,)


def test_stop_from_another_thread_ends_the_step_and_the_next_one_runs(tmp_path: Path, kernels: Kernels) -> None:
    with open_tiny(tmp_path, SHAPES["f32"]) as model:
        executor = make_executor(model, kernels)
        executor.begin(Batch.of([1], [0], [0], [0]))
        thread = threading.Thread(target=executor.stop)
        thread.start()
        thread.join()
        with pytest.raises(BatchStoppedError):
            executor.run()
        executor.begin(Batch.of([1], [0], [0], [0]))
        assert isinstance(executor.run(), Finished)


def test_a_logits_view_outlives_its_executor(tmp_path: Path, kernels: Kernels) -> None:
    with open_tiny(tmp_path, SHAPES["f32"]) as model:
        executor = make_executor(model, kernels)
        executor.begin(Batch.of([1], [0], [0], [0]))
        executor.run()
        logits = executor.logits(0)
        before = logits.copy()
        executor.close()
        del executor
        np.testing.assert_array_equal(logits, before)


def test_a_slice_of_another_model_is_refused(tmp_path: Path) -> None:
    with open_tiny(tmp_path, SHAPES["q8_0"]) as model:
        h = model.hyperparameters
        formats = {name: tensor.format for name, tensor in model.gguf.tensors.items()}
        whole = whole_slice(h)
        for bad in (
            Slice(Range(0, h.n_heads + 1), whole.ffn, whole.vocab),
            Slice(whole.heads, Range(5, 2), whole.vocab),
            Slice(whole.heads, Range(0, 33), whole.vocab),  # cuts a block
            Slice(Range(0, 1), whole.ffn, whole.vocab),  # 40 columns cut a block
        ):
            with pytest.raises(SliceError):
                compile_program(h, bad, 2, formats)
