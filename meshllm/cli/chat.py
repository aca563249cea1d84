"""`meshllm chat`: a conversation on a terminal. What was said is kept here and sent whole each time.

The daemon reuses what it has already computed of it. ^C stops an answer, which is then forgotten with its question.
^C at the prompt or ^D ends the chat, which is no failure.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import click

from meshllm.cli.answer import Answer, say, stream_answer
from meshllm.cli.client import DaemonClient, Json
from meshllm.cli.options import client_of, sampling_body, sampling_options, socket_option, text_of_argument
from meshllm.cli.text import closing_line
from meshllm.errors import ContextLengthError, MeshLLMError, NoDaemonError

TEMPERATURE = 0.7
COMMANDS = ("/new", "/help", "/quit")
HELP = "/new starts over, /quit or ^D ends, ^C stops an answer; a line that ends with \\ goes on in the next"


@click.command()
@socket_option
@click.option("-m", "--model", metavar="MODEL", help="Name of the model; the one that is served if not given.")
@click.option("--system", metavar="TEXT", help="System message.")
@sampling_options
def chat(socket: Path | None, model: str | None, system: str | None, **sampling: object) -> None:
    """Talk, with the conversation kept. --temperature is 0.7 if not given."""
    client = client_of(socket)
    client.get("/v1/models")  # better to hear now that there is no daemon than after typing
    body = sampling_body({"temperature": TEMPERATURE, **{k: v for k, v in sampling.items() if v is not None}})
    if model is not None:
        body["model"] = model
    opening: list[Json] = [{"role": "system", "content": text_of_argument(system)}] if system else []
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # gives input() editing and a history

        say(HELP)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _converse(client, body, opening, interactive=interactive)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not break the way out
        click.echo()


def _converse(client: DaemonClient, body: dict[str, Json], opening: list[Json], *, interactive: bool) -> None:
    """Reads and answers until the end of what is said."""
    messages = list(opening)
    while (line := _read_line(interactive)) is not None:
        command = re.match(r"/\w*(?!\S)", line)
        if command is None:
            messages = _turn(client, body, messages, line.strip()) if line.strip() else messages
        elif command[0] in ("/quit", "/exit", "/bye"):
            return
        elif command[0] == "/new":
            messages = list(opening)
        elif command[0] == "/help":
            say(HELP)
        else:
            say(f"no command {command[0]}; there are {', '.join(COMMANDS)} (a space before it makes it text)")


def _read_line(interactive: bool) -> str | None:
    """The next thing said; None at the end."""
    lines: list[str] = []
    while True:
        try:
            line = input(("… " if lines else "> ") if interactive else "")
        except EOFError:
            if interactive:
                click.echo()
            return "\n".join(lines) or None
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines).rstrip()


def _turn(client: DaemonClient, body: dict[str, Json], messages: list[Json], line: str) -> list[Json]:
    """Asks, shows the answer and returns the conversation after it; what failed leaves it as it was."""
    asked: list[Json] = [*messages, {"role": "user", "content": line}]
    try:
        answer = _interruptible(client, {**body, "messages": asked})
    except MeshLLMError as error:
        if isinstance(error, NoDaemonError) or not sys.stdin.isatty():  # a pipe goes on talking to nobody
            raise
        hint = "; /new starts over" if isinstance(error, ContextLengthError) else ""
        say(f"{error}{hint}")
        return messages
    if answer is None:
        return messages
    say(closing_line(answer.tokens, answer.tok_s, answer.peers, answer.finish))
    return [*asked, {"role": "assistant", "content": answer.text}]


def _interruptible(client: DaemonClient, body: dict[str, Json]) -> Answer | None:
    """The answer, or None if ^C stopped it: then the next ^C ends the command as before."""
    ends = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return stream_answer(client, "/v1/chat/completions", body, show=True)
    except KeyboardInterrupt:
        say("(stopped)")
        return None
    finally:
        signal.signal(signal.SIGINT, ends)
