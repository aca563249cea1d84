"""Options that several commands share, and what they mean."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from meshllm.cli.client import DaemonClient, Json
from meshllm.limits import MAX_SEED, MAX_STOP_CHARS, MAX_STOPS, MAX_TEMPERATURE, MAX_TOP_K, TOP_K_OFF

if TYPE_CHECKING:
    from meshllm.config import Config

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


def model_path(config: Config) -> Path:
    """The file of the model that is configured: a path as it is, which needs no hash, or a name's in the store.

    Raises NoModelError, ModelFileError.
    """
    from meshllm.daemon.model_store import ModelStore

    if config.model is not None and Path(config.model).is_file():
        return Path(config.model)
    return ModelStore(config.state_dir).resolve(config.model).path


class _FiniteRange(click.FloatRange):
    """A range of floats that nan is not in."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not in the range {self._describe_range()}.", param, ctx)
        return number


def _checked_stops(ctx: click.Context, param: click.Parameter, stops: tuple[str, ...]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise click.BadParameter(f"given {len(stops)} times, at most {MAX_STOPS} are allowed.")
    if any(not 0 < len(text_of_argument(stop)) <= MAX_STOP_CHARS for stop in stops):
        raise click.BadParameter(f"expected text of 1 to {MAX_STOP_CHARS} characters.")
    return stops


# What the API would refuse is wrong usage here, before a daemon is asked: the bounds are limits.py's, as the API's are.
SAMPLING: Mapping[str, click.Option] = {
    "max_tokens": click.Option(["--max-tokens"], type=click.IntRange(1), metavar="N", help="Stop after N tokens."),
    "temperature": click.Option(
        ["--temperature"],
        type=_FiniteRange(0, MAX_TEMPERATURE),
        metavar="T",
        help="0 takes the likeliest token each time, whatever the next ones say.",
    ),
    "top_p": click.Option(
        ["--top-p"], type=_FiniteRange(0, 1, min_open=True), metavar="P", help="Draw from the likeliest P."
    ),
    "top_k": click.Option(
        ["--top-k"], type=click.IntRange(TOP_K_OFF, MAX_TOP_K), metavar="K", help="Draw from the K likeliest; 0: all."
    ),
    "min_p": click.Option(
        ["--min-p"], type=_FiniteRange(0, 1), metavar="P", help="Drop what is P times less likely than the best."
    ),
    "seed": click.Option(["--seed"], type=click.IntRange(0, MAX_SEED), metavar="N", help="Same seed, same answer."),
    "stop": click.Option(
        ["--stop"], multiple=True, metavar="TEXT", callback=_checked_stops, help="Stop before this text; repeatable."
    ),
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
