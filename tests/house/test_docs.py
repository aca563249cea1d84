"""What the documents show is what there is: commands, flags, make targets, `--help` texts, links between files.

A block that follows `<!-- output of: COMMAND -->` is compared with what the command prints; `python
tests/house/test_docs.py` writes those blocks anew.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(REPOSITORY.glob("*.md"))
OUTPUT = re.compile(r"<!-- output of: (.+?) -->\n```[a-z]*\n(.*?)```", re.DOTALL)


def _texts() -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in DOCUMENTS}


def _shown_commands(program: str) -> Iterator[tuple[str, list[str]]]:
    """(document, words) of each command in a block of shell lines; comments, pipes and redirections cut off."""
    for name, text in _texts().items():
        for block in re.findall(r"^(?:```|~~~)(?:sh|console|bash)\n(.*?)^(?:```|~~~)", text, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r"\s(?:\|\||&&|[|<>])\s", line):
                    words = shlex.split(part.removeprefix("$ "), comments=True)
                    while words and re.fullmatch(r"[A-Z_]+=.*|sudo", words[0]):
                        words = words[1:]
                    if words and words[0] == program:
                        yield name, words[1:]


def _click_command(words: list[str]) -> tuple[click.Command, list[str]]:
    from meshllm.cli.main import cli

    command: click.Command = cli
    context = click.Context(cli, info_name="meshllm")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, f"no command {words[0]}"
        command, words = found, words[1:]
    return command, words


def test_commands_in_documents_exist() -> None:
    seen = 0
    for name, words in _shown_commands("meshllm"):
        command, rest = _click_command(words)
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        wrong = [
            word
            for word in rest
            if re.match(r"--?[A-Za-z]", word) and word.split("=")[0] not in options | {"--help", "--version"}
        ]
        assert not wrong, f"{name}: meshllm {' '.join(words)}: no option {wrong}"
        seen += 1
    assert seen >= 5, "README.md shows no commands"


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    shown = {word for _, words in _shown_commands("make") for word in words if re.fullmatch(r"[a-z-]+", word)}
    assert shown, "README.md shows no make target"
    assert shown <= targets


def _run(command: str) -> str:
    words = shlex.split(command)
    assert words[0] == "meshllm"
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "meshllm.cli.main", *words[1:]],
        capture_output=True, text=True, timeout=60, env=environment, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_shown_outputs_are_what_commands_print(document: Path) -> None:
    for command, shown in OUTPUT.findall(document.read_text("utf-8")):
        assert shown.strip() == _run(command).strip(), f"{document.name}: {command} prints something else"


def test_files_that_documents_name_exist() -> None:
    for name, text in _texts().items():
        for path in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|c|h|md|toml|service|json|sh))`", text):
            roots = (REPOSITORY, REPOSITORY / "meshllm")
            assert any((root / path).exists() for root in roots), f"{name} names {path}, which is not there"


def test_architecture_can_be_read_in_a_sitting() -> None:
    assert (REPOSITORY / "ARCHITECTURE.md").read_text("utf-8").count("\n") < 200


if __name__ == "__main__":
    for path in DOCUMENTS:
        old = path.read_text("utf-8")
        new = OUTPUT.sub(lambda m: f"<!-- output of: {m[1]} -->\n```\n{_run(m[1]).rstrip()}\n```", old)
        path.write_text(new, "utf-8")
