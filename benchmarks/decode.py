"""Decode and prompt speed of real daemons with one core each: one, two that share the model, two apart; in turns.

    python -m benchmarks.decode MODEL.gguf [--runs 5] [--prompt 128] [--decode 64]

All run at once and idle while others are measured; runs alternate, so that what else the machine does hits all. A
daemon has one thread for its kernels and is bound to one core, all its threads, as if it were a device of its own. Two
daemons apart, each with the whole model and an answer of its own, answer at the same time: the sum of their speeds is
what two cores of this machine can do, with its memory shared and nothing to exchange. Writes
benchmarks/runs/DATE-CPU-ISA/decode.json: command, versions, raw figures, and a hash of the tokens, because a fast wrong
answer is none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.records import keep
from tests.system.mesh import Daemon, Mesh

WARM_UP = 256  # tokens
SET_UPS = ("1 daemon x 1 core", "2 daemons x 1 core", "2 daemons apart")


def main() -> None:
    """Measures, prints a table, keeps the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=64)
    chosen = parser.parse_args()
    temporary = tempfile.TemporaryDirectory
    with temporary() as one, temporary() as two, temporary() as three, ExitStack() as stack:
        alone, pair, apart = (stack.enter_context(Mesh(Path(folder))) for folder in (one, two, three))
        figures = _measure(alone, pair, apart, chosen)
    _keep(figures, chosen)


def _measure(alone: Mesh, pair: Mesh, apart: Mesh, chosen: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    single = alone.start("single", model=chosen.model)
    left, right = (pair.start(name, model=chosen.model) for name in ("left", "right"))
    alone.wait_ranks(1, single, within_s=300)
    pair.wait_ranks(2, left, right, within_s=300)
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in SET_UPS}
    other = apart.start("other", model=chosen.model)
    apart.wait_ranks(1, other, within_s=300)
    one, two, *_ = sorted(os.sched_getaffinity(0))
    for daemon, core in ((single, one), (left, one), (right, two), (other, two)):
        _bind(daemon, core)
    for daemon in (single, left):  # warms caches, and is long enough for the ranks to find the speeds they really have
        _run(daemon, 1, chosen.prompt, WARM_UP)
    for i in range(chosen.runs):
        for n, (name, daemons) in enumerate(zip(SET_UPS, ((single,), (left,), (single, other)), strict=True)):
            with ThreadPoolExecutor() as pool:
                runs = [
                    pool.submit(_run, d, 4 * i + n + k + 2, chosen.prompt, chosen.decode) for k, d in enumerate(daemons)
                ]
            figure = _sum([run.result() for run in runs])
            figures[name].append(figure)
            print(f"{name:22} {figure['decode_tok_s']:7.2f} tok/s decode {figure['prefill_tok_s']:8.1f} tok/s prompt")
    return figures


def _bind(daemon: Daemon, core: int) -> None:
    for thread in Path(f"/proc/{daemon.process.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def _sum(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """What daemons did at the same time: speeds add up, the rest is the first one's."""
    speeds: dict[str, Any] = {key: sum(figure[key] for figure in figures) for key in ("decode_tok_s", "prefill_tok_s")}
    return figures[0] | speeds


def _run(daemon: Daemon, variant: int, n_prompt: int, n_decode: int) -> dict[str, Any]:
    """One answer; each variant has its own prompt, so that no prefix is reused.

    Not streamed, with the daemon's own measure of decoding: a reader of a stream would take its time from the one
    core that a second rank has here and a first one does not need.
    """
    prompt = [(variant * 7919 + i * 31) % 20000 + 100 for i in range(n_prompt)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": n_decode, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    answer: Any = daemon.client.post("/v1/completions", {**body, "return_token_ids": True})
    whole_s = time.perf_counter() - start
    tokens, decode_tok_s = answer["choices"][0]["token_ids"], answer["meshllm"]["decode_tok_s"]
    exchange = daemon.status().exchange
    return {
        "prefill_tok_s": n_prompt / (whole_s - (len(tokens) - 1) / decode_tok_s),
        "decode_tok_s": decode_tok_s,
        "tokens_sha256": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
        "compute_us": exchange and exchange.compute_us,
        "exchange_us": exchange and exchange.exchange_us,
        "bytes_sent": exchange and exchange.bytes_sent,
        "load": Path("/proc/loadavg").read_text().split()[0],
    }


def _keep(figures: dict[str, list[dict[str, Any]]], chosen: argparse.Namespace) -> None:
    medians = {name: statistics.median(run["decode_tok_s"] for run in runs) for name, runs in figures.items()}
    prompts = {name: statistics.median(run["prefill_tok_s"] for run in runs) for name, runs in figures.items()}
    for name in figures:
        decode, prompt = (speeds[name] / speeds[SET_UPS[0]] for speeds in (medians, prompts))
        print(f"median {name:22} {medians[name]:7.2f} tok/s decode {prompts[name]:8.1f} tok/s prompt", end="")
        print(f"   x {decode:.2f} and {prompt:.2f}")
    command = f"python -m benchmarks.decode {chosen.model.name} {' '.join(sys.argv[2:])}".strip()
    keep("decode", command, chosen.model, median_decode_tok_s=medians, median_prefill_tok_s=prompts, runs=figures)


if __name__ == "__main__":
    main()
