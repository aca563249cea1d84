"""Limits of messages that their types cannot say: lengths, ranges, finite numbers, forms of ids. Pure.

Whatever passes may be stored, shown in a terminal and used as a number; whether it is *true* is the Node's affair.
"""

from __future__ import annotations

import math
from typing import assert_never

from meshllm.errors import RemoteProtocolError
from meshllm.layout.layout import Device, Layout
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
    Leave,
    Message,
    Partial,
    PeerAddresses,
    Prepare,
    Prepared,
    Ready,
    Refused,
    ServedModel,
    Step,
    StepEntry,
    Submit,
    Tokens,
)
from meshllm.model.slicing import Range, Slice
from meshllm.parameters import MAX_TOP_LOGPROBS, SampledToken, SamplingParameters

MAX_NAME = 120  # characters of a device's or model's name, a build, an ISA
MAX_REASON = 2000  # characters of a sentence
MAX_PEERS = 256  # devices of a mesh that anyone may name to us
MAX_ADDRESSES = 32  # of one peer
MAX_TOKEN = 2**31 - 1
MAX_TOKENS = 1_500_000  # in one message
MAX_ENTRIES = 4096  # of a step
MAX_BYTES = 2**62  # any count of bytes, positions or units: fits an int64 with room to add

_HEX = frozenset("0123456789abcdef")


def check(message: Message) -> None:
    """Raises RemoteProtocolError naming the message and the field that is out of its limits."""
    try:
        _check(message)
    except _BadFieldError as error:
        raise RemoteProtocolError(f"{type(message).__name__}: {error}") from None


def check_data(message: DataMessage) -> None:
    """The same for a message of a data link; quick for a Partial, of which there are two a layer and step."""
    if isinstance(message, Partial):
        if not (0 <= message.step <= MAX_BYTES and 0 <= message.exchange <= MAX_TOKEN):
            raise RemoteProtocolError("Partial: step or exchange is no such number")
        return
    check(message)


class _BadFieldError(Exception):
    pass


def _check(message: Message) -> None:
    match message:
        case Hello() | ServedModel():
            _hello(message)
        case DataHello(random=random):
            _epoch(message.epoch)
            _hex("node", message.node, 16)
            _require(len(random) == 32, "random", "32 bytes")
        case Heartbeat():
            _heartbeat(message)
        case PeerAddresses(addresses=addresses):
            _addresses(addresses)
        case Prepare():
            _epoch(message.epoch)
            _hex("model", message.model, 64)
            _layout(message.layout)
        case Prepared(epoch=epoch) | Commit(epoch=epoch):
            _epoch(epoch)
        case Refused() | Abort():
            _epoch(message.epoch)
            _text("reason", message.reason, MAX_REASON)
            if isinstance(message, Refused) and message.seen is not None:
                _epoch(message.seen)
        case Submit():
            _submit(message)
        case Tokens() | Finished() | Failed() | Cancel():
            _answer(message)
        case Goodbye(reason=reason):
            _text("reason", reason, MAX_REASON)
        case Step() | Partial() | Candidates():
            _data(message)
        case Ready():
            pass
        case Leave(node=node, reason=reason):
            if node is not None:
                _hex("node", node, 16)
            _text("reason", reason, MAX_REASON)
        case _:
            raise _BadFieldError("unknown kind of message")


def _require(good: bool, field: str, expected: str) -> None:
    if not good:
        raise _BadFieldError(f"{field} is not {expected}")


def _count(field: str, value: int, maximum: int = MAX_BYTES) -> None:
    _require(0 <= value <= maximum, field, f"in 0..{maximum}")


def _number(field: str, value: float | None, maximum: float = 1e15) -> None:
    _require(value is None or (math.isfinite(value) and 0.0 <= value <= maximum), field, f"a number in 0..{maximum:g}")


def _hex(field: str, text: str, length: int) -> None:
    _require(len(text) == length and _HEX.issuperset(text), field, f"{length} lower-case hex digits")


def _text(field: str, text: str | None, maximum: int) -> None:
    good = text is None or (len(text) <= maximum and text.isprintable())
    _require(good, field, f"printable, up to {maximum} characters")


