"""`meshllm plan`: the layout that devices would get, before anything runs: of devices described here, which need not
exist, or of those of the daemon's mesh.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from meshllm.cli.options import client_of, model_path, socket_option
from meshllm.cli.status import fetch_status
from meshllm.cli.text import in_bytes, in_microseconds, printable
from meshllm.errors import UnavailableError, UsageError
from meshllm.layout.cost import LinkTable, predict
from meshllm.layout.layout import Device, Layout, LinkSpeed, NodeId
from meshllm.layout.planner import CannotPlan
from meshllm.layout.planner import plan as make_plan
from meshllm.model.slicing import ModelShape, Range

SHARE_OF_MEMORY: Final = 0.8  # that a daemon gives where nothing else runs and nothing is configured
OPERATIONS_PER_BYTE: Final = 12.0  # where gops is not given: what the kernels do on a Pi 5 and on small x86 machines


@dataclass(frozen=True, slots=True)
class Described:
    """Devices and the links between them, and what was assumed of them, in words."""

    devices: tuple[Device, ...]
    names: dict[NodeId, str]
    links: tuple[LinkSpeed, ...]
    assumed: tuple[str, ...]


@click.command()
@click.argument("model", required=False)
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="name=N,gbps=G,mem=SIZE[,gops=O]",
    help="A device that may not exist: gigabytes a second that it reads, its memory, giga-operations a second of its"
    " prompt kernels (`meshllm status` shows both speeds of real ones). Repeatable. Without it: the daemon's mesh.",
)
@click.option("--rtt", "rtt_us", type=click.FloatRange(1, 1e6), default=300.0, show_default=True,
              metavar="US", help="Round trip between described devices, microseconds.")  # fmt: skip
@click.option("--mbps", type=click.FloatRange(1, 1e6), default=940.0, show_default=True,
              metavar="MBPS", help="Throughput between described devices, megabits a second.")  # fmt: skip
@click.option("--context", metavar="N", help="Positions of a sequence.")
@click.option("--slots", metavar="N", help="Sequences answered at once.")
@click.option("--layout", metavar="auto|all|N", help="Devices that share the model.")
@click.option("--exchange", metavar="q8_0|f16|f32", help="Precision of partial sums between devices.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--state-dir", metavar="DIR", help="Folder that holds the models.")
@socket_option
def plan(
    model: str | None,
    devices: tuple[str, ...],
    rtt_us: float,
    mbps: float,
    context: str | None,
    slots: str | None,
    layout: str | None,
    exchange: str | None,
    as_json: bool,
    state_dir: str | None,
    socket: Path | None,
) -> None:
    """Show the layout that MODEL would get: parts, memory, predicted speed, and why a device is left out.

    MODEL is a name or a file; the only or last pulled one if not given. What is not set by a flag is as a daemon here
    would have it.
    """
    from meshllm.config import load_config

    asked = {"model": model, "context": context, "slots": slots, "layout": layout, "exchange": exchange}
    config = load_config({**asked, "state_dir": state_dir}, os.environ)
    if devices and socket:
        raise UsageError("--socket is of a daemon, whose mesh is planned for without --device: leave one out")
    path = model_path(config)
    shape = _shape_of(path)
    described = _described(devices, rtt_us, mbps) if devices else _of_mesh(socket)
    found = make_plan(
        described.devices,
        described.links,
        shape,
        mode=config.layout,
        context=config.context,
        slots=config.slots,
        exchange=config.exchange,
    )
    if isinstance(found, CannotPlan):
        raise UnavailableError(found.reason)
    alone = {d.node: _alone_tok_s(shape, d, found) for d in described.devices}
    click.echo(_as_json(found, described, alone) if as_json else "\n".join(_lines(path, found, described, alone)))


def _shape_of(path: Path) -> ModelShape:
    from meshllm.model.model_file import ModelFile
    from meshllm.model.weight_sizes import measure_shape

    with ModelFile.open(path) as file:
        return measure_shape(file.hyperparameters, file.gguf.tensors.values())


def _described(texts: tuple[str, ...], rtt_us: float, mbps: float) -> Described:
    found = [_device(text) for text in texts]
    names = [device.node for device, _ in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--device: two devices are named {twice!r}: give each a name of its own")
    links = tuple(LinkSpeed(a=a, b=b, rtt_us=rtt_us, mbps=mbps) for i, a in enumerate(names) for b in names[:i])
    assumed = [text for _, text in found if text]
    if len(names) > 1:
        assumed.append(f"links of {in_microseconds(rtt_us)} and {mbps:g} Mbit/s (--rtt, --mbps)")
    devices = tuple(device for device, _ in found)
    return Described(devices, {name: str(name) for name in names}, links, tuple(assumed))


def _device(text: str) -> tuple[Device, str]:
    """The device, and what is assumed of it, if anything. Raises UsageError."""
    from meshllm.settings import read_bytes

    example = "expected for example name=pi5,gbps=9.5,mem=8G"
    pairs = [part.partition("=") for part in text.split(",")]
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    wrong = next((key for key in fields if key not in ("name", "gbps", "mem", "gops")), None)
    missing = next((key for key in ("name", "gbps", "mem") if not fields.get(key)), None)
    if wrong is not None or missing is not None or len(fields) != len(pairs):
        what = f"{wrong!r} is no field" if wrong is not None else f"{missing or 'a field'} is missing or there twice"
        raise UsageError(f"--device {text!r}: {what}; {example}")
    gbps = _positive(text, "gbps", fields["gbps"])
    gops = _positive(text, "gops", fields["gops"]) if "gops" in fields else OPERATIONS_PER_BYTE * gbps
    try:
        memory = read_bytes(fields["mem"])
    except ValueError as error:
        raise UsageError(f"--device {text!r}: mem: {error}") from None
    if memory is None:
        raise UsageError(f"--device {text!r}: mem: expected bytes, like 8G")
    name = NodeId(fields["name"])
    device = Device(node=name, read_gbps=gbps, matmul_gops=gops, usable_bytes=int(SHARE_OF_MEMORY * memory))
    return device, "" if "gops" in fields else f"gops={gops:g} of {name}"


def _positive(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise UsageError(f"--device {text!r}: {name}: expected a number above 0, found {value!r}")
    return number


def _of_mesh(socket: Path | None) -> Described:
    """The devices that the daemon is connected with, and itself."""
    peers = [p for p in fetch_status(client_of(socket)).peers if p.state in ("self", "connected")]
    devices = tuple(
        Device(
            node=NodeId(p.id),
            read_gbps=p.read_gbps or 0.0,
            matmul_gops=p.matmul_gops or 0.0,
            usable_bytes=p.memory_bytes or 0,
        )
        for p in peers
    )
    own = next(NodeId(p.id) for p in peers if p.state == "self")
    links = [LinkSpeed(a=own, b=NodeId(p.id), rtt_us=p.rtt_us, mbps=p.mbps) for p in peers if p.rtt_us]
    others = [link.b for link in links]
    rtt_us = max((link.rtt_us for link in links), default=0.0)
    mbps = min((link.mbps for link in links if link.mbps is not None), default=None)
    links += [LinkSpeed(a=a, b=b, rtt_us=rtt_us, mbps=mbps) for i, a in enumerate(others) for b in others[:i]]
    assumed = ("links between other devices as the slowest of this one",) if len(others) > 1 else ()
    return Described(devices, {NodeId(p.id): printable(p.name) for p in peers}, tuple(links), assumed)


def _alone_tok_s(shape: ModelShape, device: Device, layout: Layout) -> float | None:
    """Decoded tokens a second of a device that holds everything; None where it has no room for that."""
    whole = shape.whole()
    needed = shape.slice_bytes(whole) + shape.position_bytes(whole) * layout.context * layout.slots
    if device.read_gbps <= 0 or needed > device.usable_bytes:
        return None
    return 1 / predict(shape, [device], [whole], LinkTable([]), layout.exchange).decode_s


def _lines(path: Path, layout: Layout, described: Described, alone: dict[NodeId, float | None]) -> list[str]:
    n, of = len(layout.shares), len(described.devices)
    usable = {device.node: device.usable_bytes for device in described.devices}
    rows: list[tuple[str, ...]] = [
        ("device", "heads", "hidden units", "vocabulary", "weights", "cache", "of memory", "alone")
    ]
    for share in layout.shares:
        part, tok_s = share.slice, alone[share.node]
        rows.append(
            (
                described.names[share.node],
                *(f"{r.start} to {r.stop}" if r else "none" for r in (part.heads, part.ffn, part.vocab)),
                in_bytes(share.slice_bytes),
                in_bytes(share.cache_bytes),
                in_bytes(usable[share.node]),
                "too large" if tok_s is None else f"{tok_s:.1f} tok/s",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    p = layout.prediction
    speed = f"expected: prompt {p.prefill_tok_s:.1f} tok/s, decode {p.decode_tok_s:.1f} tok/s"
    if p.wire_bytes_per_token:
        speed += f", {in_bytes(p.wire_bytes_per_token)} sent a token by each device at most"
    head = f"{printable(path.stem)} on {n} of {of} devices, {layout.slots} x {layout.context} tokens"
    left_out = [f"left out: {described.names[node]}: {reason}" for node, reason in layout.left_out]
    assumed = [f"assumed: {'; '.join(described.assumed)}"] if described.assumed else []
    return [head, "", *table, "", speed, *left_out, *assumed]


def _as_json(layout: Layout, described: Described, alone: dict[NodeId, float | None]) -> str:
    def pair(part: Range) -> list[int]:
        return [part.start, part.stop]

    ranks = [
        {
            "name": described.names[share.node],
            "heads": pair(share.slice.heads),
            "ffn": pair(share.slice.ffn),
            "vocab": pair(share.slice.vocab),
            "weight_bytes": share.slice_bytes,
            "cache_bytes": share.cache_bytes,
            "alone_decode_tok_s": alone[share.node],
        }
        for share in layout.shares
    ]
    left_out = [{"name": described.names[node], "reason": reason} for node, reason in layout.left_out]
    prediction = {name: getattr(layout.prediction, name) for name in layout.prediction.__struct_fields__}
    settings = {"context": layout.context, "slots": layout.slots, "exchange": layout.exchange}
    found = {"version": 1, "ranks": ranks, **settings, **prediction, "left_out": left_out}
    return json.dumps({**found, "assumed": list(described.assumed)}, indent=2)
