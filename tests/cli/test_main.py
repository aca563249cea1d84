"""The command itself: how fast it starts, what it imports, exit codes of wrong usage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from meshllm import __version__
from meshllm.cli.main import COMMANDS, LazyGroup, cli


def test_version_costs_nothing_but_the_command_line(meshllm, imported) -> None:
    assert meshllm("--version").stdout.decode() == f"meshllm {__version__}\n"
    packages = imported("--version")
    assert "click" in packages
    assert not packages & {"rich", "http", "msgspec", "numpy", "trio", "cffi", "structlog", "zeroconf", "cryptography"}


@pytest.mark.parametrize(
    ("words", "banned"),
    [
        ("meshllm.cli.main", "rich msgspec trio structlog http.client numpy"),
        ("meshllm.cli.ask", "rich trio structlog numpy cryptography"),
        ("meshllm.cli.status", "trio structlog numpy cryptography"),
        ("meshllm.config", "difflib msgspec trio numpy"),
    ],
)
def test_command_does_not_import_what_it_does_not_need(words: str, banned: str) -> None:
    story = f"import sys, {words}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", story], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert not set(loaded.split()) & set(banned.split())


def test_every_listed_command_is_there_under_its_name() -> None:
    assert isinstance(cli, LazyGroup)
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name


@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["ask", "--nonsense"], ["status", "extra"], ["ask", "x", "--seed", "-1"], ["daemon", "--port", "x"]],
    ids=" ".join,
)
def test_wrong_usage_is_exit_2_and_one_line(meshllm, words) -> None:
    done = meshllm(*words)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1), done.stderr
    assert done.stderr.startswith(b"meshllm: ")


def test_misspelt_variable_does_not_lead_to_another_daemon(meshllm) -> None:
    done = meshllm("status", environment={"MESHLLM_SOKCET": "/x.sock"})
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b'meshllm: MESHLLM_SOKCET: unknown variable; did you mean "MESHLLM_SOCKET"?\n'


@pytest.mark.parametrize(
    "words",
    [
        ["--version"], ["--help"], ["ask", "--help"], ["models", "--json", "--state-dir", "state"],
        ["key", "new", "--key-file", "key"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_full_stdout_is_named_and_exit_1(start_meshllm, tmp_path: Path, words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        process = start_meshllm(*words, stdout=full, cwd=tmp_path)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1] == b"meshllm: standard output: No space left on device"


def test_no_command_shows_the_commands(meshllm) -> None:
    done = meshllm()
    assert done.returncode == 2
    assert all(name in done.stderr.decode() for name in COMMANDS)


def test_daemon_has_a_flag_for_each_setting(meshllm) -> None:
    from meshllm.settings import SETTINGS

    done = meshllm("daemon", "--help")
    assert done.returncode == 0
    missing = [setting.option for setting in SETTINGS if setting.option not in done.stdout.decode()]
    assert not missing


def test_faults_of_a_configuration_file_name_file_and_line(meshllm, tmp_path) -> None:
    (tmp_path / "bad.toml").write_text('name = "a"\nportt = 5\n')
    done = meshllm("daemon", "--config", str(tmp_path / "bad.toml"))
    assert done.returncode == 2
    assert f"{tmp_path}/bad.toml:2: portt: unknown key".encode() in done.stderr
    assert b'"port"' in done.stderr
