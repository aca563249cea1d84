"""Progress of `pull` on stderr: what is going on; once bytes come also how many, how fast and how long.

Where stderr is no terminal, what has to be waited for is one line when it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from rich import progress as bars
from rich.console import Console
from rich.text import Text

from meshllm.cli.text import in_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshllm.daemon.model_sources import Progress


class _OnceBytesCome(bars.ProgressColumn):
    """A column that is empty until then: a bar at nothing tells nothing."""

    def __init__(self, column: bars.ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: bars.Task) -> RenderableType:
        return self._column.render(task) if task.completed else Text("")


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """What is to be called with each step forward: what is done, bytes done (0: none have come yet), bytes in all."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_of_each()
        return
    numbers = (bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    columns = (bars.SpinnerColumn(), bars.TextColumn("{task.description} …"), *map(_OnceBytesCome, numbers))
    with bars.Progress(*columns, console=console, transient=True) as shown:
        tasks: dict[str, bars.TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.update(tasks[what], completed=done, total=total)

        yield report


def _line_of_each() -> Progress:
    told: set[str] = set()

    def report(what: str, done: int, total: int) -> None:
        if what not in told and not done:
            click.echo(f"{what} ({in_bytes(total)}) …", err=True)
        told.add(what)

    return report
