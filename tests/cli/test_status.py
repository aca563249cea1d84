"""`meshllm status`: what the table says, its JSON, and how fast it is there."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from meshllm.cli.render import status_view
from meshllm.cli.text import bar, in_bytes, in_time, printable
from meshllm.status import Status

KITCHEN: dict[str, Any] = {
    "id": "0" * 16,
    "name": "kitchen",
    "address": None,
    "state": "self",
    "slice": {"rank": 0, "heads": [0, 6], "ffn": [0, 1024], "vocab": [0, 32768], "bytes": 66_000_000},
    "threads": 4,
    "isa": "neon_dotprod",
    "memory_bytes": 6_000_000_000,
    "free_bytes": 5_000_000_000,
    "read_gbps": 12.4,
}
ATTIC: dict[str, Any] = {
    **KITCHEN,
    "id": "1" * 16,
    "name": "attic",
    "address": "192.168.1.20:6374",
    "state": "connected",
    "slice": {"rank": 1, "heads": [6, 9], "ffn": [1024, 1536], "vocab": [32768, 49152], "bytes": 33_000_000},
    "rtt_us": 412.0,
}
OLD: dict[str, Any] = {
    "id": "2" * 16,
    "name": "old\x1b[2Jbox",
    "address": "192.168.1.30:6374",
    "state": "incompatible",
    "reason": "speaks protocol 2, here 1",
}
SERVING: dict[str, Any] = {
    "version": 1,
    "build": "0.1.0",
    "state": "serving",
    "detail": None,
    "node": "0" * 16,
    "name": "kitchen",
    "mesh_tag": "3f2a9c0011223344",
    "uptime_s": 7384.0,
    "model": {
        "name": "smollm2",
        "sha256": "ab" * 32,
        "architecture": "llama",
        "file_bytes": 92_871_040,
        "context_length": 8192,
    },
    "layout": {
        "epoch": 3,
        "driver": "0" * 16,
        "ranks": ["0" * 16, "1" * 16],
        "exchange": "f16",
        "context": 4096,
        "slots": 4,
        "predicted_decode_tok_s": 120.0,
    },
    "peers": [KITCHEN, ATTIC, OLD],
    "requests": {"active": 1, "answered": 41, "failed": 0, "steps": 900, "decode_tok_s": 118.2},
    "exchange": {"bytes_sent": 69120.0, "bytes_received": 69120.0, "exchange_us": 1400.0, "compute_us": 7100.0},
}


def _shown(status: dict[str, Any], width: int = 120) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(status_view(msgspec.convert(status, Status), width))
    return capture.get()


def test_table_shows_each_device_and_its_part() -> None:
    lines = _shown(SERVING, 140).splitlines()
    kitchen = next(line for line in lines if line.startswith("● kitchen"))
    attic = next(line for line in lines if line.startswith("● attic"))
    assert "67 %" in kitchen
    assert "6 heads, 1024 ffn" in kitchen
    assert "66.0 MB of 6.0 GB" in kitchen
    assert "4 × neon_dotprod" in kitchen
    assert ("33 %" in attic, "192.168.1.20:6374" in attic, "412 µs" in attic) == (True, True, True)
    assert "serving  smollm2" in lines[1]
    assert "on 2 devices" in lines[1]
    assert "driven by kitchen" in lines[2]


def test_reason_for_a_device_that_is_not_used_is_given_in_words() -> None:
    assert "speaks protocol 2, here 1" in _shown(SERVING)
    layout = {**SERVING["layout"], "left_out": [["1" * 16, "with it: 60 tok/s, without: 118 tok/s"]]}
    assert "attic: with it: 60 tok/s, without: 118 tok/s" in _shown({**SERVING, "layout": layout})


def test_file_on_its_way_is_shown_with_its_givers_and_its_trouble() -> None:
    fetch = {"name": "smollm2", "sha256": "ab" * 32, "done_bytes": 34_000_000, "wanted_bytes": 98_000_000,
             "sources": ["attic", "old\x1b[2Jbox"], "error": "the disk is full"}  # fmt: skip
    text = _shown({**SERVING, "fetch": fetch}, 140)
    line = next(line for line in text.splitlines() if line.startswith("fetching"))
    assert "34.0 MB of 98.0 MB from attic, old" in line
    assert "the disk is full" in line
    assert "\x1b" not in text


def test_names_of_others_cannot_drive_the_terminal() -> None:
    assert "\x1b" not in _shown(SERVING)
    assert r"old\x1b[2Jbox" in _shown(SERVING)


@pytest.mark.parametrize("width", [60, 80, 90, 120, 140, 200])
def test_table_fits_the_terminal(width: int) -> None:
    assert max(len(line) for line in _shown(SERVING, width).splitlines()) <= width


@pytest.mark.parametrize("state", ["starting", "no-model", "searching", "preparing", "failed"])
def test_daemon_that_does_not_serve_says_what_is_missing(state: str) -> None:
    bare = {**SERVING, "state": state, "detail": "pull a model: meshllm pull smollm2", "layout": None, "model": None}
    lone = {**KITCHEN, "slice": None, "isa": None, "threads": None, "read_gbps": None, "memory_bytes": None}
    shown = _shown({**bare, "peers": [lone], "exchange": None})
    assert state in shown
    assert "pull a model: meshllm pull smollm2" in shown


@given(st.floats(0, 1), st.integers(1, 30))
def test_bar_has_its_width_and_grows(part: float, cells: int) -> None:
    assert len(bar(part, cells)) == cells
    assert (bar(part, cells).strip() == "") == (part == 0)


@given(st.integers(0, 10**15))
def test_sizes_stay_short(n: int) -> None:
    assert len(in_bytes(n)) <= 8


@given(st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    assert printable(text).isprintable() or all(letter.isprintable() or letter in "\u200d" or letter.isspace() or
                                                ord(letter) > 127 for letter in printable(text))  # fmt: skip
    assert not any(ord(letter) < 32 or 126 < ord(letter) < 160 for letter in printable(text))


def test_times_are_for_people() -> None:
    assert [in_time(s) for s in (4.2, 130, 7384, 200_000)] == ["4 s", "2 min", "2 h 3 min", "2 d 7 h"]


def test_command_prints_the_table_without_what_a_daemon_needs(meshllm, stand_in, imported) -> None:
    stand_in.status = SERVING
    done = meshllm("status", "--socket", str(stand_in.socket))
    assert (done.returncode, b"attic" in done.stdout) == (0, True), done.stderr
    packages = imported("status", "--socket", str(stand_in.socket))
    assert "rich" in packages
    assert not packages & {"numpy", "trio", "cffi", "structlog", "zeroconf", "cryptography", "tokenizers", "asyncio"}


def test_json_is_the_status_as_it_is(meshllm, stand_in) -> None:
    stand_in.status = SERVING
    done = meshllm("status", "--json", "--socket", str(stand_in.socket))
    shown = json.loads(done.stdout)
    assert shown["peers"][1]["slice"]["heads"] == [6, 9]
    assert msgspec.convert(shown, Status) == msgspec.convert(SERVING, Status)
    assert list(shown) == list(Status.__struct_fields__)


def test_daemon_of_another_form_is_named(meshllm, stand_in) -> None:
    stand_in.status = {**SERVING, "peers": "none"}
    done = meshllm("status", "--socket", str(stand_in.socket))
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b"$.peers" in done.stderr


def test_no_daemon_is_exit_3(meshllm) -> None:
    done = meshllm("status")
    assert (done.returncode, done.stdout) == (3, b"")
    assert done.stderr.startswith(b"meshllm: no daemon answers (")


@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["status", "--watch"], ["ask", "x"]], ids=" ".join)
def test_full_stdout_is_named_and_exit_1(stand_in, start_meshllm, words: list[str]) -> None:
    stand_in.status = SERVING
    with open("/dev/full", "wb") as full:
        process = start_meshllm(*words, "--socket", str(stand_in.socket), stdout=full)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, b"meshllm: standard output: No space left on device\n")


def test_reader_of_status_that_has_enough_is_no_error(stand_in, start_meshllm) -> None:
    stand_in.status = SERVING
    process = start_meshllm("status", "--watch", "--socket", str(stand_in.socket))
    assert process.stdout.readline().startswith(b"kitchen")
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_closed_stdout_is_no_error(meshllm, stand_in) -> None:
    stand_in.status = SERVING
    done = meshllm("status", "--socket", str(stand_in.socket), preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_line_is_folded_in_a_pipe(meshllm, stand_in) -> None:
    reason = "its file is damaged: " + "what is wrong with it, " * 50
    stand_in.status = {**SERVING, "state": "failed", "detail": reason, "layout": None}
    stand_in.status["peers"] = [KITCHEN, {**OLD, "reason": reason}]
    lines = meshllm("status", "--socket", str(stand_in.socket)).stdout.decode().splitlines()
    assert len([line for line in lines if line.endswith(reason)]) == 2
