"""Decode and prompt speed of real daemons: one with one thread against two with one thread each, in turns.

    python -m benchmarks.decode MODEL.gguf [--runs 5] [--prompt 128] [--decode 64]

Both set-ups run at once and idle while the other is measured; a run of each alternates, so that what else the machine
does hits both. Writes benchmarks/runs/DATE-CPU/decode.json: command, versions, raw figures, and a hash of the tokens,
because a fast wrong answer is none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from meshllm import __version__
from tests.system.mesh import Daemon, Mesh

RUNS = Path(__file__).parent / "runs"


def main() -> None:
    """Measures, prints a table, keeps the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=64)
    chosen = parser.parse_args()
    temporary = tempfile.TemporaryDirectory
    with temporary() as one, temporary() as two, Mesh(Path(one)) as alone, Mesh(Path(two)) as pair:
        figures = _measure(alone, pair, chosen)
    _keep(figures, chosen)


def _measure(alone: Mesh, pair: Mesh, chosen: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    single = alone.start("single", model=chosen.model)
    left, right = (pair.start(name, model=chosen.model) for name in ("left", "right"))
    alone.wait_ranks(1, single, within_s=300)
    pair.wait_ranks(2, left, right, within_s=300)
    figures: dict[str, list[dict[str, Any]]] = {"1 daemon x 1 thread": [], "2 daemons x 1 thread": []}
    for i in range(-1, chosen.runs):  # the first warms the page cache and the branch predictors, and does not count
        for name, daemon in zip(figures, (single, left), strict=True):
            figure = _run(daemon, i + 2, chosen)
            if i >= 0:
                figures[name].append(figure)
                print(
                    f"{name:22} {figure['decode_tok_s']:7.2f} tok/s decode {figure['prefill_tok_s']:8.1f} tok/s prompt"
                )
    return figures


def _run(daemon: Daemon, variant: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """One answer; each variant has its own prompt, so that no prefix is reused. Times are the client's."""
    prompt = [(variant * 7919 + i * 31) % 20000 + 100 for i in range(chosen.prompt)]
    body = {"prompt": prompt, "max_tokens": chosen.decode, "temperature": 0, "ignore_eos": True, "stream": True}
    times, tokens, start = [], [], time.perf_counter()
    for event in daemon.client.stream("/v1/completions", {**body, "return_token_ids": True}):
        for choice in event["choices"]:  # type: ignore[union-attr]
            if choice.get("token_ids"):  # type: ignore[union-attr]
                times.append((time.perf_counter(), len(choice["token_ids"])))  # type: ignore[index,arg-type,call-overload]
                tokens += choice["token_ids"]  # type: ignore[index,call-overload,operator]
    (first, n_first), (last, _) = times[0], times[-1]
    exchange = daemon.status().exchange
    return {
        "prefill_tok_s": chosen.prompt / (first - start),
        "decode_tok_s": (len(tokens) - n_first) / (last - first),
        "tokens_sha256": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
        "exchange_us": exchange and exchange.exchange_us,
        "bytes_sent": exchange and exchange.bytes_sent,
        "load": Path("/proc/loadavg").read_text().split()[0],
    }


def _cpu() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return names[0] if names else platform.machine()


def _keep(figures: dict[str, list[dict[str, Any]]], chosen: argparse.Namespace) -> None:
    medians = {name: statistics.median(run["decode_tok_s"] for run in runs) for name, runs in figures.items()}
    prompts = {name: statistics.median(run["prefill_tok_s"] for run in runs) for name, runs in figures.items()}
    for name in figures:
        print(f"median {name:22} {medians[name]:7.2f} tok/s decode {prompts[name]:8.1f} tok/s prompt")
    one, two = medians
    print(f"two / one: decode {medians[two] / medians[one]:.2f}, prompt {prompts[two] / prompts[one]:.2f}")
    folder = RUNS / f"{date.today().isoformat()}-{_cpu().lower().replace(' ', '-')[:40]}"
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "command": f"python -m benchmarks.decode {chosen.model.name} {' '.join(sys.argv[2:])}".strip(),
        "meshllm": __version__,
        "python": sys.version.split()[0],
        "cpu": _cpu(),
        "model_bytes": chosen.model.stat().st_size,
        "median_decode_tok_s": medians,
        "median_prefill_tok_s": prompts,
        "runs": figures,
    }
    (folder / f"decode-{chosen.model.stem}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
