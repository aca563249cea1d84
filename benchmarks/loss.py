"""How long a reader waits when a device is lost: from the loss to the next token, with three daemons and two left.

    python -m benchmarks.loss MODEL.gguf [--runs 5]

Each run starts a mesh, reads an answer at the third device and kills (SIGKILL) or freezes (SIGSTOP) the driver or
another rank in the middle of it. Writes benchmarks/runs/DATE-CPU-ISA/loss-MODEL.json.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.records import keep
from tests.system.mesh import Mesh, serves

NUMBERS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
LOST_AFTER = 24  # tokens
UNTIL = 48


def main() -> None:
    """Measures, prints a table, keeps the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    chosen = parser.parse_args()
    gaps: dict[str, list[float]] = {}
    for _, (victim, how) in product(range(chosen.runs), product(("rank", "driver"), NUMBERS)):
        with tempfile.TemporaryDirectory() as folder, Mesh(Path(folder)) as mesh:
            gaps.setdefault(f"{victim} {how}", []).append(_gap(mesh, chosen.model, victim, NUMBERS[how]))
    for name, seconds in gaps.items():
        print(f"{name:16} {statistics.median(seconds):5.2f} s   {min(seconds):.2f} to {max(seconds):.2f}")
    command = f"python -m benchmarks.loss {chosen.model.name} {' '.join(sys.argv[2:])}".strip()
    keep("loss", command, chosen.model, gap_s=gaps)


def _gap(mesh: Mesh, model: Path, victim: str, number: signal.Signals) -> float:
    daemons = [mesh.start(f"d{i}", model=model) for i in range(3)]
    status, *_ = mesh.wait(lambda status: serves(status, 3), *daemons, within_s=300)
    assert status.layout is not None
    by_id = {daemon.status().node: daemon for daemon in daemons}
    order = [by_id[node] for node in status.layout.ranks]  # the driver is rank 0
    lost, root = (order[2], order[1]) if victim == "rank" else (order[0], order[2])
    body = {"prompt": [1, 4093, 198], "max_tokens": UNTIL, "temperature": 0, "ignore_eos": True, "stream": True}
    arrivals: list[float] = []
    middle = threading.Event()

    def read() -> None:
        for event in root.client.stream("/v1/completions", {**body, "return_token_ids": True}):
            choices: Any = event["choices"]
            if choices:
                arrivals.extend([time.monotonic()] * len(choices[0]["token_ids"]))
            if len(arrivals) >= LOST_AFTER:
                middle.set()

    reading = threading.Thread(target=read)
    reading.start()
    middle.wait(300)
    lost.signal(number)
    at = time.monotonic()
    reading.join(300)
    assert len(arrivals) == UNTIL, f"{len(arrivals)} tokens of {UNTIL}"
    gap = max(after - before for before, after in pairwise(arrivals) if after > at)
    print(f"{victim:7} {number.name:8} {gap:5.2f} s")
    return gap


if __name__ == "__main__":
    main()
