"""Frames: whole = byte by byte = any pieces; what is too long, malformed or out of limits is the peer's fault."""

from __future__ import annotations

import struct
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import LocalProtocolError, RemoteProtocolError
from meshllm.layout.layout import Device, Layout, NodeId, Prediction, Share
from meshllm.mesh.checks import check
from meshllm.mesh.file_messages import Absent, AskChunk, Chunk, Farewell, FileHello, FileMessage, Held, Need, Offer
from meshllm.mesh.framing import (
    CONTROL_LIMIT,
    HELLO_LIMIT,
    LENGTH_BYTES,
    FrameDecoder,
    LinkMessage,
    decode_data,
    decode_file,
    encode_body,
    encode_frame,
    frame_length,
)
from meshllm.mesh.manifest import CHUNK_BYTES, MAX_CHUNKS, Manifest
from meshllm.mesh.messages import (
    Abort,
    Cancel,
    Candidates,
    Commit,
    DataHello,
    DataMessage,
    Epoch,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    ModelHash,
    PeerAddresses,
    Prepare,
    Prepared,
    Refused,
    RequestId,
    ServedModel,
    Step,
    StepEntry,
    Submit,
    Tokens,
)
from meshllm.model.slicing import Range, Slice
from meshllm.parameters import SampledToken, SamplingParameters, TokenLogprob
from meshllm.settings import SETTINGS

NODE = NodeId("0123456789abcdef")
EPOCH = Epoch(3, NODE, 77)
MODEL = ModelHash("ab" * 32)
REQUEST = RequestId("cd" * 16)
DEVICE = Device(node=NODE, read_gbps=11.5, matmul_gops=150.0, usable_bytes=4 * 10**9)
SHARE = Share(node=NODE, slice=Slice(Range(0, 9), Range(0, 1536), Range(0, 49152)), slice_bytes=9, cache_bytes=9)
LAYOUT = Layout(
    shares=(SHARE,),
    exchange="q8_0",
    context=2048,
    slots=4,
    prediction=Prediction(decode_tok_s=30.0, prefill_tok_s=300.0, wire_bytes_per_token=0),
    left_out=(("fedcba9876543210", "would make answers slower"),),
)
SAMPLING = SamplingParameters(temperature=0.7, seed=2**64 - 1, logprobs=3)
HELLO = Hello(1, 0, "0.1.0", NODE, 2**64 - 1, "kitchen", 7007, DEVICE, MODEL, "smollm2", 4, "avx2")
SUBMIT = Submit(REQUEST, MODEL, (1, 2, 3), (), 64, (2,), SAMPLING)

CONTROL: tuple[LinkMessage, ...] = (
    HELLO,
    DataHello(EPOCH, NODE, b"r" * 32, True),
    Heartbeat(1.5, None, 0.0, 10**9, EPOCH, ((NODE, 250.0),)),
    PeerAddresses(((NODE, (("192.0.2.7", 7007), ("fe80::1%eth0", 7007))),)),
    ServedModel(None, None, DEVICE),
    Prepare(EPOCH, MODEL, LAYOUT),
    Prepared(EPOCH),
    Refused(EPOCH, "needs 120 MB more", None),
    Commit(EPOCH),
    Abort(EPOCH, "lost 'kitchen'"),
    SUBMIT,
    Tokens(REQUEST, 0, (SampledToken(5, -0.25, (TokenLogprob(5, -0.25),)), SampledToken(6))),
    Finished(REQUEST, "stop", 2),
    Failed(REQUEST, "unavailable", "lost 'kitchen'"),
    Cancel(REQUEST),
    Goodbye("told to stop"),
    msgspec.structs.replace(HELLO, whole=False, held=(SHARE.slice,)),
    FileHello(NODE, MODEL),
    Need(MODEL, SHARE.slice),
    Held(MODEL, SHARE.slice, "the disk is full"),
)
MANIFEST = Manifest(3 << 20, 100, bytes(96))
FILE: tuple[FileMessage, ...] = (
    Offer(MANIFEST, b"\5"),
    AskChunk(2, True),
    Chunk(2, b"weights"),
    Absent(0),
    Farewell("serves another model now"),
)
DATA: tuple[DataMessage, ...] = (
    Step(0, (StepEntry(0, 0, (1, 2), SAMPLING, 2), StepEntry(1, 7, (3,))), ((1, 0, 5),)),
    Candidates(0, (b"abc",)),
)


