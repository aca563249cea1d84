"""Our kernels and llama.cpp's on the same file and threads, in turns: prompt and decode speed of each.

    python -m benchmarks.compare MODEL.gguf --llama avx2=PATH --llama avx512=PATH [--isa avx2 --isa avx512-vnni]
                                 [--threads 1 2] [--prompt 512] [--decode 64] [--runs 5]

PATH: llama-bench of a build with just the instruction sets that its name says (GGML_NATIVE=OFF). Decode is measured
behind the prompt on both sides, with caches in f16 and, on theirs, flash attention off. All runs of a set-up are
processes of their own; runs alternate, so that what else the machine does hits all. Beside each speed stands its ratio
to the first --llama, beside decode its share of the limit: memory bandwidth by the bytes that a token reads. Writes
benchmarks/runs/DATE-CPU-ISA/compare-MODEL.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import keep
from meshllm.kernels.binding import list_isas


@dataclass(frozen=True)
class SetUp:
    """A program, an instruction set and a number of threads; run() -> (prompt tok/s, decode tok/s)."""

    name: str
    threads: int
    run: Callable[[], tuple[float, float]]


def main() -> None:
    """Measures, prints a table, keeps the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", action="append", default=[], metavar="NAME=PATH", help="llama-bench of a build")
    parser.add_argument("--isa", action="append", default=[], help="of ours; all that run here if none is given")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    chosen = parser.parse_args()
    set_ups = _set_ups(chosen)
    for set_up in set_ups:
        set_up.run()  # the file is in the system's cache from now on
    figures: dict[str, list[tuple[float, float]]] = {f"{s.name}, {s.threads}": [] for s in set_ups}
    for _ in range(chosen.runs):
        for set_up in set_ups:
            figures[f"{set_up.name}, {set_up.threads}"].append(set_up.run())
    limits = {n: _limit(chosen.model, n) for n in chosen.threads}
    _print(set_ups, figures, limits)
    command = f"python -m benchmarks.compare {chosen.model.name} {' '.join(_without_paths(sys.argv[2:]))}".strip()
    keep("compare", command, chosen.model, limit_tok_s=limits, runs=figures)


def _set_ups(chosen: argparse.Namespace) -> list[SetUp]:
    isas = chosen.isa or [name for name, runs in list_isas() if runs and name != "scalar"]
    found = []
    for threads in chosen.threads:
        for word in chosen.llama:
            name, _, path = word.partition("=")
            found.append(SetUp(f"llama.cpp {name}", threads, _llama(path, chosen, threads)))
        found += [SetUp(f"meshllm {isa}", threads, _ours(isa, chosen, threads)) for isa in isas]
    return found


def _ours(isa: str, chosen: argparse.Namespace, threads: int) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        words = ["--isa", isa, "--prompt", str(chosen.prompt), "--decode", str(chosen.decode)]
        found = _bench(chosen.model, threads, *words)
        return found["prefill_tok_s"], found["decode_tok_s"]

    return run


def _llama(path: str, chosen: argparse.Namespace, threads: int) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        words = [path, "-m", str(chosen.model), "-t", str(threads), "-r", "1", "-fa", "0", "-o", "json"]
        prompt = _speed([*words, "-p", str(chosen.prompt), "-n", "0"])
        return prompt, _speed([*words, "-p", "0", "-n", str(chosen.decode), "-d", str(chosen.prompt)])

    return run


def _speed(words: list[str]) -> float:
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    (found,) = json.loads(done.stdout)
    return float(found["avg_ts"])


def _limit(model: Path, threads: int) -> float:
    """Tokens a second, if decoding read its weights as fast as memory gives them."""
    found = _bench(model, threads, "--prompt", "1", "--decode", "8", "--bandwidth")
    return found["bandwidth_gbps"] * found["decode_tok_s"] / found["decode_gbps"]


def _bench(model: Path, threads: int, *words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "meshllm", "bench", "--json", "-m", str(model), "--threads", str(threads)]
    done = subprocess.run([*command, *words], check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _print(set_ups: list[SetUp], figures: dict[str, list[tuple[float, float]]], limits: dict[int, float]) -> None:
    print(f"{'tok/s':26} threads   prompt     x    decode     x  of limit   spread")
    firsts: dict[int, tuple[float, float]] = {}
    for set_up in set_ups:
        runs = figures[f"{set_up.name}, {set_up.threads}"]
        prompt, decode = (statistics.median(run[i] for run in runs) for i in (0, 1))
        first = firsts.setdefault(set_up.threads, (prompt, decode))
        print(f"{set_up.name:26} {set_up.threads:7} {prompt:8.1f} {prompt / first[0]:5.2f}", end="")
        spread = f"{min(run[1] for run in runs):.1f} to {max(run[1] for run in runs):.1f}"
        print(f" {decode:9.1f} {decode / first[1]:5.2f} {decode / limits[set_up.threads]:9.0%}   {spread}")
    print("the limit of decoding: " + ", ".join(f"{tok_s:.1f} with {n}" for n, tok_s in limits.items()))


def _without_paths(words: list[str]) -> list[str]:
    return [word.partition("=")[0] if "=" in word else word for word in words]


if __name__ == "__main__":
    main()
