"""The commands `pull`, `models` and `tokenize`: they work on files and need no daemon; `pull`
uses one that runs, to copy a model from other devices."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshllm.cli.options import client_of, socket_option
from meshllm.errors import ModelFileError, NoModelError, UsageError

if TYPE_CHECKING:  # imported where they are used: `tokenize` must not pay for `pull`, nor the other way round
    from meshllm.daemon.model_store import ModelStore

MAX_STDIN_BYTES = 256 << 20

_state_dir = click.option(
    "--state-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder that holds the models."
)


@click.command()
@click.argument("source")
@click.option("--name", help="Name to keep it under; the file's own if not given.")
@click.option("--copy", is_flag=True, help="Copy a file instead of linking to it.")
@_state_dir
@socket_option
def pull(source: str, name: str | None, copy: bool, state_dir: Path | None, socket: Path | None) -> None:
    """Get the model SOURCE ("smollm2"), or register the GGUF file at the path SOURCE.

    A name is asked of the mesh first, where a daemon runs here: what other devices serve under it is copied from them.
    The internet comes second. A file is linked into the state folder, so it needs no second copy on disk. A name that
    is taken moves to the new file. ^C leaves the models as they were.
    """
    from meshllm.cli.mesh_pull import is_path, pull_from_mesh
    from meshllm.cli.progress import shown_progress
    from meshllm.cli.text import in_bytes
    from meshllm.daemon import model_sources

    store = _store(state_dir)
    with shown_progress() as progress:
        found = None if is_path(source) else pull_from_mesh(client_of(socket), store, source, name, progress)
        model, how = found or model_sources.pull(store, source, name, copy=copy, progress=progress)
    click.echo(f"{model.name}: {in_bytes(model.size)}, sha256 {model.sha256[:12]}…, {how}", err=True)
    if model.replaced is not None:
        click.echo(f"{model.name} now names {source} (was sha256 {model.replaced[:12]}…)", err=True)
    click.echo(model.name)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@_state_dir
def models(as_json: bool, state_dir: Path | None) -> None:
    """List the models of this device."""
    from meshllm.cli.text import in_bytes

    store = _store(state_dir)
    found = store.list()
    if as_json:
        rows = [{"name": m.name, "bytes": m.size, "sha256": m.sha256, "path": str(m.path)} for m in found]
        click.echo(json.dumps({"version": 1, "models": rows}, indent=2))
        return
    if not found:
        raise NoModelError('no model on this device yet: run "meshllm pull smollm2", or "meshllm pull FILE.gguf"')
    width = max(len(model.name) for model in found)
    for model in found:
        try:
            store.resolve(model.name)
            note = ""
        except (NoModelError, ModelFileError) as error:
            note = f"  cannot be used: {error}"
        click.echo(f"{model.name:<{width}}  {in_bytes(model.size):>8}  {model.sha256[:12]}{note}")


@click.command()
@click.option("--model", "-m", required=True, help="A GGUF file (one with a vocabulary alone too), or a model's name.")
@click.option("--parse-special", is_flag=True, help="Control tokens written in a text become those tokens.")
@click.option("--json", "as_json", is_flag=True, help="Refuse input that is no JSON list of strings.")
@_state_dir
def tokenize(model: str, parse_special: bool, as_json: bool, state_dir: Path | None) -> None:
    """Turn texts on stdin into token ids with a model file; no BOS is added.

    A JSON list of strings gives a JSON list of lists of ids. Anything else is one text; its ids are printed on a line.
    """
    from meshllm.model.model_file import ModelFile

    path = Path(model).expanduser()
    raw = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(raw) > MAX_STDIN_BYTES:
        raise UsageError(f"stdin is over {MAX_STDIN_BYTES >> 20} MiB: tokenize it in parts")
    texts = _json_texts(raw)
    if texts is None and as_json:
        raise UsageError('stdin is no JSON list of strings; expected for example ["Hello", "world"]')
    is_file = path.exists() or path.suffix == ".gguf"
    with ModelFile.open(path if is_file else _store(state_dir).resolve(model).path) as file:
        tokenizer = file.tokenizer
        if texts is None:
            text = raw.decode(errors="replace")
            click.echo(" ".join(map(str, tokenizer.encode(text, parse_special=parse_special))))
        else:
            ids = [tokenizer.encode(text, parse_special=parse_special) for text in texts]
            click.echo(json.dumps(ids, separators=(",", ":")))


def _json_texts(raw: bytes) -> list[str] | None:
    """The strings of a JSON list of strings; None for anything else."""
    if not raw.lstrip().startswith(b"["):
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(text, str) for text in found) else None


def _store(state_dir: Path | None) -> ModelStore:
    from meshllm.config import load_config
    from meshllm.daemon.model_store import ModelStore

    flags = {} if state_dir is None else {"state_dir": str(state_dir)}
    return ModelStore(load_config(flags, os.environ).state_dir)
