"""What a Node is told about its device and model, and what it tells about the mesh: frozen values. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from meshllm.layout.layout import Device, ExchangePrecision, Layout, NodeId
from meshllm.mesh.actions import Address
from meshllm.mesh.messages import Epoch, ModelHash
from meshllm.model.slicing import ModelShape, Slice

LayoutMode: TypeAlias = Literal["auto", "all"] | int  # an int: exactly so many ranks
PeerStateName: TypeAlias = Literal["connecting", "connected", "suspected", "lost", "incompatible", "refused"]
NodeStateName: TypeAlias = Literal["no-model", "searching", "preparing", "serving"]
AddressSource: TypeAlias = Literal["static", "mdns", "peer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What does not change while the daemon runs. The driver's layout_mode, context, slots and exchange count."""

    node: NodeId
    incarnation: int  # random at each start
    name: str
    port: int  # where it listens
    build: str
    threads: int
    isa: str
    layout_mode: LayoutMode = "auto"
    context: int | None = None  # positions a slot; None: what the model and the memory allow
    slots: int = 4
    exchange: ExchangePrecision = "q8_0"
    wait_s: float = 10.0  # a request waits so long for a layout, then it fails


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model served here. whole: all of its file is here, else what was fetched for the slices of layouts."""

    hash: ModelHash
    name: str
    shape: ModelShape
    whole: bool = field(default=True, compare=False)  # a layout stays as it is when the rest of a file has come
    held: tuple[Slice, ...] = field(default=(), compare=False)  # the latest first, where it is not whole


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """Another device as seen from here."""

    node: NodeId
    name: str
    address: Address | None
    state: PeerStateName
    reason: str | None  # why it is not used, in words
    build: str | None
    model: ModelHash | None
    model_name: str | None
    whole: bool  # it holds all of the model's file
    threads: int | None
    isa: str | None
    device: Device | None
    free_bytes: int | None
    rtt_us: float | None
    mbps: float | None  # 1e6 bits a second of the link, the slower way, where that is what limits it
    seen_s: float | None  # since its last message


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The mesh as seen from here. epoch and layout: those in force, which new requests would use."""

    state: NodeStateName
    detail: str | None  # one line: what is missing or going on
    epoch: Epoch | None
    layout: Layout | None
    driver: NodeId | None  # of the epoch in force
    own_reason: str | None  # why this device is not used, if it is not
    peers: tuple[PeerView, ...]  # by name, then id
    active_requests: int  # submitted here and not ended