@given(st.lists(st.sampled_from(CONTROL), max_size=8), st.data())
def test_frames_come_out_whole_however_the_bytes_are_cut(messages: list[LinkMessage], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    decoder, got = FrameDecoder(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[start:stop])
    assert got == messages
    assert decoder.buffered == 0


def test_byte_by_byte_is_the_same_as_whole() -> None:
    stream = b"".join(encode_frame(message) for message in CONTROL)
    decoder = FrameDecoder()
    assert [message for byte in stream for message in decoder.feed(bytes([byte]))] == list(CONTROL)


@pytest.mark.parametrize("message", DATA, ids=lambda m: type(m).__name__)
def test_data_messages_come_out_as_they_went_in(message: DataMessage) -> None:
    assert decode_data(encode_body(message)) == message


@pytest.mark.parametrize("message", FILE, ids=lambda m: type(m).__name__)
def test_file_messages_come_out_as_they_went_in(message: FileMessage) -> None:
    frame = encode_frame(message)
    assert frame_length(frame[:LENGTH_BYTES]) == len(frame) - LENGTH_BYTES
    assert decode_file(frame[LENGTH_BYTES:]) == message


def test_largest_manifest_fits_a_frame() -> None:
    n_chunks = MAX_CHUNKS
    offer = Offer(Manifest(n_chunks * CHUNK_BYTES, 1, bytes(32 * n_chunks)), bytes(n_chunks // 8))
    check(offer)
    frame_length(encode_frame(offer)[:LENGTH_BYTES])


def test_frame_of_a_file_link_has_a_limit() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        frame_length(b"\xff\xff\xff\xff")


@given(st.binary(max_size=300))
def test_any_bytes_on_a_file_link_are_messages_or_the_peers_fault(junk: bytes) -> None:
    try:
        check(decode_file(junk))
    except RemoteProtocolError:
        return


def test_first_frame_says_which_kind_of_link_it_is() -> None:
    assert isinstance(FrameDecoder().feed(encode_frame(CONTROL[0]))[0], Hello)
    assert isinstance(FrameDecoder().feed(encode_frame(CONTROL[1]))[0], DataHello)


def test_stranger_makes_us_keep_little() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        FrameDecoder().feed(struct.pack("<I", HELLO_LIMIT + 1))


def test_admitted_peer_may_send_long_prompts_but_not_any() -> None:
    long = Submit(REQUEST, MODEL, tuple(range(100_000, 200_000)), (), 1, (), SAMPLING)
    decoder = FrameDecoder()
    decoder.admit()
    assert decoder.feed(encode_frame(long)) == [long]
    with pytest.raises(RemoteProtocolError, match="at most"):
        decoder.feed(struct.pack("<I", CONTROL_LIMIT + 1))


def test_what_no_link_takes_is_not_made() -> None:
    with pytest.raises(LocalProtocolError, match="takes"):
        encode_frame(Candidates(0, (bytes(CONTROL_LIMIT),)))


def test_decoder_is_dead_after_an_error() -> None:
    decoder = FrameDecoder()
    with pytest.raises(RemoteProtocolError):
        decoder.feed(struct.pack("<I", 3) + b"\xc1\xc1\xc1")
    with pytest.raises(LocalProtocolError):
        decoder.feed(b"")


@given(st.binary(max_size=400))
def test_any_bytes_are_messages_or_the_peers_fault(junk: bytes) -> None:
    for stream in (junk, struct.pack("<I", len(junk)) + junk):
        with suppress(RemoteProtocolError):
            FrameDecoder().feed(stream)


@given(st.sampled_from(CONTROL), st.data())
def test_a_spoilt_message_is_a_message_or_the_peers_fault(message: LinkMessage, data: st.DataObject) -> None:
    body = bytearray(encode_body(message))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RemoteProtocolError):
        FrameDecoder().feed(struct.pack("<I", len(body)) + bytes(body))


@given(st.recursive(st.none() | st.integers(-(2**63), 2**63) | st.text() | st.binary(), st.lists, max_leaves=30))
def test_any_msgpack_is_refused_as_a_whole(value: object) -> None:
    body = msgspec.msgpack.encode(value)
    with pytest.raises(RemoteProtocolError):
        FrameDecoder().feed(struct.pack("<I", len(body)) + body)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (msgspec.structs.replace(HELLO, node="../../etc/passwd"), "node"),
        (msgspec.structs.replace(HELLO, name="kit\x1b[2Jchen"), "name"),
        (msgspec.structs.replace(HELLO, name=""), "name"),
        (msgspec.structs.replace(HELLO, port=0), "port"),
        (msgspec.structs.replace(HELLO, device=msgspec.structs.replace(DEVICE, read_gbps=NAN)), "read_gbps"),
        (msgspec.structs.replace(HELLO, device=msgspec.structs.replace(DEVICE, node="f" * 16)), "device.node"),
        (msgspec.structs.replace(HELLO, model="ab"), "model"),
        (Heartbeat(INF, None, 0.0, 0, None, ()), "sent"),
        (Heartbeat(0.0, None, -1.0, 0, None, ()), "held_s"),
        (Heartbeat(0.0, None, 0.0, -1, None, ()), "free_bytes"),
        (PeerAddresses(((NODE, (("192.0.2.7", 70000),)),)), "port"),
        (Commit(Epoch(0, NODE)), "epoch"),
        (Commit(Epoch(1, NodeId("x"))), "epoch.driver"),
        (Prepare(EPOCH, MODEL, msgspec.structs.replace(LAYOUT, shares=())), "shares"),
        (Prepare(EPOCH, MODEL, msgspec.structs.replace(LAYOUT, shares=(SHARE, SHARE))), "shares"),
        (Prepare(EPOCH, MODEL, msgspec.structs.replace(LAYOUT, context=0)), "context"),
        (msgspec.structs.replace(SUBMIT, prompt=()), "prompt"),
        (msgspec.structs.replace(SUBMIT, prompt=(-1,)), "prompt"),
        (msgspec.structs.replace(SUBMIT, max_tokens=0), "max_tokens"),
        (msgspec.structs.replace(SUBMIT, sampling=SamplingParameters(temperature=NAN)), "temperature"),
        (msgspec.structs.replace(SUBMIT, sampling=SamplingParameters(top_p=1.5)), "top_p"),
        (msgspec.structs.replace(SUBMIT, sampling=SamplingParameters(logprobs=21)), "logprobs"),
        (Tokens(REQUEST, 0, ()), "tokens"),
        (Finished(REQUEST, "because", 1), "reason"),
        (Failed(REQUEST, "x", "line\nline"), "reason"),
        (Goodbye("x" * 5000), "reason"),
        (DataHello(EPOCH, NODE, b"short", True), "random"),
        (Step(0, (StepEntry(-1, 0, (1,)),)), "slot"),
        (FileHello(NodeId("x"), MODEL), "node"),
        (Need(MODEL, Slice(Range(3, 2), Range(0, 0), Range(0, 0))), "part"),
        (Held(MODEL, SHARE.slice, "a\nb"), "problem"),
        (msgspec.structs.replace(HELLO, held=(SHARE.slice,) * 17), "held"),
        (Offer(Manifest(1 << 60, 1, b""), b""), "manifest"),
        (Offer(MANIFEST, bytes(2)), "holds"),
        (AskChunk(-1, False), "chunk"),
        (Chunk(0, bytes(CHUNK_BYTES + 1)), "data"),
        (Step(0, (StepEntry(0, 0, ()),)), "tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_values_out_of_their_limits_are_refused_by_name(message: Message, field: str) -> None:
    with pytest.raises(RemoteProtocolError, match=field):
        check(message)


def test_the_longest_names_that_a_device_and_a_model_may_be_given_pass() -> None:
    name = str(next(setting for setting in SETTINGS if setting.name == "name").read("n" * 200))
    check(msgspec.structs.replace(HELLO, name=name, model_name="m" * 128))
    check(ServedModel(MODEL, "m" * 128, DEVICE))


def test_overlapping_slices_are_refused() -> None:
    second = Share(node=NodeId("f" * 16), slice=Slice(Range(8, 9), Range(1536, 1536), Range(49152, 49152)),
                   slice_bytes=1, cache_bytes=1)  # fmt: skip
    with pytest.raises(RemoteProtocolError, match="next part"):
        check(Prepare(EPOCH, MODEL, msgspec.structs.replace(LAYOUT, shares=(SHARE, second))))
