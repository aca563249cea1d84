"""`meshllm status`: the devices, who holds what, and what is missing; as a table, once or for ever, or as JSON."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import msgspec

from meshllm.cli.client import DaemonClient
from meshllm.cli.options import client_of, socket_option
from meshllm.errors import MeshLLMError, NoDaemonError
from meshllm.status import STATUS_VERSION, Status

WATCH_S = 1.0
PIPE_WIDTH = 1 << 16  # columns where stdout is no terminal: nothing is left out, no line is folded


@click.command()
@socket_option
@click.option("--watch", "-w", is_flag=True, help="Show it again each second, until ^C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object (with --watch one a line); its shape is stable.")
def status(socket: Path | None, watch: bool, as_json: bool) -> None:
    """Show the devices of the mesh: address, part of the model, memory, speed, round trip."""
    client = client_of(socket)
    if as_json:
        _print_json(client, watch)
    elif watch and sys.stdout.isatty():
        _watch(client)
    else:
        _print_table(client, watch)


def fetch_status(client: DaemonClient) -> Status:
    """What the daemon says of itself; MeshLLMError if it speaks another version of it."""
    answer = client.get("/status")
    try:
        return msgspec.json.decode(answer, type=Status)
    except msgspec.ValidationError as error:
        raise MeshLLMError(
            f"the daemon's status has another form ({error}; this command knows version {STATUS_VERSION}): "
            "update meshllm and restart the daemon"
        ) from None
    except msgspec.DecodeError:
        raise NoDaemonError("what listens on the socket is no meshllm daemon") from None


def _print_json(client: DaemonClient, watch: bool) -> None:
    while True:
        value = msgspec.to_builtins(fetch_status(client))
        text = msgspec.json.encode(value)
        click.echo((text if watch else msgspec.json.format(text, indent=2)).decode())
        if not watch:
            return
        time.sleep(WATCH_S)


def _print_table(client: DaemonClient, watch: bool) -> None:
    from rich.console import Console

    from meshllm.cli.render import status_view

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    while True:
        status = fetch_status(client)
        with console.capture() as text:  # rich would answer a closed pipe in its own way
            console.print(status_view(status, console.width))
        click.echo(text.get(), nl=watch)
        if not watch:
            return
        time.sleep(WATCH_S)


def _watch(client: DaemonClient) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from meshllm.cli.render import status_view

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                live.update(status_view(fetch_status(client), console.width), refresh=True)
            except NoDaemonError as error:  # it may be restarting
                live.update(Text(str(error), "yellow"), refresh=True)
            time.sleep(WATCH_S)
