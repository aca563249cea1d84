"""`meshllm daemon`: reads the configuration and runs the service until a signal ends it. One flag for each setting."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import click

from meshllm.config import load_config
from meshllm.settings import SETTINGS


def _options() -> list[click.Parameter]:
    options: list[click.Parameter] = [
        click.Option(
            [setting.option, setting.name], metavar=setting.metavar, help=setting.help, multiple=setting.repeatable
        )
        for setting in SETTINGS
    ]
    config = click.Option(
        ["--config"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="configuration file [MESHLLM_CONFIG; /etc/meshllm/meshllm.toml or ~/.config/meshllm/meshllm.toml]",
    )
    return [*options, config]


def _run(config: Path | None, **flags: str | Sequence[str] | None) -> int:
    # The service stops by itself on these; until it does they end the process at once. An exception of a handler, as
    # other commands have it, may be lost within an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    settings = load_config(flags, os.environ, config_file=config)
    from meshllm.service import run

    return run(settings)


daemon = click.Command(
    "daemon",
    callback=_run,
    params=_options(),
    help="Run this device's part of the mesh, in the foreground, until a signal ends it.\n\n"
    "Each flag is also a variable (--state-dir: MESHLLM_STATE_DIR) and a key of the configuration file (state_dir), a "
    "repeatable one in the plural (--peer: MESHLLM_PEERS, peers); "
    "a flag wins over a variable, a variable over the file.",
)
