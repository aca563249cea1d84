"""What `status` shows: values in, rich renderables out. Pure: prints nothing, reads no clock and no terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshllm.cli.text import bar, in_bytes, in_microseconds, in_time, printable
from meshllm.status import FetchStatus, PeerState, PeerStatus, Status

# Columns of the terminal from which more is shown: counts of a slice, then speed, then addresses.
ROOM_FOR_COUNTS, ROOM_FOR_SPEED, ROOM_FOR_ADDRESSES = 84, 116, 136

_DOTS: dict[PeerState, tuple[str, str]] = {
    "self": ("●", "green"),
    "connected": ("●", "green"),
    "connecting": ("○", "yellow"),
    "suspected": ("●", "yellow"),
    "lost": ("○", "red"),
    "incompatible": ("×", "red"),
    "refused": ("×", "red"),
}
_STATES = {
    "starting": "yellow",
    "no-model": "yellow",
    "searching": "yellow",
    "preparing": "yellow",
    "serving": "green",
    "failed": "red",
}


def status_view(status: Status, width: int) -> Group:
    """The whole of `meshllm status`: lines of head, a table of devices, notes on what needs an explanation."""
    return Group(_head(status), *_serving(status), Text(""), _devices(status, width), Text(""), *_notes(status))


def _head(status: Status) -> Text:
    facts = (f"meshllm {status.build}", f"mesh {status.mesh_tag}", f"up {in_time(status.uptime_s)}")
    head = Text.assemble((f"{printable(status.name)}  ", "bold"))
    return head.append(" · ".join(printable(fact) for fact in facts), "dim")


def _serving(status: Status) -> list[Text]:
    line = Text.assemble((status.state, _STATES.get(status.state, "")), "  ")
    model, layout = status.model, status.layout
    if model is not None:
        facts = f" ({printable(model.architecture)}, {in_bytes(model.file_bytes)})"
        line.append(printable(model.name), "bold").append(facts, "dim")
    if layout is None or status.state != "serving":
        if status.detail:
            line.append("  " * (model is not None) + printable(status.detail))
        return [line]
    n = len(layout.ranks)
    line.append(f" on {n} device{'s' if n != 1 else ''}")
    if layout.predicted_decode_tok_s > 0:
        line.append(f", about {layout.predicted_decode_tok_s:.0f} tok/s expected", "dim")
    names = {peer.id: printable(peer.name) for peer in status.peers}
    more = [f"{layout.slots} × {layout.context} tokens"]
    if n > 1:
        more += [f"{layout.exchange} exchange", f"driven by {names.get(layout.driver, layout.driver)}"]
    return [line, Text(" " * (len(status.state) + 2) + " · ".join(more), "dim")]


def _devices(status: Status, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    whole = sum(peer.slice.bytes for peer in status.peers if peer.slice is not None)
    columns: list[tuple[str, bool, Callable[[PeerStatus], Text]]] = [
        ("device", True, _name),
        ("address", width >= ROOM_FOR_ADDRESSES, _address),
        ("part of the model", True, lambda peer: _part(peer, whole, counts=width >= ROOM_FOR_COUNTS)),
        ("memory", True, _memory),
        ("compute", width >= ROOM_FOR_SPEED, _compute),
        ("reads", width >= ROOM_FOR_SPEED, _speed),
        ("round trip", True, _round_trip),
    ]
    shown = [column for column in columns if column[1]]
    for title, _, _ in shown:
        right = title in ("memory", "reads", "round trip")
        table.add_column(title, no_wrap=True, justify="right" if right else "left", overflow="ellipsis")
    for peer in status.peers:
        table.add_row(*(cell(peer) for _, _, cell in shown))
    return table


def _name(peer: PeerStatus) -> Text:
    dot, style = _DOTS.get(peer.state, ("?", "red"))
    return Text.assemble((dot, style), " ", (printable(peer.name), "bold" if peer.state == "self" else ""))


def _address(peer: PeerStatus) -> Text:
    return Text("this device" if peer.state == "self" else printable(peer.address or "-"), "dim")


def _part(peer: PeerStatus, whole: int, *, counts: bool) -> Text:
    if peer.slice is None:
        used = peer.state in ("self", "connected")
        return Text("none", "dim") if used else Text(peer.state, _DOTS.get(peer.state, ("", "red"))[1])
    part = peer.slice.bytes / max(whole, 1)
    text = Text.assemble((bar(part), "cyan"), f" {100 * part:3.0f} %")
    if counts:
        heads, ffn = (end - first for first, end in (peer.slice.heads, peer.slice.ffn))
        text.append(f"  {heads} heads, {ffn} ffn", "dim")
    return text


def _memory(peer: PeerStatus) -> Text:
    known = peer.memory_bytes if peer.memory_bytes is not None else peer.free_bytes
    if peer.slice is None and known is None:
        return Text("-", "dim")
    used = in_bytes(peer.slice.bytes + peer.slice.cache_bytes) if peer.slice else "0"
    return Text.assemble(used, (f" of {in_bytes(known)}" if known is not None else "", "dim"))


def _compute(peer: PeerStatus) -> Text:
    return Text("-", "dim") if peer.threads is None else Text(f"{peer.threads} × {printable(peer.isa or '?')}")


def _speed(peer: PeerStatus) -> Text:
    return Text("-", "dim") if peer.read_gbps is None else Text(f"{peer.read_gbps:.1f} GB/s")


def _round_trip(peer: PeerStatus) -> Text:
    if peer.rtt_us is None:
        return Text("-", "dim")
    return Text(in_microseconds(peer.rtt_us) + (f", {peer.mbps:.0f} Mbit/s" if peer.mbps is not None else ""))


def _notes(status: Status) -> list[Text]:
    """One line for each thing a person would ask about."""
    notes = []
    left_out = dict(status.layout.left_out) if status.layout else {}
    for peer in status.peers:
        reason = peer.reason or left_out.get(peer.id)
        if reason:
            notes.append(Text.assemble((f"{printable(peer.name)}: ", ""), (printable(reason), "yellow")))
    if status.model is not None and status.model.error:
        notes.append(Text.assemble(f"{printable(status.model.name)}: ", (printable(status.model.error), "red")))
    if status.fetch is not None:
        notes.append(_fetch(status.fetch))
    counts, cost = status.requests, status.exchange
    line = f"{counts.active} answering, {counts.answered} answered"
    if counts.failed:
        line += f", {counts.failed} failed"
    if counts.decode_tok_s is not None:
        line += f"; the last at {counts.decode_tok_s:.1f} tok/s"
    if cost is not None and cost.bytes_sent > 0:
        line += f" ({in_microseconds(cost.compute_us)} compute + {in_microseconds(cost.exchange_us)} exchange a token,"
        line += f" {in_bytes(round(cost.bytes_sent))} sent)"
    return [*notes, Text(line, "dim")]


def _fetch(fetch: FetchStatus) -> Text:
    """How far a file is on its way here, or why it does not come."""
    text = Text(f"fetching {printable(fetch.name)}: ")
    if fetch.wanted_bytes:
        part = fetch.done_bytes / fetch.wanted_bytes
        text.append(bar(part), "cyan").append(f" {in_bytes(fetch.done_bytes)} of {in_bytes(fetch.wanted_bytes)}")
    if fetch.sources:
        text.append(f" from {', '.join(printable(name) for name in fetch.sources)}")
    return text.append(f" {printable(fetch.error)}", "yellow") if fetch.error else text
