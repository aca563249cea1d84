"""Options that several commands share, and what they mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import click

from meshllm.cli.client import DaemonClient, Json

Command = TypeVar("Command", bound=Callable[..., object])

socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path, readable=False),
    metavar="PATH",
    help="Socket of the daemon [MESHLLM_SOCKET; else the user's own, then the system's].",
)


def client_of(socket: Path | None) -> DaemonClient:
    """A client of the daemon that the user chose, or of the first that answers."""
    from meshllm.config import client_sockets

    return DaemonClient((socket.absolute(),) if socket else client_sockets(os.environ))


SAMPLING: Mapping[str, click.Option] = {
    "max_tokens": click.Option(["--max-tokens"], type=click.IntRange(1), metavar="N", help="Stop after N tokens."),
    "temperature": click.Option(
        ["--temperature"], type=click.FloatRange(0, 100), metavar="T", help="0 takes the likeliest token each time."
    ),
    "top_p": click.Option(["--top-p"], type=click.FloatRange(0, 1), metavar="P", help="Draw from the likeliest P."),
    "top_k": click.Option(["--top-k"], type=click.IntRange(0), metavar="K", help="Draw from the K likeliest."),
    "min_p": click.Option(
        ["--min-p"], type=click.FloatRange(0, 1), metavar="P", help="Drop what is P times less likely than the best."
    ),
    "seed": click.Option(["--seed"], type=click.IntRange(0, 2**64 - 1), metavar="N", help="Same seed, same answer."),
    "stop": click.Option(["--stop"], multiple=True, metavar="TEXT", help="Stop before this text; repeatable."),
}


def sampling_options(command: Command) -> Command:
    """Adds --max-tokens, --temperature and so on; their values come as the keyword arguments of SAMPLING."""
    parameters: list[click.Parameter] = getattr(command, "__click_params__", [])
    parameters.extend(reversed(list(SAMPLING.values())))
    command.__click_params__ = parameters  # type: ignore[attr-defined]  # what click.option itself keeps
    return command


def sampling_body(values: Mapping[str, object]) -> dict[str, Json]:
    """The fields of a request for the sampling options that were given."""
    body: dict[str, Json] = {}
    for name in SAMPLING:
        value = values.get(name)
        if isinstance(value, tuple):
            if value:
                body[name] = [text_of_argument(str(text)) for text in value]
        elif isinstance(value, int | float):
            body[name] = value
    return body


def text_of_argument(argument: str) -> str:
    """What was typed, as UTF-8 whatever the locale says; bytes that are none become U+FFFD."""
    return os.fsencode(argument).decode("utf-8", "replace")
