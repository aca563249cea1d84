"""What `status` shows: values in, rich renderables out. Pure: prints nothing, reads no clock and no terminal."""

from __future__ import annotations

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshllm.cli.text import bar, in_bytes, in_microseconds, in_time, printable
from meshllm.status import LayoutStatus, PeerState, PeerStatus, Status

WIDE = 104  # columns from which addresses are shown

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
    """The whole of `meshllm status`: two lines of head, a table of devices, notes on what needs an explanation."""
    parts: list[Text | Table | Padding] = [_head(status), _serving(status), Text("")]
    parts.append(_devices(status, wide=width >= WIDE))
    notes = _notes(status)
    if notes:
        parts += [Text(""), *notes]
    return Group(*parts)


def _head(status: Status) -> Text:
    head = Text.assemble((printable(status.name), "bold"), "  ")
    facts = (f"meshllm {status.build}", f"mesh {status.mesh_tag}", f"up {in_time(status.uptime_s)}")
    return head.append(" · ".join(printable(fact) for fact in facts), "dim")


def _serving(status: Status) -> Text:
    line = Text.assemble((status.state, _STATES.get(status.state, "")))
    model, layout = status.model, status.layout
    if model is not None:
        line.append("  ").append(printable(model.name), "bold")
        line.append(f"  {printable(model.architecture)}, {in_bytes(model.file_bytes)}", "dim")
    if layout is not None:
        n = len(layout.ranks)
        line.append(f"  on {n} device{'s' if n != 1 else ''}", "")
        line.append(f"  {layout.slots} × {layout.context} tokens", "dim")
        if n > 1:
            line.append(f", {layout.exchange} exchange", "dim")
        if layout.predicted_decode_tok_s > 0:
            line.append(f", about {layout.predicted_decode_tok_s:.0f} tok/s expected", "dim")
    if status.detail and (layout is None or status.state != "serving"):
        line.append("  " + printable(status.detail))
    return line


def _devices(status: Status, *, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    table.add_column("device", no_wrap=True, max_width=28)
    if wide:
        table.add_column("address", no_wrap=True)
    table.add_column("part of the model", no_wrap=True)
    table.add_column("memory", no_wrap=True, justify="right")
    table.add_column("compute", no_wrap=True)
    table.add_column("round trip", no_wrap=True, justify="right")
    whole = sum(peer.slice.bytes for peer in status.peers if peer.slice is not None)
    for peer in status.peers:
        cells = [_name(peer, status.layout)]
        if wide:
            cells.append(Text("this device" if peer.state == "self" else printable(peer.address or "-"), "dim"))
        cells += [_part(peer, whole), _memory(peer), _compute(peer), _round_trip(peer)]
        table.add_row(*cells)
    return table


def _name(peer: PeerStatus, layout: LayoutStatus | None) -> Text:
    dot, style = _DOTS.get(peer.state, ("?", "red"))
    name = Text.assemble((dot, style), " ", (printable(peer.name), "bold" if peer.state == "self" else ""))
    if layout is not None and layout.driver == peer.id:
        name.append(" drives", "dim")
    return name


def _part(peer: PeerStatus, whole: int) -> Text:
    if peer.slice is None:
        word = {"self": "none", "connected": "none"}.get(peer.state, peer.state)
        return Text(word, _DOTS.get(peer.state, ("", "dim"))[1] if word == peer.state else "dim")
    heads, ffn, part = peer.slice.heads, peer.slice.ffn, peer.slice.bytes / max(whole, 1)
    text = Text.assemble((bar(part), "cyan"), f" {100 * part:3.0f} %  ")
    return text.append(f"heads {_range(heads)}, ffn {_range(ffn)}", "dim")


def _range(half_open: tuple[int, int]) -> str:
    first, end = half_open
    return "none" if end <= first else f"{first}–{end - 1}"


def _memory(peer: PeerStatus) -> Text:
    if peer.slice is None and peer.free_bytes is None and peer.memory_bytes is None:
        return Text("-", "dim")
    used = in_bytes(peer.slice.bytes) if peer.slice else "0"
    known = peer.memory_bytes if peer.memory_bytes is not None else peer.free_bytes
    return Text.assemble(used, (f" of {in_bytes(known)}", "dim"))


def _compute(peer: PeerStatus) -> Text:
    if peer.threads is None:
        return Text("-", "dim")
    text = Text(f"{peer.threads} × {printable(peer.isa or '?')}")
    if peer.read_gbps is not None:
        text.append(f"  {peer.read_gbps:.1f} GB/s", "dim")
    return text


def _round_trip(peer: PeerStatus) -> Text:
    return Text("-", "dim") if peer.rtt_us is None else Text(in_microseconds(peer.rtt_us))


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
    counts, cost = status.requests, status.exchange
    line = f"{counts.active} answering, {counts.answered} answered"
    if counts.failed:
        line += f", {counts.failed} failed"
    if counts.decode_tok_s is not None:
        line += f"; the last at {counts.decode_tok_s:.1f} tok/s"
    if cost is not None and cost.exchange_us > 0:
        line += f" ({in_microseconds(cost.compute_us)} compute + {in_microseconds(cost.exchange_us)} exchange a token,"
        line += f" {in_bytes(round(cost.bytes_sent))} sent)"
    return [*notes, Text(line, "dim")]
