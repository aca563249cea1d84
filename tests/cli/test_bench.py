"""`meshllm bench`: what cannot be measured is wrong usage, and nothing that was given is passed over."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gguf_files import tiny_model

from meshllm.kernels.binding import list_isas
from meshllm.model.formats import RUNNABLE_FORMATS


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_model())
    return str(path)


def test_decoding_is_told_beside_what_memory_gives(meshllm, tiny: str) -> None:
    words = ("bench", "--model", tiny, "--prompt", "2", "--decode", "2", "--threads", "1")
    found = json.loads(meshllm(*words, "--json", "--bandwidth").stdout)
    assert found["bandwidth_gbps"] > 0.1
    assert 0 < found["decode_gbps"] < 1000
    assert json.loads(meshllm(*words, "--json").stdout)["bandwidth_gbps"] is None
    text = meshllm(*words, "--bandwidth").stdout.decode()
    assert re.search(r"reading +[0-9.]+ GB/s +\(memory, the limit of decoding: \d+% of it\)", text)


def test_products_are_measured_for_every_format_that_runs(meshllm) -> None:
    found = json.loads(meshllm("bench", "--ops", "--threads", "1", "--json").stdout)
    assert {op["format"] for op in found["ops"]} == {format_.name for format_ in RUNNABLE_FORMATS}
    assert all(op[figure] > 0 for op in found["ops"] for figure in ("decode_gbps", "four", "eight", "prompt_gops"))


def test_isa_that_is_not_here_is_named_with_those_that_are(meshllm, tiny: str) -> None:
    done = meshllm("bench", "--model", tiny, "--prompt", "2", "--decode", "2", "--isa", "vax")
    running = ", ".join(name for name, runs in list_isas() if runs)
    assert done.stderr.decode() == f"meshllm: --isa: instruction set 'vax' cannot run here; these can: {running}\n"
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--threads", "100000"], "'--threads': 100000 is not in the range 1<=x<=256"),
        (["--decode", "1"], "'--decode': 1 is not in the range x>=2"),
        (["--prompt", "10000000"], "--prompt and --decode: from 1, together at most the model's context"),
        (["--socket", "x.sock"], "--socket is of a daemon"),
        (["--ops"], "--ops measures products, not a model"),
        (["--mesh", "--ops"], "--mesh measures the daemon as it runs"),
        (["--mesh", "--bandwidth"], "--mesh measures the daemon as it runs"),
    ],
)
def test_what_cannot_be_measured_is_wrong_usage(meshllm, tiny: str, words: list[str], said: str) -> None:
    done = meshllm("bench", "--model", tiny, *words)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert said in done.stderr.decode()


def test_more_tokens_than_the_mesh_holds_are_wrong_usage(meshllm, stand_in) -> None:
    layout = {
        "epoch": 1, "driver": "a", "ranks": ["a"], "exchange": "f16", "context": 4096, "slots": 4,
        "predicted_decode_tok_s": 1.0,
    }  # fmt: skip
    stand_in.status = {
        "version": 1, "build": "x", "state": "serving", "detail": None, "node": "a", "name": "a", "mesh_tag": "b",
        "uptime_s": 1.0, "model": None, "layout": layout, "peers": [],
        "requests": {"active": 0, "answered": 0, "failed": 0, "steps": 0},
    }  # fmt: skip
    done = meshllm("bench", "--mesh", "--socket", str(stand_in.socket), "--decode", "4000", "--prompt", "100")
    assert (done.returncode, stand_in.asked) == (2, [])
    assert b"--prompt and --decode: together at most the 4096 positions" in done.stderr
