"""A mesh under faults for minutes: four daemons, requests from all of them, a random fault each 5 s.

    python -m benchmarks.soak MODEL.gguf [--minutes 10] [--seed 1]

A fault is a daemon killed and started again, frozen and thawed, or stopped politely and started again. Each request
must give its whole text or one clear error, but for those whose own root was killed under them. The first daemon is
spared, so its memory is telling; growth is the last quarter's median over the first quarter's, after a minute.
Writes benchmarks/runs/DATE-CPU-ISA/soak-MODEL.json; ends with 1 where something was lost.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.records import keep
from meshllm.errors import MeshLLMError
from tests.system.mesh import Daemon, Mesh

N = 4
EACH_S = 5.0
COUNTING = ", ".join(map(str, range(1, 26))) + ","
SETTLED_S = 60.0  # memory counts from then on


@dataclass
class Figures:
    """What came of it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0
    memory: dict[str, list[tuple[float, int, int]]] = field(default_factory=dict)  # seconds, pid, resident bytes


def main() -> None:
    """Runs it, prints and keeps the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder, Mesh(Path(folder)) as mesh:
        daemons = [mesh.start(f"d{i}", model=chosen.model) for i in range(N)]
        mesh.wait_ranks(N, *daemons, within_s=300)
        _torment(daemons, figures, chosen.minutes * 60, random.Random(chosen.seed))
        mesh.wait_ranks(N, *daemons, within_s=300)
    growth = {name: _growth(samples) for name, samples in figures.memory.items()}
    shown = {
        "requests": dict(figures.outcomes),
        "faults": dict(figures.faults),
        "errors": dict(figures.errors),
        "lost": figures.lost,
        "longest_pause_s": round(figures.longest_pause_s, 2),
        "memory_growth": growth,
    }
    for name, value in shown.items():
        print(f"{name:16} {value}")
    keep(
        "soak", f"python -m benchmarks.soak {chosen.model.name} {' '.join(sys.argv[2:])}".strip(), chosen.model, **shown
    )
    sys.exit(1 if figures.lost else 0)


def _torment(daemons: list[Daemon], figures: Figures, seconds: float, rng: random.Random) -> None:
    began, over = time.monotonic(), threading.Event()
    readers = [threading.Thread(target=_ask_on, args=(daemon, figures, over)) for daemon in daemons]
    watcher = threading.Thread(target=_watch, args=(daemons, figures, over, began))
    for thread in (*readers, watcher):
        thread.start()
    while time.monotonic() < began + seconds:
        time.sleep(EACH_S)
        _fault(rng.choice(daemons[1:]), figures, rng)
    over.set()
    for thread in (*readers, watcher):
        thread.join(180)
        if thread.is_alive():
            figures.lost.append("a request hangs")


def _fault(victim: Daemon, figures: Figures, rng: random.Random) -> None:
    kind = rng.choice(("killed", "frozen", "stopped"))
    figures.faults[kind] += 1
    if kind == "frozen":
        victim.signal(signal.SIGSTOP)
        time.sleep(rng.choice((0.5, 3.0)))
        victim.signal(signal.SIGCONT)
        return
    if kind == "killed":
        victim.kill()
    else:
        victim.stop()
    time.sleep(rng.choice((0.0, 1.0, 3.0)))
    victim.run()


def _ask_on(root: Daemon, figures: Figures, over: threading.Event) -> None:
    """One request after the other."""
    while not over.is_set():
        n, process = random.choice((20, 100, 300)), root.process
        body = {"prompt": COUNTING, "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True}
        times, tokens = [time.monotonic()], 0
        try:
            for event in root.client.stream("/v1/completions", {**body, "return_token_ids": True}):
                choices: Any = event["choices"]
                tokens += len(choices[0]["token_ids"]) if choices else 0
                times.append(time.monotonic())
        except MeshLLMError as error:
            root_ended = root.process is not process or process.poll() is not None
            figures.outcomes["root ended" if root_ended else "error"] += 1
            if not root_ended:
                figures.errors[str(error)[:160]] += 1
            over.wait(0.5)
            continue
        figures.longest_pause_s = max(figures.longest_pause_s, *(b - a for a, b in pairwise(times)), 0.0)
        figures.outcomes["whole" if tokens == n else "cut"] += 1
        if tokens != n:
            figures.lost.append(f"{root.name}: {tokens} tokens of {n} and no error")


def _watch(daemons: list[Daemon], figures: Figures, over: threading.Event, began: float) -> None:
    while not over.wait(1.0):
        for daemon in daemons:
            try:
                pages = int(Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1])
            except (OSError, IndexError):  # between two lives
                continue
            sample = (time.monotonic() - began, daemon.process.pid, pages * 4096)
            figures.memory.setdefault(daemon.name, []).append(sample)


def _growth(samples: list[tuple[float, int, int]]) -> float | None:
    """Of the process that lives at the end, from its second minute on; None where that is too short to tell."""
    pid = samples[-1][1]
    own = [(at, size) for at, process, size in samples if process == pid]
    sizes = [size for at, size in own if at >= own[0][0] + SETTLED_S]
    quarter = len(sizes) // 4
    if quarter < 10:
        return None
    return round(statistics.median(sizes[-quarter:]) / statistics.median(sizes[:quarter]) - 1, 4)


if __name__ == "__main__":
    main()
