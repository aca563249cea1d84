"""What the command costs before it does anything: `meshllm --version` and `meshllm status` beside a bare interpreter.

    python -m benchmarks.startup MODEL.gguf [--runs 15]

The three run in turns, beside a daemon that serves the model; prints medians and extremes of the time on the wall.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.system.mesh import Mesh


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Mesh(Path(folder)) as mesh:
        daemon = mesh.start("one", model=chosen.model)
        command = [sys.executable, "-m", "meshllm"]
        mesh.wait_ranks(1, daemon)
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "meshllm --version": [*command, "--version"],
            "meshllm status": [*command, "status", "--socket", str(daemon.socket)],
        }
        for words in commands.values():
            _seconds(words)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(chosen.runs):
            for name, words in commands.items():
                times[name].append(_seconds(words))
    for name, seconds in times.items():
        print(f"{name:20} {1e3 * statistics.median(seconds):5.0f} ms", end="")
        print(f"   {1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}")


def _seconds(words: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
