"""What a program looks like: a whole one as text, and what slices leave out."""

from __future__ import annotations

from meshllm.model.compiler import compile_program, whole_slice
from meshllm.model.formats import Format
from meshllm.model.hyperparameters import Hyperparameters, RopeScaling, expected_tensors
from meshllm.model.opcodes import Opcode
from meshllm.model.slicing import Range, Slice

H = Hyperparameters(
    architecture="llama", dim=64, ffn_dim=96, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=100,
    context_length=128, rms_eps=1e-5, rope_theta=10000.0, rope_dim=32, rope_scaling=RopeScaling(), tied_head=True,
)  # fmt: skip
FORMATS = {
    name: Format.F32 if "norm" in name else Format.F16 if "attn_q" in name else Format.Q4_0
    for name in expected_tensors(H)
}

# A rank that shares KV head 0 with another: query heads 1 to 3, whose first is the second of its group.
SECOND_OF_TWO = """\
buffer x: f32[64]
buffer normed: f32[64]
buffer partial: f32[64]
buffer q: f32[96]
buffer k: f32[64]
buffer v: f32[64]
buffer attention: f32[96]
buffer gate: f32[64]
buffer up: f32[64]
buffer normed.q8: q8[64]
buffer attention.q8: q8[96]
buffer gate.q8: q8[64]
buffer logits: f32[60]
weight 0: 16 values
weight 1: token_embd.weight[0:100, 0:64] Q4_0
weight 2: blk.0.attn_norm.weight F32
weight 3: blk.0.attn_q.weight[32:128, 0:64] F16
weight 4: blk.0.attn_k.weight[0:64, 0:64] Q4_0
weight 5: blk.0.attn_v.weight[0:64, 0:64] Q4_0
weight 6: blk.0.attn_output.weight[0:64, 32:128] Q4_0
weight 7: blk.0.ffn_norm.weight F32
weight 8: blk.0.ffn_gate.weight[32:96, 0:64] Q4_0
weight 9: blk.0.ffn_up.weight[32:96, 0:64] Q4_0
weight 10: blk.0.ffn_down.weight[0:64, 32:96] Q4_0
weight 11: output_norm.weight F32
weight 12: token_embd.weight[40:100, 0:64] Q4_0
cache: 1 layers, 2 kv heads of 32, 2 query heads each
   0 EMBED x <- w1
   1 RMSNORM normed <- x w2 a=64 f0=1e-05
   2 MATMUL q <- normed w3
   3 QUANTIZE normed.q8 <- normed
   4 MATMUL k <- normed.q8 w4
   5 MATMUL v <- normed.q8 w5
   6 ROPE q <- w0 a=3 b=32 f0=1
   7 ROPE k <- w0 a=2 b=32 f0=1
   8 KV_APPEND k v
   9 ATTENTION attention <- q b=1 f0=0.176777
  10 QUANTIZE attention.q8 <- attention
  11 MATMUL partial <- attention.q8 w6
  12 EXCHANGE x <- partial
  13 RMSNORM normed <- x w7 a=64 f0=1e-05
  14 QUANTIZE normed.q8 <- normed
  15 MATMUL gate <- normed.q8 w8
  16 MATMUL up <- normed.q8 w9
  17 GATE gate <- gate up
  18 QUANTIZE gate.q8 <- gate
  19 MATMUL partial <- gate.q8 w10
  20 EXCHANGE x <- partial
  21 SELECT x <- x
  22 RMSNORM normed <- x w11 a=64 f0=1e-05
  23 QUANTIZE normed.q8 <- normed
  24 MATMUL logits <- normed.q8 w12
"""


def test_a_program_reads_as_its_text() -> None:
    part = Slice(Range(1, 4), Range(32, 96), Range(40, 100))
    assert compile_program(H, part, 2, FORMATS).disassemble() == SECOND_OF_TWO


def test_one_rank_exchanges_nothing() -> None:
    program = compile_program(H, whole_slice(H), 1, FORMATS)
    assert program.exchanges == ()
    assert Opcode.EXCHANGE not in {op.opcode for op in program.ops}


def test_every_rank_stops_at_the_same_exchanges_whatever_it_holds() -> None:
    empty = Range(2, 2)
    for part in (Slice(empty, empty, empty), Slice(Range(0, 1), empty, empty), Slice(empty, Range(0, 32), Range(0, 1))):
        program = compile_program(H, part, 3, FORMATS)
        assert program.exchanges == ("attention", "ffn")
        stops = [op for op in program.ops if op.opcode is Opcode.EXCHANGE]
        assert [op.in_ is not None for op in stops] == [bool(part.heads), bool(part.ffn)]
        assert (program.logits is None) == (not part.vocab)
        assert program.cache.n_layers == (H.n_layers if part.heads else 0)
