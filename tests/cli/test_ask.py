"""`meshllm ask`, run as a process against a stand-in on a real socket."""

from __future__ import annotations

import grp
import json
import os
import pty
import resource
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from meshllm.api.body import decode_body
from meshllm.api.openai import CompletionRequest
from meshllm.cli.options import SAMPLING
from meshllm.errors import InvalidRequestError


def _user_text(stand_in) -> str:
    (path, body) = stand_in.asked[-1]
    assert path == "/v1/chat/completions"
    assert len(stand_in.asked) == 1
    return body["messages"][-1]["content"]


@pytest.fixture
def ask(meshllm, stand_in):
    return lambda *words, **options: meshllm("ask", "--socket", str(stand_in.socket), *words, **options)


def test_answer_streams_to_stdout_and_the_closing_line_to_stderr(ask, stand_in) -> None:
    done = ask("Why?")
    assert (done.returncode, done.stdout.decode()) == (0, "Hello 🦙\n")
    assert done.stderr.decode() == "3 tokens · 61.2 tok/s · kitchen + attic\n"
    assert stand_in.asked[0][1]["stream"] is True


def test_json_is_one_object_with_the_answer_and_its_peers(ask) -> None:
    done = ask("Why?", "--json")
    answer = json.loads(done.stdout)
    assert answer["text"] == "Hello 🦙"
    assert answer["peers"] == ["kitchen", "attic"]
    assert (answer["prompt_tokens"], answer["completion_tokens"], answer["finish_reason"]) == (7, 3, "stop")
    assert done.stderr == b""


