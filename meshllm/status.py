"""What `/status` and `meshllm status --json` say: frozen types that daemon, api and cli share.

A leaf: imports nothing of ours. `version` grows when a field changes meaning; fields are only added within one version.
"""

from __future__ import annotations

from typing import Literal

import msgspec

STATUS_VERSION = 1

DaemonState = Literal["starting", "no-model", "searching", "preparing", "serving", "failed"]
PeerState = Literal["connecting", "connected", "suspected", "lost", "incompatible", "refused", "self"]


class SliceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part of the model: half-open ranges."""

    rank: int
    heads: tuple[int, int]
    ffn: tuple[int, int]
    vocab: tuple[int, int]
    bytes: int  # of weights
    cache_bytes: int = 0  # of the KV cache when full


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device as this daemon sees it; the daemon itself has state "self"."""

    id: str
    name: str
    address: str | None  # host:port of the link; None for oneself or before there was one
    state: PeerState
    reason: str | None = None  # why it is not used
    build: str | None = None
    model: str | None = None  # SHA-256 of the file it serves
    slice: SliceStatus | None = None
    threads: int | None = None
    isa: str | None = None
    memory_bytes: int | None = None  # it may use in all
    free_bytes: int | None = None
    read_gbps: float | None = None  # measured on the real kernels
    matmul_gops: float | None = None
    rtt_us: float | None = None
    mbps: float | None = None  # 1e6 bits a second of the link, the slower way; None where it is fast, or not measured
    seen_s: float | None = None  # seconds since its last message


class LayoutStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The committed layout."""

    epoch: int
    driver: str  # node id
    ranks: tuple[str, ...]  # node ids in rank order
    exchange: str  # precision of partial sums: q8_0, f16, f32
    context: int
    slots: int
    predicted_decode_tok_s: float
    left_out: tuple[tuple[str, str], ...] = ()  # node id, reason


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The model this daemon serves, or why not."""

    name: str
    sha256: str
    architecture: str
    file_bytes: int
    context_length: int
    error: str | None = None


class FetchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model's file, or the part of one that a layout needs, on its way here from other devices."""

    name: str
    sha256: str
    done_bytes: int  # of those that are wanted
    wanted_bytes: int
    sources: tuple[str, ...]  # names of the devices that give it now
    is_whole: bool = False  # all of the file is here
    error: str | None = None  # why it does not come


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose root is this daemon, and the steps it has run."""

    active: int
    answered: int
    failed: int
    steps: int
    decode_tok_s: float | None = None  # of the last answer


class ExchangeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of exchanges for a decoded token, measured by this rank over the last answer."""

    bytes_sent: float
    bytes_received: float
    exchange_us: float
    compute_us: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    version: int
    build: str
    state: DaemonState
    detail: str | None  # one line: what is missing or going on
    node: str
    name: str
    mesh_tag: str
    uptime_s: float
    model: ModelStatus | None
    layout: LayoutStatus | None
    peers: tuple[PeerStatus, ...]  # oneself first
    requests: RequestCounts
    exchange: ExchangeStatus | None = None
    fetch: FetchStatus | None = None