def _epoch(epoch: Epoch) -> None:
    _require(0 < epoch.counter < MAX_BYTES, "epoch", "a positive counter")
    _hex("epoch.driver", epoch.driver, 16)
    _require(0 <= epoch.life < 2**64, "epoch.life", "a 64-bit number")


def _hello(message: Hello | ServedModel) -> None:
    if message.model is not None:
        _hex("model", message.model, 64)
    _text("model_name", message.model_name, MAX_NAME)
    _device(message.device)
    if isinstance(message, ServedModel):
        return
    _count("major", message.major, 1_000_000)
    _count("minor", message.minor, 1_000_000)
    _text("build", message.build, MAX_NAME)
    _hex("node", message.node, 16)
    _require(0 <= message.incarnation < 2**64, "incarnation", "a 64-bit number")
    _require(bool(message.name), "name", "given")
    _text("name", message.name, MAX_NAME)
    _require(0 < message.port < 65536, "port", "in 1..65535")
    _count("threads", message.threads, 65536)
    _text("isa", message.isa, MAX_NAME)
    _require(message.device.node == message.node, "device.node", "the sender's id")


def _device(device: Device) -> None:
    _hex("device.node", device.node, 16)
    _number("device.read_gbps", device.read_gbps, 1e6)
    _number("device.matmul_gops", device.matmul_gops, 1e9)
    _count("device.usable_bytes", device.usable_bytes)


def _heartbeat(message: Heartbeat) -> None:
    _require(math.isfinite(message.sent), "sent", "finite")
    _require(message.echo is None or math.isfinite(message.echo), "echo", "finite")
    _number("held_s", message.held_s)
    _count("free_bytes", message.free_bytes)
    if message.epoch is not None:
        _epoch(message.epoch)
    _require(len(message.rtt_us) <= MAX_PEERS, "rtt_us", f"of at most {MAX_PEERS} peers")
    for node, rtt in message.rtt_us:
        _hex("rtt_us.node", node, 16)
        _number("rtt_us", rtt)


def _addresses(addresses: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]) -> None:
    _require(len(addresses) <= MAX_PEERS, "addresses", f"of at most {MAX_PEERS} peers")
    for node, places in addresses:
        _hex("addresses.node", node, 16)
        _require(len(places) <= MAX_ADDRESSES, "addresses", f"at most {MAX_ADDRESSES} of a peer")
        for host, port in places:
            _text("addresses.host", host, 100)
            _require(0 < port < 65536, "addresses.port", "in 1..65535")


def _layout(layout: Layout) -> None:
    """Ranges follow one another from 0 in rank order, so nothing is held twice; the ends are the model's affair."""
    _require(1 <= len(layout.shares) <= MAX_PEERS, "layout.shares", f"of 1..{MAX_PEERS} ranks")
    _require(0 < layout.context <= MAX_TOKEN, "layout.context", "positive")
    _require(0 < layout.slots <= 65536, "layout.slots", "in 1..65536")
    nodes = {share.node for share in layout.shares}
    _require(len(nodes) == len(layout.shares), "layout.shares", "of different nodes")
    ends = Slice(Range(0, 0), Range(0, 0), Range(0, 0))
    for share in layout.shares:
        _hex("layout.shares.node", share.node, 16)
        _count("layout.shares.slice_bytes", share.slice_bytes)
        _count("layout.shares.cache_bytes", share.cache_bytes)
        for before, part in zip(_ranges(ends), _ranges(share.slice), strict=True):
            follows = part.start == before.stop and part.start <= part.stop <= MAX_TOKEN
            _require(follows, "layout.shares.slice", "the next part of the model")
        ends = share.slice
    _number("layout.prediction.decode_tok_s", layout.prediction.decode_tok_s)
    _number("layout.prediction.prefill_tok_s", layout.prediction.prefill_tok_s)
    _count("layout.prediction.wire_bytes_per_token", layout.prediction.wire_bytes_per_token)
    _require(len(layout.left_out) <= MAX_PEERS, "layout.left_out", f"of at most {MAX_PEERS}")
    for node, reason in layout.left_out:
        _hex("layout.left_out.node", node, 16)
        _text("layout.left_out.reason", reason, MAX_REASON)


