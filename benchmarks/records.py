"""Where raw figures are kept: benchmarks/runs/DATE-CPU-ISA/NAME.json, with the command and the versions."""

from __future__ import annotations

import json
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

from meshllm import __version__
from meshllm.kernels.binding import list_isas

RUNS = Path(__file__).parent / "runs"


def keep(name: str, command: str, model: Path, **figures: Any) -> None:
    """Writes the figures of one benchmark."""
    isa = next(name for name, runs in list_isas() if runs)  # tells machines apart that give one name
    folder = RUNS / f"{date.today().isoformat()}-{_cpu().lower().replace(' ', '-')[:40]}-{isa}"
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "command": command,
        "meshllm": __version__,
        "python": sys.version.split()[0],
        "cpu": _cpu(),
        "isa": isa,
        "model_bytes": model.stat().st_size,
        **figures,
    }
    (folder / f"{name}-{model.stem}.json").write_text(json.dumps(record, indent=1) + "\n")


def _cpu() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return names[0] if names else platform.machine()
