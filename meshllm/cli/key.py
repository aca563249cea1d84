"""`meshllm key`: the one secret that makes a mesh. It is shown on stdout, alone on its line, and nowhere else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from meshllm.errors import ConfigError, UsageError


@click.group()
def key() -> None:
    """Make, show or set the secret that makes a mesh.

    Devices with the same secret find and trust each other; others cannot join. Copy it once: meshllm key show on one
    device, meshllm key set on the next.
    """


def _file_options(command: click.Command) -> click.Command:
    for option in (
        click.Option(["--state-dir"], metavar="DIR", help="State folder of the daemon."),
        click.Option(["--key-file"], metavar="FILE", help="The file itself."),
        click.Option(["--config"], type=click.Path(path_type=Path), metavar="FILE", help="Configuration file."),
    ):
        command.params.append(option)
    return command


def _key_file(state_dir: str | None, key_file: str | None, config: Path | None) -> Path:
    from meshllm.config import load_config

    return load_config({"state_dir": state_dir, "key_file": key_file}, os.environ, config_file=config).key_file


@_file_options
@key.command()
@click.option("--force", is_flag=True, help="Replace the secret that is there.")
def new(force: bool, state_dir: str | None, key_file: str | None, config: Path | None) -> None:
    """Make a new secret and show it."""
    from meshllm.net.identity import MeshSecret

    secret = MeshSecret.generate()
    _write(_key_file(state_dir, key_file, config), secret.to_text(), force=force)
    click.echo(secret.to_text())


@_file_options
@key.command()
def show(state_dir: str | None, key_file: str | None, config: Path | None) -> None:
    """Show the secret of this device, to be set on another."""
    from meshllm.net.identity import read_secret

    path = _key_file(state_dir, key_file, config)
    try:
        secret = read_secret(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no secret yet; make one: meshllm key new") from None
    click.echo(secret.to_text())


@_file_options
@key.command("set")
@click.argument("secret", required=False)
@click.option("--force", is_flag=True, help="Replace the secret that is there.")
def set_(secret: str | None, force: bool, state_dir: str | None, key_file: str | None, config: Path | None) -> None:
    """Take the secret of another device: typed when asked for, or piped in.

    It may also be given as an argument, where other users of this device can see it in the list of processes.
    """
    if secret is None or secret == "-":
        secret = click.prompt("mesh secret", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    if not secret.strip():
        raise UsageError("no secret given; copy the line that meshllm key show prints on another device")
    _write(_key_file(state_dir, key_file, config), secret, force=force)


def _write(path: Path, text: str, *, force: bool) -> None:
    from meshllm.net.identity import MeshSecret, write_secret

    secret = MeshSecret.from_text(text)
    try:
        write_secret(path, secret, replace=force)
    except FileExistsError:
        if _same(path, secret.to_text()):
            return
        raise ConfigError(f"{path}: there is a secret already; --force replaces it and leaves its mesh") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    click.echo(f"{path}: written (mesh {secret.tag}); a running daemon takes it at its next start", err=True)


def _same(path: Path, text: str) -> bool:
    from meshllm.net.identity import read_secret

    try:
        return read_secret(path).to_text() == text
    except ConfigError:
        return False
