"""`meshllm chat`: a conversation on a terminal. What was said is kept here and sent whole each time.

The daemon reuses what it has already computed of it. ^C stops an answer, ^C at the prompt or ^D ends.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from meshllm.cli.answer import Answer, say, stream_answer
from meshllm.cli.client import DaemonClient, Json
from meshllm.cli.options import client_of, sampling_body, sampling_options, socket_option, text_of_argument
from meshllm.cli.text import closing_line
from meshllm.errors import ContextLengthError, MeshLLMError, NoDaemonError

HELP = "/new starts over, /quit ends, ^C stops an answer; a line that ends with \\ goes on in the next"


@click.command()
@socket_option
@click.option("-m", "--model", metavar="MODEL", help="Name of the model; the one that is served if not given.")
@click.option("--system", metavar="TEXT", help="System message.")
@sampling_options
def chat(socket: Path | None, model: str | None, system: str | None, **sampling: object) -> None:
    """Talk, with the conversation kept."""
    client = client_of(socket)
    client.get("/health")  # better to hear now that there is no daemon than after typing
    body = sampling_body({"temperature": 0.7, **{k: v for k, v in sampling.items() if v is not None}})
    if model is not None:
        body["model"] = model
    opening: list[Json] = [{"role": "system", "content": text_of_argument(system)}] if system else []
    messages = list(opening)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # gives input() editing and a history

        say(HELP)
    while (line := _read_line(interactive)) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/new":
            messages = list(opening)
        elif line:
            messages = _turn(client, body, messages, line)


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
            return "\n".join(lines).strip()


def _turn(client: DaemonClient, body: dict[str, Json], messages: list[Json], line: str) -> list[Json]:
    """Asks, shows the answer and returns the conversation after it; what failed leaves it as it was."""
    asked: list[Json] = [*messages, {"role": "user", "content": line}]
    try:
        answer = _interruptible(client, {**body, "messages": asked})
    except NoDaemonError:
        raise
    except MeshLLMError as error:
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
