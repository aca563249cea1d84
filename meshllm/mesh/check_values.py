"""Limits of the values inside messages: texts, numbers, ids, devices, layouts, sampling. Pure."""

from __future__ import annotations

import math

from meshllm.layout.layout import Device, Layout
from meshllm.model.slicing import Range, Slice
from meshllm.parameters import MAX_TOP_LOGPROBS, MIN_REPETITION_PENALTY, SampledToken, SamplingParameters

MAX_NAME = 200  # characters of a name that settings or the model store allow, a build, an ISA
MAX_REASON = 2000  # characters of a sentence
MAX_PEERS = 256  # devices of a mesh that anyone may name to us
MAX_ADDRESSES = 32  # of one peer
MAX_HELD = 16  # slices remembered of a device that holds some of a file
MAX_TOKEN = 2**31 - 1
MAX_TOKENS = 1_500_000  # in one message
MAX_ENTRIES = 4096  # of a step
MAX_BYTES = 2**62  # any count of bytes, positions or units: fits an int64 with room to add

HEX_DIGITS = frozenset("0123456789abcdef")


class BadFieldError(Exception):
    """A field out of its limits; checks.check turns it into the outside error."""


def require(good: bool, field: str, expected: str) -> None:
    if not good:
        raise BadFieldError(f"{field} is not {expected}")


def require_count(field: str, value: int, maximum: int = MAX_BYTES) -> None:
    require(0 <= value <= maximum, field, f"in 0..{maximum}")


def require_number(field: str, value: float | None, maximum: float = 1e15) -> None:
    require(value is None or (math.isfinite(value) and 0.0 <= value <= maximum), field, f"a number in 0..{maximum:g}")


def require_hex(field: str, text: str, length: int) -> None:
    require(len(text) == length and HEX_DIGITS.issuperset(text), field, f"{length} lower-case hex digits")


def require_text(field: str, text: str | None, maximum: int) -> None:
    good = text is None or (len(text) <= maximum and text.isprintable())
    require(good, field, f"printable, up to {maximum} characters")


def require_device(device: Device) -> None:
    require_hex("device.node", device.node, 16)
    require_number("device.read_gbps", device.read_gbps, 1e6)
    require_number("device.matmul_gops", device.matmul_gops, 1e9)
    require_count("device.usable_bytes", device.usable_bytes)
    require_number("device.work_gbps", device.work_gbps, 1e6)
    require_count("device.work_epoch", device.work_epoch)


def require_layout(layout: Layout) -> None:
    """Ranges follow one another from 0 in rank order, so nothing is held twice; the ends are the model's affair."""
    require(1 <= len(layout.shares) <= MAX_PEERS, "layout.shares", f"of 1..{MAX_PEERS} ranks")
    require(0 < layout.context <= MAX_TOKEN, "layout.context", "positive")
    require(0 < layout.slots <= 65536, "layout.slots", "in 1..65536")
    nodes = {share.node for share in layout.shares}
    require(len(nodes) == len(layout.shares), "layout.shares", "of different nodes")
    ends = Slice(Range(0, 0), Range(0, 0), Range(0, 0))
    for share in layout.shares:
        require_hex("layout.shares.node", share.node, 16)
        require_count("layout.shares.slice_bytes", share.slice_bytes)
        require_count("layout.shares.cache_bytes", share.cache_bytes)
        for before, part in zip(ranges_of(ends), ranges_of(share.slice), strict=True):
            follows = part.start == before.stop and part.start <= part.stop <= MAX_TOKEN
            require(follows, "layout.shares.slice", "the next part of the model")
        ends = share.slice
    require_number("layout.prediction.decode_tok_s", layout.prediction.decode_tok_s)
    require_number("layout.prediction.prefill_tok_s", layout.prediction.prefill_tok_s)
    require_count("layout.prediction.wire_bytes_per_token", layout.prediction.wire_bytes_per_token)
    require(len(layout.left_out) <= MAX_PEERS, "layout.left_out", f"of at most {MAX_PEERS}")
    for node, reason in layout.left_out:
        require_hex("layout.left_out.node", node, 16)
        require_text("layout.left_out.reason", reason, MAX_REASON)


def require_slice(field: str, part: Slice) -> None:
    for values in ranges_of(part):
        require(0 <= values.start <= values.stop <= MAX_TOKEN, field, "of ranges")


def ranges_of(part: Slice) -> tuple[Range, Range, Range]:
    return part.heads, part.ffn, part.vocab


def require_tokens(field: str, tokens: tuple[int, ...]) -> None:
    require(len(tokens) <= MAX_TOKENS, field, f"at most {MAX_TOKENS} tokens")
    if tokens:
        require(min(tokens) >= 0 and max(tokens) <= MAX_TOKEN, field, "of token ids")


def require_sampling(sampling: SamplingParameters) -> None:
    require_number("sampling.temperature", sampling.temperature, 1e6)
    require_count("sampling.top_k", sampling.top_k, MAX_TOKEN)
    require_number("sampling.top_p", sampling.top_p, 1.0)
    require_number("sampling.min_p", sampling.min_p, 1.0)
    penalty = sampling.repetition_penalty
    require(
        MIN_REPETITION_PENALTY <= penalty <= 1e6, "sampling.repetition_penalty", f"{MIN_REPETITION_PENALTY} or more"
    )
    for name, value in (("frequency", sampling.frequency_penalty), ("presence", sampling.presence_penalty)):
        require(math.isfinite(value) and abs(value) <= 1e6, f"sampling.{name}_penalty", "finite")
    require(0 <= sampling.seed < 2**64, "sampling.seed", "a 64-bit number")
    require_count("sampling.logprobs", sampling.logprobs or 0, MAX_TOP_LOGPROBS)


def require_sampled(token: SampledToken) -> None:
    require_count("tokens", token.token, MAX_TOKEN)
    require(token.logprob is None or not math.isnan(token.logprob), "logprob", "a number")
    require(len(token.top) <= MAX_TOP_LOGPROBS, "top", f"at most {MAX_TOP_LOGPROBS}")
    for other in token.top:
        require_count("top", other.token, MAX_TOKEN)
        require(not math.isnan(other.logprob), "top", "a number")
