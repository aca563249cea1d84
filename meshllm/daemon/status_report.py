"""The node's view, the model, the counters -> Status, the type that `/status` and `meshllm status --json` show.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshllm.daemon.loop_bridge import StepCosts
from meshllm.daemon.own_facts import OwnFacts
from meshllm.layout.layout import Layout, NodeId
from meshllm.mesh.facts import NodeView, PeerView
from meshllm.mesh.messages import Epoch
from meshllm.status import (
    STATUS_VERSION,
    DaemonState,
    ExchangeStatus,
    FetchStatus,
    LayoutStatus,
    ModelStatus,
    PeerStatus,
    RequestCounts,
    SliceStatus,
    Status,
)

BURST_GAP_S = 2.0  # costs that come later than this after the last ones are of another answer


@dataclass(slots=True)
class CostWindow:
    """Costs of the last answer: sums of the events of one burst of steps."""

    steps: int = 0  # since the start, prompt steps too
    tokens: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    exchange_us: float = 0.0
    compute_us: float = 0.0
    _last_s: float = 0.0

    def add(self, costs: StepCosts, now: float) -> None:
        """Takes one event in; a new burst starts the window anew."""
        self.steps += costs.n_steps
        if costs.decode_tokens == 0:
            return
        if now - self._last_s > BURST_GAP_S:
            self.start_anew()
        self._last_s = now
        self.tokens += costs.decode_tokens
        self.bytes_sent += costs.bytes_sent
        self.bytes_received += costs.bytes_received
        self.exchange_us += costs.exchange_us
        self.compute_us += costs.compute_us

    def start_anew(self) -> None:
        """Another layout is in force: its costs are others."""
        self.tokens = self.bytes_sent = self.bytes_received = 0
        self.exchange_us = self.compute_us = 0.0

    def per_token(self) -> ExchangeStatus | None:
        """None before the first decoded token."""
        if self.tokens == 0:
            return None
        return ExchangeStatus(
            bytes_sent=self.bytes_sent / self.tokens,
            bytes_received=self.bytes_received / self.tokens,
            exchange_us=self.exchange_us / self.tokens,
            compute_us=self.compute_us / self.tokens,
        )


def build_status(
    view: NodeView,
    own: OwnFacts,
    model: ModelStatus | None,
    state: tuple[DaemonState, str | None],
    requests: RequestCounts,
    exchange: ExchangeStatus | None,
    fetch: FetchStatus | None,
) -> Status:
    """The whole answer."""
    config = own.config
    peers = (_own_status(view, own, model), *(_peer_status(peer, view.layout, own) for peer in view.peers))
    return Status(
        version=STATUS_VERSION,
        build=config.build,
        state=state[0],
        detail=state[1],
        node=config.node,
        name=config.name,
        mesh_tag=own.tag,
        uptime_s=round(own.uptime_s, 3),
        model=model,
        layout=_layout_status(view.epoch, view.layout),
        peers=peers,
        requests=requests,
        exchange=exchange,
        fetch=fetch,
    )


def _layout_status(epoch: Epoch | None, layout: Layout | None) -> LayoutStatus | None:
    if epoch is None or layout is None:
        return None
    return LayoutStatus(
        epoch=epoch.counter,
        driver=epoch.driver,
        ranks=tuple(share.node for share in layout.shares),
        exchange=layout.exchange,
        context=layout.context,
        slots=layout.slots,
        predicted_decode_tok_s=layout.prediction.decode_tok_s,
        left_out=layout.left_out,
    )


def _slice_status(layout: Layout | None, node: NodeId) -> SliceStatus | None:
    rank = layout.rank_of(node) if layout is not None else None
    if layout is None or rank is None:
        return None
    share = layout.shares[rank]
    part = share.slice
    return SliceStatus(
        rank=rank,
        heads=(part.heads.start, part.heads.stop),
        ffn=(part.ffn.start, part.ffn.stop),
        vocab=(part.vocab.start, part.vocab.stop),
        bytes=share.slice_bytes,
        cache_bytes=share.cache_bytes,
    )


def _own_status(view: NodeView, own: OwnFacts, model: ModelStatus | None) -> PeerStatus:
    config = own.config
    return PeerStatus(
        id=config.node,
        name=config.name,
        address=own.addresses[0] if own.addresses else None,
        state="self",
        reason=view.own_reason,
        build=config.build,
        model=model.sha256 if model is not None and model.error is None else None,
        slice=_slice_status(view.layout, config.node),
        threads=config.threads,
        isa=config.isa,
        memory_bytes=_known(own.device.usable_bytes, own),
        free_bytes=_known(own.free_bytes, own),
        read_gbps=own.device.read_gbps,
        matmul_gops=own.device.matmul_gops,
    )


def _peer_status(peer: PeerView, layout: Layout | None, own: OwnFacts) -> PeerStatus:
    device = peer.device
    return PeerStatus(
        id=peer.node,
        name=peer.name,
        address=show_address(peer.address) if peer.address is not None else None,
        state=peer.state,
        reason=peer.reason,
        build=peer.build,
        model=peer.model,
        slice=_slice_status(layout, peer.node),
        threads=peer.threads,
        isa=peer.isa,
        memory_bytes=_known(device.usable_bytes, own) if device is not None else None,
        free_bytes=_known(peer.free_bytes, own) if peer.free_bytes is not None else None,
        read_gbps=device.read_gbps if device is not None else None,
        matmul_gops=device.matmul_gops if device is not None else None,
        rtt_us=peer.rtt_us,
        mbps=peer.mbps,
        seen_s=peer.seen_s,
    )


def _known(size: int, own: OwnFacts) -> int | None:
    return size if size < own.unknown_bytes else None


def show_address(address: tuple[str, int]) -> str:
    """host:port as a person writes it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
