"""`meshllm bench`: how fast a model runs in this process alone, or with --mesh on all devices through the daemon.

Alone it needs no daemon and no network. With --mesh it asks the daemon for one answer and reports, beside its speed,
what exchanging partial sums costs a token.
"""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from meshllm.cli.client import DaemonClient, Json
from meshllm.cli.options import client_of, model_path, socket_option
from meshllm.cli.status import fetch_status
from meshllm.cli.text import in_bytes, in_microseconds
from meshllm.errors import UsageError
from meshllm.settings import MAX_THREADS

FIRST_ID, LAST_ID = 100, 1000  # token ids that every vocabulary has
COSTS_COME_S = 0.5  # after its last step a daemon knows what the answer cost


@dataclass(frozen=True, slots=True)
class MeshResult:
    """Of one answer on the mesh. Bytes and times are for a decoded token, as the rank that was asked saw them."""

    ranks: list[str]
    prefill_tok_s: float | None
    decode_tok_s: float | None
    exchange_bytes_sent: float | None
    exchange_bytes_received: float | None
    exchange_us: float | None
    compute_us: float | None


@click.command()
@click.option(
    "-m", "--model", metavar="MODEL", help="Name or file of the model; the only or last pulled one if not given."
)
@click.option(
    "--threads", type=click.IntRange(1, MAX_THREADS), metavar="N", help="Threads; the usable CPUs if not given."
)
@click.option("--isa", default="", metavar="ISA", help="Instruction set of the kernels; the best that runs here.")
@click.option("--prompt", "n_prompt", type=click.IntRange(1), default=128, show_default=True, help="Prompt tokens.")
@click.option("--decode", "n_decode", type=click.IntRange(2), default=32, show_default=True, help="Decoded tokens.")
@click.option("--bandwidth", is_flag=True, help="Also measure how fast memory is read: the limit of decoding.")
@click.option("--ops", is_flag=True, help="Measure the products with weights, by format, instead of a model.")
@click.option("--mesh", is_flag=True, help="Measure the daemon's mesh instead of this process.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--state-dir", metavar="DIR", help="Folder that holds the models.")
@socket_option
def bench(
    model: str | None,
    threads: int | None,
    isa: str,
    n_prompt: int,
    n_decode: int,
    bandwidth: bool,
    ops: bool,
    mesh: bool,
    as_json: bool,
    state_dir: str | None,
    socket: Path | None,
) -> None:
    """Measure prompt and decode speed, on this device alone or, with --mesh, on all together."""
    if mesh:
        if threads or isa or state_dir or bandwidth or ops:
            raise UsageError(
                "--mesh measures the daemon as it runs; leave out --threads, --isa, --bandwidth, --ops and --state-dir"
            )
        client = client_of(socket)
        _check_room(client, n_prompt, n_decode)
        result = _measure_mesh(client, model, n_prompt, n_decode)
        _show(asdict(result), as_json, _mesh_lines(result))
        return
    if socket:
        raise UsageError("--socket is of a daemon, which only --mesh measures; add --mesh, or leave it out")
    from meshllm.config import load_config
    from meshllm.engine.benchmark import run_benchmark
    from meshllm.kernels.cpu import usable_cpus

    if ops:
        if model:
            raise UsageError("--ops measures products, not a model; leave out --model")
        _measure_ops(isa, threads or usable_cpus(), as_json)
        return
    own = run_benchmark(
        model_path(load_config({"state_dir": state_dir, "model": model}, os.environ)),
        threads=threads or usable_cpus(),
        n_prompt=n_prompt,
        n_decode=n_decode,
        isa=isa,
        bandwidth=bandwidth,
    )
    plural = "s" if own.threads != 1 else ""
    lines = [
        f"{own.isa}, {own.threads} thread{plural}",
        f"prompt   {own.prefill_tok_s:9.1f} tok/s  ({n_prompt} tokens)",
        f"decode   {own.decode_tok_s:9.1f} tok/s  ({n_decode} tokens, {own.decode_gbps:.1f} GB/s of weights)",
        f"load     {own.load_s:9.2f} s",
        f"memory   {own.memory_mb:9.0f} MB",
    ]
    if own.bandwidth_gbps:
        share = own.decode_gbps / own.bandwidth_gbps
        lines.append(f"reading  {own.bandwidth_gbps:9.1f} GB/s   (memory, the limit of decoding: {share:.0%} of it)")
    _show(asdict(own), as_json, lines)