def test_options_reach_the_request(ask, stand_in, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("from a file\n")
    done = ask(
        "one", "two", "-m", "smollm2", "--system", "Be brief.", "--seed", "0", "--temperature", "0.5", "--top-k", "3",
        "--stop", "a", "--stop", "b", "--max-tokens", "9", "-f", str(tmp_path / "notes.txt"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    body = stand_in.asked[0][1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["messages"][1]["content"] == "one two\n\nfrom a file\n"
    wanted = {"model": "smollm2", "seed": 0, "temperature": 0.5, "top_k": 3, "stop": ["a", "b"], "max_tokens": 9}
    assert wanted.items() <= body.items()
    assert "top_p" not in body


def test_raw_continues_the_text_as_it_is(ask, stand_in) -> None:
    ask("Once upon", "--raw")
    path, body = stand_in.asked[0]
    assert (path, body["prompt"]) == ("/v1/completions", "Once upon")


NUMBERS = (
    "nan", "-nan", "inf", "-inf", "1e999", "-1", "-2", "-0.0", "0", "1e-9", "0.5", "1", "1.0000001", "2", "100", "101",
    "100.5", str(2**31 - 1), str(2**31), str(2**64 - 1), str(2**64), "1" + "0" * 30,
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SAMPLING if name != "stop"])
def test_options_are_refused_where_the_api_would_refuse_them(name: str) -> None:
    option = SAMPLING[name]
    read = int if isinstance(option.type, click.IntRange) else float
    for text in NUMBERS:
        try:
            value = read(text)
        except ValueError:
            continue
        try:
            taken = option.process_value(click.Context(click.Command("ask")), text) == value
        except click.BadParameter:
            taken = False
        assert taken == _api_takes(name, value), text


def _api_takes(name: str, value: float) -> bool:
    try:
        decode_body(json.dumps({"prompt": "x", name: value}).encode(), CompletionRequest).checked_seed()
    except InvalidRequestError:
        return False
    return True


@pytest.mark.parametrize(
    "words",
    [
        ["--temperature", "nan"], ["--top-p", "0"], ["--min-p", "nan"], ["--top-k", "99999999999"], ["--stop", ""],
        ["--stop", "x" * 1025], ["--stop", "x"] * 17,
    ],
    ids=lambda words: " ".join(words)[:20],
)  # fmt: skip
def test_option_that_cannot_be_is_wrong_usage_and_named(ask, stand_in, words: list[str]) -> None:
    done = ask("x", *words)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert f"'{words[0]}'".encode() in done.stderr
    assert not stand_in.asked


# --- CLI-01: what stdin means ----------------------------------------------------------------------------------------


def test_cli_01_piped_text_follows_the_prompt_in_one_request(ask, stand_in) -> None:
    assert ask("Summarize", input=b"line1\nline2\n").returncode == 0
    assert _user_text(stand_in) == "Summarize\n\nline1\nline2\n"


def test_cli_01_piped_text_alone_is_the_question(ask, stand_in) -> None:
    assert ask(input=b"only stdin\n").returncode == 0
    assert _user_text(stand_in) == "only stdin\n"


def test_cli_01_dev_null_adds_nothing(ask, stand_in) -> None:
    assert ask("x", stdin=subprocess.DEVNULL).returncode == 0
    assert _user_text(stand_in) == "x"


def test_cli_01_closed_stdin_adds_nothing(ask, stand_in) -> None:
    assert ask("x", stdin=None, preexec_fn=lambda: os.close(0)).returncode == 0
    assert _user_text(stand_in) == "x"


def test_cli_01_pipe_that_nobody_writes_to_is_left_alone_with_a_note(ask, stand_in) -> None:
    read, write = os.pipe()
    done = ask("x", stdin=read)
    os.close(read), os.close(write)
    assert done.returncode == 0
    assert b"nothing came on stdin within 5 s" in done.stderr
    assert _user_text(stand_in) == "x"


def test_nothing_to_ask_is_wrong_usage(ask, stand_in) -> None:
    done = ask(stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert b"nothing to ask" in done.stderr
    assert not stand_in.asked


# --- CLI-03: locales -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "POSIX"},
        {"LC_ALL": "", "LANG": "en_US.ISO-8859-1"},
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=str,
)
def test_cli_03_any_locale_carries_utf8_both_ways(ask, stand_in, environment) -> None:
    done = ask("café 🦙".encode(), environment=environment)
    assert (done.returncode, done.stdout) == (0, "Hello 🦙\n".encode())
    assert b"Traceback" not in done.stderr
    assert _user_text(stand_in) == "café 🦙"


def test_cli_03_bytes_that_are_no_utf8_become_replacement_characters(ask, stand_in) -> None:
    assert ask(b"a\xffb", "-", input=b"c\xfe").returncode == 0
    assert _user_text(stand_in) == "a\ufffdb\n\nc\ufffd"


# --- CLI-05: interrupts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("after", [0, 2], ids=["before the first token", "after two tokens"])
def test_cli_05_interrupt_ends_at_once_and_frees_the_daemon(stand_in, start_meshllm, number, code, after) -> None:
    stand_in.hold_after = after
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended_before = ended.ru_utime + ended.ru_stime
    process = start_meshllm("ask", "--socket", str(stand_in.socket), "x")
    assert stand_in.holding.wait(20)
    shown = b""
    while after and shown != b"Hello ":
        shown += os.read(process.stdout.fileno(), 100)
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    before = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    process.send_signal(number)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime - ended_before - before < 0.2  # of CPU: the machine may be busy
    assert shown + out == (b"Hello \n" if after else b"")
    assert err == b""
    assert stand_in.client_left.wait(5)


def test_interrupt_on_a_terminal_shows_no_traceback(stand_in, start_meshllm) -> None:
    stand_in.hold_after = 2
    ours, theirs = pty.openpty()
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = start_meshllm("ask", "--socket", str(stand_in.socket), "x", start_new_session=True, **terminal)
    os.close(theirs)
    assert stand_in.holding.wait(20)
    seen = b""
    while b"Hello" not in seen:
        seen += os.read(ours, 1000)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    try:
        while part := os.read(ours, 1000):
            seen += part
    except OSError:  # how a pty says that the other end has closed
        pass
    os.close(ours)
    assert seen.replace(b"\r", b"") == b"Hello \n"


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_no_daemon_is_exit_3_and_says_how_to_start_one(meshllm, tmp_path: Path) -> None:
    done = meshllm("ask", "--socket", str(tmp_path / "none.sock"), "x")
    assert done.returncode == 3
    assert done.stderr.count(b"\n") == 1
    assert b"no such socket" in done.stderr
    assert b"meshllm daemon" in done.stderr


def test_dead_socket_is_exit_3(meshllm, tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    done = meshllm("ask", "x", environment={"MESHLLM_SOCKET": str(tmp_path / "dead.sock")})
    assert (done.returncode, b"nobody listens there" in done.stderr) == (3, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(
    ("group", "mode", "cure"),
    [
        ("other", 0o660, b"no permission; join its group"),
        ("other", 0o600, b"no permission; use sudo, or start the daemon with --socket-group"),
        ("root", 0o660, b"no permission; use sudo, or start the daemon with --socket-group"),
    ],
)
def test_socket_without_permission_is_exit_3_and_names_the_cure(stand_in, group: str, mode: int, cure: bytes) -> None:
    others = [entry.gr_gid for entry in grp.getgrall() if entry.gr_gid not in (0, 65534)]
    os.chown(stand_in.socket, 0, 0 if group == "root" else others[0])
    stand_in.socket.chmod(mode)
    # Another user may be unable to read this checkout: the process changes its user after its imports.
    story = (
        "import grp, os, meshllm.cli.ask, meshllm.config, meshllm.cli.main as m; os.setgid(65534); os.setuid(65534);"
        f"m.main(['ask', '--socket', {str(stand_in.socket)!r}, 'x'])"
    )
    for folder in [stand_in.socket.parent, *stand_in.socket.parent.parents][:3]:
        folder.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", story], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    assert (done.returncode, cure in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (404, {"message": "no model big", "code": "model_not_found", "param": "model"}, 4),
        (400, {"message": "the prompt has 5000 tokens", "code": "context_length_exceeded"}, 1),
        (503, {"message": "no layout yet", "code": "unavailable"}, 1),
        (500, {"message": "x.gguf: ends early", "code": "model_file"}, 4),
        (500, {"message": "oh"}, 1),
    ],
)
def test_error_of_the_daemon_is_one_line_and_its_exit_code(ask, stand_in, status, error, code) -> None:
    stand_in.error = (status, {"error": error})
    done = ask("x")
    assert (done.returncode, done.stdout) == (code, b"")
    assert done.stderr.decode() == f"meshllm: {error['message']}\n"


def test_answer_without_sense_is_no_traceback(ask, stand_in) -> None:
    stand_in.error = (502, ["not", "an", "object"])
    done = ask("x")
    assert (done.returncode, done.stderr) == (1, b"meshllm: the daemon answered with HTTP status 502\n")


def test_error_inside_a_stream_ends_the_line_and_exits_1(ask, stand_in) -> None:
    stand_in.error_after = 2
    done = ask("x")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"Hello \n", b"meshllm: lost attic\n")


def test_stream_that_breaks_off_is_no_success(ask, stand_in) -> None:
    stand_in.break_after = 1
    done = ask("x")
    assert (done.returncode, done.stdout) == (3, b"Hel\n")
    assert b"broke off" in done.stderr


def test_reader_that_has_enough_is_no_error(stand_in, start_meshllm) -> None:
    stand_in.pieces = ["word " * 4000] * 50
    process = start_meshllm("ask", "--socket", str(stand_in.socket), "x")
    assert process.stdout.read(4) == b"word"
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr.read() == b""
    process.stderr.close()
