"""The systemd unit, read by systemd itself. `verify` exits 0 on unknown keys: any output is a fault."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "systemd" / "meshllm.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "meshllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "meshllm.service"
    text = UNIT.read_text("utf-8")
    assert "ExecStart=/usr/local/bin/meshllm daemon" in text
    unit.write_text(text.replace("/usr/local/bin/meshllm", str(program)), "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
