"""Limits of messages that their types cannot say: lengths, ranges, finite numbers, forms of ids. Pure.

Whatever passes may be stored, shown in a terminal and used as a number; whether it is *true* is the Node's affair.
"""

from __future__ import annotations

import math
from typing import assert_never

from meshllm.errors import RemoteProtocolError
from meshllm.mesh.check_values import (
    MAX_ADDRESSES,
    MAX_BYTES,
    MAX_ENTRIES,
    MAX_HELD,
    MAX_NAME,
    MAX_PEERS,
    MAX_REASON,
    MAX_TOKEN,
    MAX_TOKENS,
    BadFieldError,
    require,
    require_count,
    require_device,
    require_hex,
    require_layout,
    require_number,
    require_sampled,
    require_sampling,
    require_slice,
    require_text,
    require_tokens,
)
from meshllm.mesh.file_messages import Absent, AskChunk, Chunk, Farewell, FileHello, Held, Need, Offer
from meshllm.mesh.manifest import CHUNK_BYTES, MAX_CHUNKS
from meshllm.mesh.messages import (
    FILLER_BYTES,
    N_FILLERS,
    Abort,
    Cancel,
    Candidates,
    Commit,
    DataHello,
    Epoch,
    Failed,
    Filler,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Leave,
    Message,
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


def check(message: Message) -> None:
    """Raises RemoteProtocolError naming the message and the field that is out of its limits."""
    try:
        _check(message)
    except BadFieldError as error:
        raise RemoteProtocolError(f"{type(message).__name__}: {error}") from None


def _check(message: Message) -> None:
    match message:
        case Hello() | ServedModel():
            _hello(message)
        case DataHello(random=random):
            _epoch(message.epoch)
            require_hex("node", message.node, 16)
            require(len(random) == 32, "random", "32 bytes")
        case Heartbeat():
            _heartbeat(message)
        case Filler(left=left, data=data):
            require(0 <= left < N_FILLERS, "left", f"less than {N_FILLERS}")
            require(len(data) <= FILLER_BYTES, "data", f"at most {FILLER_BYTES} bytes")
        case PeerAddresses(addresses=addresses):
            _addresses(addresses)
        case Prepare():
            _epoch(message.epoch)
            require_hex("model", message.model, 64)
            require_layout(message.layout)
        case Prepared(epoch=epoch) | Commit(epoch=epoch):
            _epoch(epoch)
        case Refused() | Abort():
            _epoch(message.epoch)
            require_text("reason", message.reason, MAX_REASON)
            if isinstance(message, Refused) and message.seen is not None:
                _epoch(message.seen)
        case Need() | Held():
            require_hex("model", message.model, 64)
            require_slice("part", message.part)
            if isinstance(message, Held):
                require_text("problem", message.problem, MAX_REASON)
        case FileHello() | Offer() | AskChunk() | Chunk() | Absent():
            _file(message)
        case Submit():
            _submit(message)
        case Tokens() | Finished() | Failed() | Cancel():
            _answer(message)
        case Goodbye(reason=reason) | Farewell(reason=reason):
            require_text("reason", reason, MAX_REASON)
        case Step() | Candidates():
            _data(message)
        case Ready():
            pass
        case Leave(node=node, reason=reason):
            if node is not None:
                require_hex("node", node, 16)
            require_text("reason", reason, MAX_REASON)
        case _:
            raise BadFieldError("unknown kind of message")


def _file(message: FileHello | Offer | AskChunk | Chunk | Absent) -> None:
    match message:
        case FileHello(node=node, model=model):
            require_hex("node", node, 16)
            require_hex("model", model, 64)
        case Offer(manifest=manifest, holds=holds):
            require(manifest.fault is None, "manifest", f"possible: it has {manifest.fault}")
            require(len(holds) in (0, -(-manifest.n_chunks // 8)), "holds", "a bit for each chunk")
        case AskChunk(chunk=chunk) | Chunk(chunk=chunk) | Absent(chunk=chunk):
            require_count("chunk", chunk, MAX_CHUNKS)
            if isinstance(message, Chunk):
                require(len(message.data) <= CHUNK_BYTES, "data", f"at most {CHUNK_BYTES} bytes")
        case _:
            assert_never(message)


def _epoch(epoch: Epoch) -> None:
    require(0 < epoch.counter < MAX_BYTES, "epoch", "a positive counter")
    require_hex("epoch.driver", epoch.driver, 16)
    require(0 <= epoch.life < 2**64, "epoch.life", "a 64-bit number")


def _hello(message: Hello | ServedModel) -> None:
    if message.model is not None:
        require_hex("model", message.model, 64)
    require_text("model_name", message.model_name, MAX_NAME)
    require_device(message.device)
    require(len(message.held) <= MAX_HELD, "held", f"at most {MAX_HELD}")
    for part in message.held:
        require_slice("held", part)
    if isinstance(message, ServedModel):
        return
    require_count("major", message.major, 1_000_000)
    require_count("minor", message.minor, 1_000_000)
    require_text("build", message.build, MAX_NAME)
    require_hex("node", message.node, 16)
    require(0 <= message.incarnation < 2**64, "incarnation", "a 64-bit number")
    require(bool(message.name), "name", "given")
    require_text("name", message.name, MAX_NAME)
    require(0 < message.port < 65536, "port", "in 1..65535")
    require_count("threads", message.threads, 65536)
    require_text("isa", message.isa, MAX_NAME)
    require(message.device.node == message.node, "device.node", "the sender's id")


def _heartbeat(message: Heartbeat) -> None:
    require(math.isfinite(message.sent), "sent", "finite")
    require(message.echo is None or math.isfinite(message.echo), "echo", "finite")
    require_number("held_s", message.held_s)
    require_count("free_bytes", message.free_bytes)
    if message.epoch is not None:
        _epoch(message.epoch)
    require(len(message.rtt_us) <= MAX_PEERS, "rtt_us", f"of at most {MAX_PEERS} peers")
    require(len(message.mbps) <= MAX_PEERS, "mbps", f"of at most {MAX_PEERS} peers")
    for node, value in (*message.rtt_us, *message.mbps):
        require_hex("rtt_us.node", node, 16)
        require_number("rtt_us", value)


def _addresses(addresses: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]) -> None:
    require(len(addresses) <= MAX_PEERS, "addresses", f"of at most {MAX_PEERS} peers")
    for node, places in addresses:
        require_hex("addresses.node", node, 16)
        require(len(places) <= MAX_ADDRESSES, "addresses", f"at most {MAX_ADDRESSES} of a peer")
        for host, port in places:
            require_text("addresses.host", host, 100)
            require(0 < port < 65536, "addresses.port", "in 1..65535")


def _submit(message: Submit) -> None:
    require_hex("request", message.request, 32)
    require_hex("model", message.model, 64)
    require(len(message.prompt) > 0, "prompt", "at least one token")
    require_tokens("prompt", message.prompt)
    require_tokens("generated", message.generated)
    require_tokens("end_tokens", message.end_tokens)
    require(0 < message.max_tokens <= MAX_TOKEN, "max_tokens", "positive")
    require_sampling(message.sampling)


def _answer(message: Tokens | Finished | Failed | Cancel) -> None:
    require_hex("request", message.request, 32)
    match message:
        case Tokens():
            require_count("start", message.start, MAX_TOKEN)
            require(0 < len(message.tokens) <= MAX_TOKENS, "tokens", "given")
            for token in message.tokens:
                require_sampled(token)
        case Finished():
            require(message.reason in ("stop", "length"), "reason", "stop or length")
            require_count("n_tokens", message.n_tokens, MAX_TOKEN)
        case Failed():
            require_text("code", message.code, MAX_NAME)
            require_text("reason", message.reason, MAX_REASON)
        case Cancel():
            pass
        case _:
            assert_never(message)


def _data(message: Step | Candidates) -> None:
    require_count("step", message.step)
    match message:
        case Step():
            require(len(message.entries) <= MAX_ENTRIES, "entries", f"at most {MAX_ENTRIES}")
            for entry in message.entries:
                _entry(entry)
            for copy in message.copies:
                require_tokens("copies", copy)
        case Candidates():
            require(len(message.data) <= MAX_ENTRIES, "data", f"at most {MAX_ENTRIES}")
        case _:
            assert_never(message)


def _entry(entry: StepEntry) -> None:
    require_count("slot", entry.slot, 65536)
    require_count("position", entry.position, MAX_TOKEN)
    require_count("prompt_tokens", entry.prompt_tokens, MAX_TOKEN)
    require(len(entry.tokens) > 0, "entries.tokens", "given")
    require_tokens("entries.tokens", entry.tokens)
    if entry.sampling is not None:
        require_sampling(entry.sampling)
