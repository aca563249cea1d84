"""`meshllm ask`: one question, one answer. stdout carries the answer and nothing else.

The question is the prompt, then each -f file, then stdin, with an empty line between. When stdin is read:
* no prompt, or "-" among its words: always, to its end (from a terminal only for "-");
* a prompt and a file or pipe on stdin: to its end too, but a pipe on which nothing comes for 5 s is left alone, with a
  note: under cron or ssh a pipe may be inherited that nobody writes to;
* a prompt and a terminal, or no stdin at all: never.
"""

from __future__ import annotations

import json
import os
import select
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from meshllm.cli.answer import say, stream_answer
from meshllm.cli.client import Json
from meshllm.cli.options import client_of, sampling_body, sampling_options, socket_option, text_of_argument
from meshllm.cli.text import closing_line
from meshllm.errors import UsageError

SILENT_PIPE_S = 5.0
MAX_INPUT_BYTES = 16 << 20  # of a file or stdin; no context holds more

Stdin = Literal["none", "optional", "wanted"]


@click.command()
@click.argument("prompt", nargs=-1)
@socket_option
@click.option("-m", "--model", metavar="MODEL", help="Name of the model; the one that is served if not given.")
@click.option("-f", "--file", "files", multiple=True, type=click.Path(path_type=Path), help="Add a file; repeatable.")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@click.option("-q", "--quiet", is_flag=True, help="No closing line on stderr.")
@sampling_options
def ask(
    prompt: tuple[str, ...],
    socket: Path | None,
    model: str | None,
    files: tuple[Path, ...],
    system: str | None,
    raw: bool,
    as_json: bool,
    quiet: bool,
    **sampling: object,
) -> None:
    """Answer one question; the text streams to stdout.

    Text piped in is added to the question: git diff | meshllm ask "Write a commit message". Without --temperature the
    likeliest token is taken each time, so that the same question has the same answer on every device.
    """
    question = _question(prompt, files)
    body = sampling_body({"temperature": 0.0, **{k: v for k, v in sampling.items() if v is not None}})
    if model is not None:
        body["model"] = model
    path = "/v1/completions" if raw else "/v1/chat/completions"
    body.update({"prompt": question} if raw else {"messages": _messages(system, question)})
    answer = stream_answer(client_of(socket), path, body, show=not as_json)
    if as_json:
        click.echo(json.dumps(answer.to_json(), ensure_ascii=False))
    if not quiet and not as_json:
        say(closing_line(answer.tokens, answer.tok_s, answer.peers, answer.finish))


def _messages(system: str | None, question: str) -> list[Json]:
    messages: list[Json] = [] if system is None else [{"role": "system", "content": text_of_argument(system)}]
    return [*messages, {"role": "user", "content": question}]


def _question(prompt: Sequence[str], files: Sequence[Path]) -> str:
    """The whole question. Raises UsageError if there is none."""
    words = [text_of_argument(word) for word in prompt if word != "-"]
    wanted = "-" in prompt or not (words or files)
    typed = " ".join(words)
    parts = [typed] if typed.strip() else []
    parts += [_read_file(path) for path in files]
    kind = stdin_kind(wanted=wanted, dash="-" in prompt)
    if kind != "none" and (text := read_stdin(None if kind == "wanted" else SILENT_PIPE_S)):
        parts.append(text)
    if not any(part.strip() for part in parts):
        raise UsageError('nothing to ask; try: meshllm ask "Why is the sky blue?", or pipe text into it')
    return "\n\n".join(part.rstrip("\n") if part is not parts[-1] else part for part in parts)


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    return _text_of(content, str(path))


def _text_of(content: bytes, name: str) -> str:
    if len(content) > MAX_INPUT_BYTES:
        raise UsageError(f"{name}: holds more than {MAX_INPUT_BYTES >> 20} MiB, which fits no context")
    return content.decode("utf-8", "replace")


def stdin_kind(*, wanted: bool, dash: bool) -> Stdin:
    """Whether stdin is to be read: the rule at the head of this file."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return "none"  # closed
    if stat.S_ISCHR(mode):  # a terminal or /dev/null
        return "wanted" if dash or (wanted and not os.isatty(0)) else "none"
    if wanted:
        return "wanted"
    return "optional" if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode) else "none"


def read_stdin(patience_s: float | None) -> str:
    """stdin up to its end; "" if a pipe stays silent for `patience_s` (None: wait for ever)."""
    if patience_s is not None and not select.select([0], [], [], patience_s)[0]:
        say(f"(nothing came on stdin within {patience_s:g} s: asking without it; give - to wait for it)")
        return ""
    content = bytearray()
    while len(content) <= MAX_INPUT_BYTES and (part := os.read(0, 1 << 16)):
        content += part
    return _text_of(bytes(content), "stdin")