def _measure_ops(isa: str, threads: int, as_json: bool) -> None:
    from meshllm.engine.benchmark import measure_bandwidth
    from meshllm.engine.op_benchmark import measure_ops
    from meshllm.kernels.binding import Kernels

    kernels = Kernels(isa, threads)
    gbps = measure_bandwidth(kernels)
    if as_json:
        found = [asdict(speed) for speed in measure_ops(kernels)]
        click.echo(json.dumps({"isa": kernels.isa, "threads": threads, "bandwidth_gbps": gbps, "ops": found}))
        return
    click.echo(f"{kernels.isa}, {threads} thread{'s' * (threads != 1)}, memory {gbps:.1f} GB/s")
    click.echo("format   decode             4 rows  8 rows  prompt")
    for speed in measure_ops(kernels):
        decode = f"{speed.decode_gbps:6.1f} GB/s {speed.decode_gbps / gbps:4.0%}"
        click.echo(
            f"{speed.format:7} {decode}   {speed.four:5.2f} x {speed.eight:5.2f} x  {speed.prompt_gops:7.1f} Gop/s"
        )


def _show(fields: dict[str, object], as_json: bool, lines: list[str]) -> None:
    if as_json:
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in fields.items()}
        click.echo(json.dumps(rounded))
    else:
        click.echo("\n".join(lines))


def _check_room(client: DaemonClient, n_prompt: int, n_decode: int) -> None:
    """Raises UsageError for more tokens than a sequence of the mesh holds: fewer would be measured than asked for."""
    layout = fetch_status(client).layout
    if layout is not None and n_prompt + n_decode > layout.context:
        raise UsageError(f"--prompt and --decode: together at most the {layout.context} positions that the mesh serves")


def _measure_mesh(client: DaemonClient, model: str | None, n_prompt: int, n_decode: int) -> MeshResult:
    """One answer to a prompt that nobody has asked before, so that no prefix of it is in a cache."""
    prompt: list[Json] = [random.randint(FIRST_ID, LAST_ID) for _ in range(n_prompt)]
    body: dict[str, Json] = {"prompt": prompt, "max_tokens": n_decode, "temperature": 0, "ignore_eos": True}
    if model is not None:
        body["model"] = model
    body.update({"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True})
    first_s: float | None = None
    ours: dict[str, Json] = {}
    start = time.perf_counter()
    with closing(client.stream("/v1/completions", body)) as events:
        for event in events:
            if first_s is None and _has_tokens(event):
                first_s = time.perf_counter() - start
            if isinstance(last := event.get("meshllm"), dict):
                ours = last
    time.sleep(COSTS_COME_S)
    cost = fetch_status(client).exchange
    ranks, tok_s = ours.get("ranks"), ours.get("decode_tok_s")
    return MeshResult(
        ranks=[str(name) for name in ranks] if isinstance(ranks, list) else [],
        prefill_tok_s=n_prompt / first_s if first_s else None,
        decode_tok_s=float(tok_s) if isinstance(tok_s, int | float) else None,
        exchange_bytes_sent=None if cost is None else cost.bytes_sent,
        exchange_bytes_received=None if cost is None else cost.bytes_received,
        exchange_us=None if cost is None else cost.exchange_us,
        compute_us=None if cost is None else cost.compute_us,
    )


def _has_tokens(event: dict[str, Json]) -> bool:
    choices = event.get("choices")
    return isinstance(choices, list) and any(isinstance(c, dict) and c.get("token_ids") for c in choices)


def _mesh_lines(result: MeshResult) -> list[str]:
    lines = [f"ranks    {' + '.join(result.ranks) or 'unknown'}"]
    if result.prefill_tok_s:
        lines.append(f"prompt   {result.prefill_tok_s:9.1f} tok/s")
    if result.decode_tok_s:
        lines.append(f"decode   {result.decode_tok_s:9.1f} tok/s")
    if result.exchange_us is None or result.compute_us is None:
        return [*lines, "exchange no figures: they are of devices that hold a part of the model (meshllm status)"]
    lines.append(f"compute  {in_microseconds(result.compute_us):>9} a token")
    lines.append(f"exchange {in_microseconds(result.exchange_us):>9} a token")
    sent, received = (round(n or 0) for n in (result.exchange_bytes_sent, result.exchange_bytes_received))
    return [*lines, f"sent     {in_bytes(sent):>9} a token, received {in_bytes(received)}"]