def _ranges(part: Slice) -> tuple[Range, Range, Range]:
    return part.heads, part.ffn, part.vocab


def _tokens(field: str, tokens: tuple[int, ...]) -> None:
    _require(len(tokens) <= MAX_TOKENS, field, f"at most {MAX_TOKENS} tokens")
    if tokens:
        _require(min(tokens) >= 0 and max(tokens) <= MAX_TOKEN, field, "of token ids")


def _submit(message: Submit) -> None:
    _hex("request", message.request, 32)
    _hex("model", message.model, 64)
    _require(len(message.prompt) > 0, "prompt", "at least one token")
    _tokens("prompt", message.prompt)
    _tokens("generated", message.generated)
    _tokens("end_tokens", message.end_tokens)
    _require(0 < message.max_tokens <= MAX_TOKEN, "max_tokens", "positive")
    _sampling(message.sampling)


def _sampling(sampling: SamplingParameters) -> None:
    _number("sampling.temperature", sampling.temperature, 1e6)
    _count("sampling.top_k", sampling.top_k, MAX_TOKEN)
    _number("sampling.top_p", sampling.top_p, 1.0)
    _number("sampling.min_p", sampling.min_p, 1.0)
    penalty = sampling.repetition_penalty
    _require(math.isfinite(penalty) and 0.0 < penalty <= 1e6, "sampling.repetition_penalty", "positive")
    for name, value in (("frequency", sampling.frequency_penalty), ("presence", sampling.presence_penalty)):
        _require(math.isfinite(value) and abs(value) <= 1e6, f"sampling.{name}_penalty", "finite")
    _require(0 <= sampling.seed < 2**64, "sampling.seed", "a 64-bit number")
    _count("sampling.logprobs", sampling.logprobs or 0, MAX_TOP_LOGPROBS)


def _answer(message: Tokens | Finished | Failed | Cancel) -> None:
    _hex("request", message.request, 32)
    match message:
        case Tokens():
            _count("start", message.start, MAX_TOKEN)
            _require(0 < len(message.tokens) <= MAX_TOKENS, "tokens", "given")
            for token in message.tokens:
                _sampled(token)
        case Finished():
            _require(message.reason in ("stop", "length"), "reason", "stop or length")
            _count("n_tokens", message.n_tokens, MAX_TOKEN)
        case Failed():
            _text("code", message.code, MAX_NAME)
            _text("reason", message.reason, MAX_REASON)
        case Cancel():
            pass
        case _:
            assert_never(message)


def _sampled(token: SampledToken) -> None:
    _count("tokens", token.token, MAX_TOKEN)
    _require(token.logprob is None or not math.isnan(token.logprob), "logprob", "a number")
    _require(len(token.top) <= MAX_TOP_LOGPROBS, "top", f"at most {MAX_TOP_LOGPROBS}")
    for other in token.top:
        _count("top", other.token, MAX_TOKEN)
        _require(not math.isnan(other.logprob), "top", "a number")


def _data(message: Step | Partial | Candidates) -> None:
    _count("step", message.step)
    match message:
        case Step():
            _require(len(message.entries) <= MAX_ENTRIES, "entries", f"at most {MAX_ENTRIES}")
            for entry in message.entries:
                _entry(entry)
            for copy in message.copies:
                _tokens("copies", copy)
        case Partial():
            _count("exchange", message.exchange, MAX_TOKEN)
        case Candidates():
            _require(len(message.data) <= MAX_ENTRIES, "data", f"at most {MAX_ENTRIES}")
        case _:
            assert_never(message)


def _entry(entry: StepEntry) -> None:
    _count("slot", entry.slot, 65536)
    _count("position", entry.position, MAX_TOKEN)
    _count("prompt_tokens", entry.prompt_tokens, MAX_TOKEN)
    _require(len(entry.tokens) > 0, "entries.tokens", "given")
    _tokens("entries.tokens", entry.tokens)
    if entry.sampling is not None:
        _sampling(entry.sampling)
