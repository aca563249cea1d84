"""Anything from a file, a stranger or a client is refused in our own words, or taken; nothing else may happen.

Inputs are whole, valid ones with a few bytes changed, so that faults lie deep and not in the first field. More of them:
MESHLLM_FUZZ=20000 pytest tests/fuzz
"""

from __future__ import annotations

import json
import math
import os

import numpy as np
from gguf_files import TINY, gguf_bytes, tiny_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.tiny_architectures import TINY_MODELS

from meshllm.api.body import decode_body
from meshllm.api.openai import ChatRequest, CompletionRequest
from meshllm.errors import InvalidRequestError, ModelFileError, RemoteProtocolError
from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.framing import FrameDecoder, decode_data, encode_body, encode_frame
from meshllm.mesh.messages import Candidates, Hello, Step, StepEntry
from meshllm.model.compiler import compile_program, whole_slice
from meshllm.model.formats import Format
from meshllm.model.gguf import open_gguf
from meshllm.model.hyperparameters import check_tensors, read_hyperparameters
from meshllm.model.opcodes import encode_ops
from meshllm.model.tokenizer import Tokenizer
from meshllm.parameters import SamplingParameters

fuzz = settings(max_examples=int(os.environ.get("MESHLLM_FUZZ", "300")), deadline=None)

NODE = NodeId("0" * 16)
DEVICE = Device(node=NODE, read_gbps=10.0, matmul_gops=50.0, usable_bytes=1 << 30)
HELLO = encode_frame(
    Hello(
        major=1, minor=0, build="0.1.0", node=NODE, incarnation=7, name="kitchen", port=6374, device=DEVICE,
        model=None, model_name=None, threads=2, isa="avx2",
    )
)  # fmt: skip
ENTRY = StepEntry(slot=0, position=5, tokens=(1, 2, 3), sampling=SamplingParameters(seed=7), prompt_tokens=8)
DATA = (
    encode_body(Step(step=3, entries=(ENTRY,), copies=((0, 1, 4),))),
    encode_body(Candidates(step=3, data=(bytes(40),))),
)
FILE = gguf_bytes(TINY, tiny_tensors())
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5, "stop": ["a"], "stream": True, "seed": 7}


@st.composite
def changed(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with a few bytes replaced, cut out or put in, and maybe its end cut off."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(content)))
        content[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content)


@fuzz
@given(changed(FILE))
def test_any_file_is_read_or_refused(content: bytes) -> None:
    try:
        gguf = open_gguf(memoryview(content), "fuzz.gguf")
        read_hyperparameters(gguf)
        Tokenizer.from_gguf(gguf).encode("ab </s>", parse_special=True)
    except ModelFileError as error:
        words = str(error)
    else:
        return
    assert words.startswith("fuzz.gguf")
    assert "\n" not in words


NUMBERS = st.integers(0, 2**32 - 1) | st.floats(width=32) | st.sampled_from([0, 1, 2, 64, -0.0, 1e-30, 1e30, "yarn"])
KEYS = (
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base", "rope.freq_base_swa",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.type",
    "rope.scaling.low_freq_factor", "rope.scaling.yarn_beta_fast", "attention.scale", "embedding_scale", "logit_scale",
    "residual_scale", "final_logit_softcapping", "attn_logit_softcapping", "rope.dimension_count",
)  # fmt: skip


@fuzz
@given(st.sampled_from(sorted(TINY_MODELS)), st.dictionaries(st.sampled_from(KEYS), NUMBERS, max_size=4))
def test_any_numbers_of_any_architecture_make_a_program_or_are_refused(name: str, numbers: dict[str, object]) -> None:
    tiny = TINY_MODELS[name]
    metadata = tiny.metadata() | {f"{tiny.architecture}.{key}": value for key, value in numbers.items()}
    tensors = [(n, shape[::-1], 0, bytes(4 * math.prod(shape))) for n, shape in tiny.shapes().items()]
    try:
        gguf = open_gguf(memoryview(gguf_bytes(metadata, tensors)), "fuzz.gguf")
        h = read_hyperparameters(gguf)
        check_tensors(gguf, h)
    except ModelFileError as error:
        words = str(error)
    else:
        words = ""
    assert "\n" not in words
    if words:
        return
    program = compile_program(h, whole_slice(h), 1, dict.fromkeys(gguf.tensors, Format.F32))
    encode_ops(program.ops)
    assert np.all(np.isfinite(np.float32([value for request in program.weights for value in request.values])))


@fuzz
@given(changed(HELLO), st.integers(1, 50))
def test_any_bytes_on_a_link_are_messages_or_end_it(content: bytes, size: int) -> None:
    def read(parts: list[bytes]) -> tuple[list[object], bool]:
        decoder, got = FrameDecoder(), []
        try:
            for part in parts:
                got += decoder.feed(part)
        except RemoteProtocolError:
            return got, True
        return got, False

    pieces = [content[i : i + size] for i in range(0, len(content), size)]
    whole, broken = read([content])
    assert read(pieces)[1] == broken
    assert broken or read(pieces)[0] == whole


@fuzz
@given(st.sampled_from(DATA).flatmap(changed))
def test_any_data_frame_is_a_message_or_refused(content: bytes) -> None:
    try:
        decode_data(content)
    except RemoteProtocolError:
        return


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@fuzz
@given(st.sampled_from([*sorted(ChatRequest.__struct_fields__), "prompt"]), JSON, st.booleans())
def test_any_value_of_a_field_is_taken_or_refused(name: str, value: object, chat: bool) -> None:
    body = {**(CHAT if chat else {"prompt": "Hi"}), name: value}
    try:
        if chat:
            asked = decode_body(json.dumps(body).encode(), ChatRequest)
            asked.checked_messages(), asked.checked_tools(), asked.variables(), asked.stops(), asked.checked_seed()
            asked.sampling(asked.n_logprobs())
        else:
            plain = decode_body(json.dumps(body).encode(), CompletionRequest)
            plain.checked_prompt(), plain.stops(), plain.checked_seed(), plain.sampling(plain.logprobs)
    except InvalidRequestError as error:
        words = str(error)
    else:
        return
    assert "\n" not in words


@fuzz
@given(changed(json.dumps(CHAT).encode()))
def test_any_body_is_taken_or_refused(content: bytes) -> None:
    try:
        decode_body(content, ChatRequest)
    except InvalidRequestError as error:
        json.dumps({"message": str(error)}, allow_nan=False)
