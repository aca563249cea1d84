"""What a node tells about the mesh, put together for `status`. Pure."""

from __future__ import annotations

from meshllm.layout.layout import Layout, NodeId
from meshllm.mesh.epoch import MemberEpoch
from meshllm.mesh.facts import ModelFacts, NodeConfig, NodeStateName, NodeView, PeerStateName, PeerView
from meshllm.mesh.link_speeds import mbps_between
from meshllm.mesh.membership import Membership, Peer
from meshllm.mesh.messages import ModelHash
from meshllm.mesh.planning import Planning
from meshllm.mesh.sessions import CLONE_REASON, Sessions


def make_view(
    config: NodeConfig,
    planning: Planning,
    members: Membership,
    sessions: Sessions,
    in_force: MemberEpoch | None,
    *,
    is_preparing: bool,
    active_requests: int,
    now: float,
) -> NodeView:
    """The view of the node as of now."""
    layout = in_force.layout if in_force else None
    peers = [
        _peer_view(
            node, peer, mbps_between(config.node, members, config.node, node), planning.model, layout, sessions, now
        )
        for node, peer in members.all()
    ]
    known = {peer.node for peer in peers}
    peers += [_unmet(*unmet) for unmet in sessions.book.known() if unmet[0] not in known]
    peers += [_unmet(NodeId(key), address, reason) for key, address, reason in sessions.book.unreached()]
    state, detail = _state(config, planning, members, in_force, is_preparing=is_preparing)
    reasons = dict(layout.left_out) if layout else {}
    return NodeView(
        state=state,
        detail=detail,
        epoch=in_force.epoch if in_force else None,
        layout=layout,
        driver=in_force.epoch.driver if in_force else None,
        own_reason=CLONE_REASON if sessions.is_cloned(config.node, now) else reasons.get(config.node),
        peers=tuple(sorted(peers, key=lambda peer: (peer.name, peer.node))),
        active_requests=active_requests,
    )


def different_file(theirs: ModelHash, ours: ModelHash) -> str:
    """Why a peer with another file is not used."""
    return f"serves another file (sha256 {theirs[:8]}, here {ours[:8]})"


def _state(
    config: NodeConfig,
    planning: Planning,
    members: Membership,
    in_force: MemberEpoch | None,
    *,
    is_preparing: bool,
) -> tuple[NodeStateName, str | None]:
    if planning.model is None:
        return "no-model", 'no model: run "meshllm pull smollm2"'
    if in_force is not None:
        return "serving", planning.problem
    driver = planning.elected()
    if driver != config.node:
        return "preparing", f"waiting for {members.name_of(driver)}, which drives, to prepare a layout"
    if planning.problem is not None and not is_preparing:
        return "searching", planning.problem
    return "preparing", "a layout is being prepared"


def _peer_view(
    node: NodeId,
    peer: Peer,
    mbps: float | None,
    model: ModelFacts | None,
    layout: Layout | None,
    sessions: Sessions,
    now: float,
) -> PeerView:
    state: PeerStateName = peer.state.value
    cloned = sessions.is_cloned(node, now)
    return PeerView(
        node=node,
        name=peer.hello.name,
        address=peer.address,
        state="refused" if cloned and not peer.is_alive else state,
        reason=CLONE_REASON if cloned else _reason(node, peer, model, layout),
        build=peer.hello.build,
        model=peer.model,
        model_name=peer.model_name,
        whole=peer.whole,
        threads=peer.hello.threads,
        isa=peer.hello.isa,
        device=peer.device,
        free_bytes=peer.free_bytes,
        rtt_us=peer.rtt_us,
        mbps=mbps,
        seen_s=max(0.0, now - peer.heard_at),
    )


def _reason(node: NodeId, peer: Peer, model: ModelFacts | None, layout: Layout | None) -> str | None:
    """Why a peer is not used."""
    if not peer.is_alive:
        return peer.reason
    if peer.model is None:
        return 'serves no model: "meshllm status" there says why'
    if model is not None and peer.model != model.hash:
        return different_file(peer.model, model.hash)
    return dict(layout.left_out).get(node) if layout else None


def _unmet(node: NodeId, address: tuple[str, int], reason: str | None = None) -> PeerView:
    return PeerView(
        node=node,
        name=node,
        address=address,
        state="connecting",
        reason=reason,
        build=None,
        model=None,
        model_name=None,
        whole=False,
        threads=None,
        isa=None,
        device=None,
        free_bytes=None,
        rtt_us=None,
        mbps=None,
        seen_s=None,
    )
