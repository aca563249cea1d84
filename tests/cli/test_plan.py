"""`meshllm plan` as people use it: what to buy, what a device would hold, why one is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import tiny_model

from tests.system.mesh import Mesh

Run = Callable[..., subprocess.CompletedProcess[str]]
PI5_A, PI5_B = "name=a,gbps=9.5,mem=8G,gops=110", "name=b,gbps=9.5,mem=8G,gops=110"


@pytest.fixture
def run(tmp_path: Path, repository: Path) -> Run:
    environment = {**os.environ, "HOME": str(tmp_path), "MESHLLM_STATE_DIR": str(tmp_path / "state")}

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "meshllm.cli.main", "plan", *arguments]
        return subprocess.run(
            words,
            cwd=repository,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return call


def ranks_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return {rank["name"]: rank for rank in json.loads(done.stdout)["ranks"]}


def test_equal_devices_get_equal_parts(run: Run, smollm2_path: Path) -> None:
    ranks = ranks_of(run(str(smollm2_path), "--json", "--layout", "all", "--device", PI5_A, "--device", PI5_B))
    assert [ranks[name]["ffn"] for name in "ab"] == [[0, 768], [768, 1536]]
    assert ranks["a"]["alone_decode_tok_s"] == ranks["b"]["alone_decode_tok_s"]


def test_device_that_slows_the_mesh_is_left_out_and_the_reason_given(run: Run, smollm2_path: Path) -> None:
    done = run(str(smollm2_path), "--device", PI5_A, "--device", "name=zero,gbps=0.4,mem=512M", "--rtt", "4000")
    assert done.returncode == 0
    assert "on 1 of 2 devices" in done.stdout
    assert "left out: zero: would make answers slower" in done.stdout
    assert "assumed: gops=4.8 of zero; links of 4.0 ms and 940 Mbit/s" in done.stdout


def test_faster_links_and_devices_are_predicted_to_be_faster(run: Run, smollm2_path: Path) -> None:
    def decode(*flags: str) -> float:
        done = run(str(smollm2_path), "--json", "--layout", "2", "--device", PI5_A, "--device", *flags)
        return float(json.loads(done.stdout)["decode_tok_s"])

    assert decode(PI5_B, "--rtt", "100") > decode(PI5_B) > decode(PI5_B, "--rtt", "1000")
    assert decode(PI5_B) > decode("name=b,gbps=5,mem=8G")


def test_too_little_memory_says_how_much_is_missing(run: Run, smollm2_path: Path) -> None:
    done = run(str(smollm2_path), "--device", "name=a,gbps=5,mem=256M", "--context", "8192", "--slots", "8")
    assert done.returncode == 1
    assert "MB are missing; add a device, or lower the context or slots" in done.stderr


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("pi5", "'pi5' is no field"),
        ("name=pi5,gbps=9.5", "mem is missing"),
        ("name=pi5,gbps=fast,mem=8G", "gbps: expected a number above 0, found 'fast'"),
        ("name=pi5,gbps=-1,mem=8G", "gbps: expected a number above 0"),
        ("name=pi5,gbps=nan,mem=8G", "gbps: expected a number above 0"),
        ("name=pi5,gbps=9.5,mem=some", "mem: expected bytes"),
        ("name=pi5,name=pi4,gbps=9.5,mem=8G", "there twice"),
        (PI5_A, "two devices are named 'a'"),
    ],
)
def test_device_that_cannot_be_is_named(run: Run, tmp_path: Path, device: str, said: str) -> None:
    (tmp_path / "tiny.gguf").write_bytes(tiny_model())
    done = run(str(tmp_path / "tiny.gguf"), "--device", PI5_A, "--device", device)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_devices_the_mesh_is_planned_for(run: Run, tmp_path: Path, smollm2_path: Path) -> None:
    with Mesh(tmp_path) as mesh:
        kitchen, attic = (mesh.start(name, model=smollm2_path) for name in ("kitchen", "attic"))
        mesh.wait_ranks(2, kitchen, attic)
        done = run(str(smollm2_path), "--json", "--layout", "all", MESHLLM_SOCKET=str(kitchen.socket))
        assert ranks_of(done).keys() == {"kitchen", "attic"}
    done = run(str(smollm2_path), MESHLLM_SOCKET=str(kitchen.socket))
    assert done.returncode == 3
