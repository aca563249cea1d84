"""`meshllm doctor`: what keeps this device from its part, and what to do about each thing. It changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click

from meshllm.cli.client import DaemonClient
from meshllm.cli.options import client_of, socket_option
from meshllm.cli.status import fetch_status
from meshllm.cli.text import in_bytes, printable
from meshllm.errors import ConfigError, MeshLLMError

if TYPE_CHECKING:
    from meshllm.config import Config
    from meshllm.net.interfaces import Interface
    from meshllm.status import Status

Verdict = Literal["ok", "warning", "problem"]
LISTEN_S: Final = 2.0  # for other devices' announcements
LOW_MEMORY: Final = 512 << 20
LOW_DISK: Final = 1 << 30
COLORS: Final = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. cure: what to do; empty where nothing need be done."""

    check: str
    verdict: Verdict
    found: str
    cure: str = ""


@click.command()
@click.option("--state-dir", metavar="DIR", help="State folder of the daemon.")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="Configuration file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@socket_option
def doctor(state_dir: str | None, config: Path | None, as_json: bool, socket: Path | None) -> None:
    """Look for what is wrong on this device, and say what to do. Exits with 1 if there is a problem."""
    findings = []
    for finding in _examine(state_dir, config, socket):
        findings.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        click.echo(json.dumps({"version": 1, "findings": [asdict(finding) for finding in findings]}, indent=2))
    if any(finding.verdict == "problem" for finding in findings):
        raise SystemExit(MeshLLMError.exit_code)


def _show(finding: Finding) -> None:
    verdict = click.style(f"{finding.verdict:8}", fg=COLORS[finding.verdict])
    click.echo(f"{verdict} {finding.check:12} {printable(finding.found)}")
    if finding.cure:
        click.echo(f"{'':21} {finding.cure}")


def _examine(state_dir: str | None, file: Path | None, socket: Path | None) -> Iterator[Finding]:
    from meshllm.config import load_config

    yield from _processor()
    yield from _memory()
    try:
        config = load_config({"state_dir": state_dir}, os.environ, config_file=file)
    except ConfigError as error:
        yield Finding("configuration", "problem", str(error), "without it the rest cannot be looked at")
        return
    yield from _state(config.state_dir)
    tag, finding = _secret(config.key_file)
    yield finding
    status, finding = _daemon(client_of(socket or (config.socket if state_dir else None)))
    yield finding
    if status is None:
        yield _model(config)
    yield from _network(config, tag or "0" * 16, status)
    yield from _peers(status)


def _processor() -> Iterator[Finding]:
    from meshllm.kernels.binding import Kernels, list_isas
    from meshllm.kernels.cpu import cpu_quota, usable_cpus
    from meshllm.kernels.links import KEY_BYTES, SealedLink

    isas = list_isas()
    own = Kernels("", usable_cpus())
    quota = cpu_quota()
    limited = "" if quota is None else f", {quota:.1f} CPUs allowed by its cgroup"
    absent = [name for name, runs in isas if not runs]
    better = f"; not here: {', '.join(absent)}" if absent else ""
    found = f"{own.isa}, {own.n_threads} threads of {os.cpu_count()} CPUs{limited}{better}"
    if own.isa == "scalar":
        yield Finding("processor", "warning", found, "no instruction set with fast kernels: answers will be slow")
    else:
        yield Finding("processor", "ok", found)
    try:
        SealedLink(-1, bytes(KEY_BYTES), bytes(KEY_BYTES), aes=True, frame_limit=0)
        yield Finding("links", "ok", "OpenSSL's libcrypto seals what goes between devices")
    except ConfigError as error:
        yield Finding("links", "problem", str(error))


def _memory() -> Iterator[Finding]:
    from meshllm.kernels.cpu import free_memory, huge_pages, usable_memory

    total, free = usable_memory(), free_memory()
    found = f"{in_bytes(free)} free of {in_bytes(total)}"
    if free is not None and free < LOW_MEMORY:
        yield Finding("memory", "warning", found, "this device can hold a small part of a model at most")
    else:
        yield Finding("memory", "ok", found)
    if huge_pages() == "never":
        path = "/sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("huge pages", "warning", "off, so weights are read more slowly", f"echo madvise > {path}")


def _state(folder: Path) -> Iterator[Finding]:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        cure = "run it as the daemon's user (the service's: sudo meshllm doctor), or choose another with --state-dir"
        yield Finding("state folder", "problem", f"{folder} cannot be written by this user", cure)
        return
    free = shutil.disk_usage(there).free
    found = f"{folder}{'' if folder.exists() else ' (made at the first start)'}, {in_bytes(free)} free"
    if free < LOW_DISK:
        yield Finding("state folder", "warning", found, "models need room: free some, or choose another disk")
    else:
        yield Finding("state folder", "ok", found)


def _secret(path: Path) -> tuple[str | None, Finding]:
    from meshllm.net.identity import read_secret

    try:
        tag = read_secret(path).tag
    except FileNotFoundError:
        cure = "the first start makes one; to join a mesh first: meshllm key set"
        return None, Finding("secret", "warning", f"{path}: none yet", cure)
    except ConfigError as error:
        return None, Finding("secret", "problem", str(error))
    return tag, Finding("secret", "ok", f"{path} (mesh {tag})")


def _daemon(client: DaemonClient) -> tuple[Status | None, Finding]:
    try:
        status = fetch_status(client)
    except MeshLLMError as error:
        return None, Finding("daemon", "problem", str(error))
    model = f", model {status.model.name}" if status.model else ""
    found = f"{status.name}: {status.state}{model}"
    if status.state == "serving":
        return status, Finding("daemon", "ok", found)
    return status, Finding("daemon", "warning", found, status.detail or "")


def _model(config: Config) -> Finding:
    from meshllm.daemon.model_store import ModelStore

    try:
        names = [model.name for model in ModelStore(config.state_dir).list()]
    except (MeshLLMError, OSError) as error:
        return Finding("models", "problem", str(error))
    if names:
        return Finding("models", "ok", ", ".join(names))
    return Finding("models", "warning", "none on this device", "meshllm pull smollm2, or meshllm pull FILE.gguf")


def _network(config: Config, tag: str, status: Status | None) -> Iterator[Finding]:
    from meshllm.net.interfaces import choose_interfaces, read_interfaces
    from meshllm.net.look_around import hears_itself

    chosen = choose_interfaces(read_interfaces(), config.interfaces)
    if not chosen:
        cure = f"none is up that fits {', '.join(config.interfaces)}" if config.interfaces else "connect a network"
        yield Finding("interfaces", "problem", "none to use", cure)
        return
    found = "; ".join(f"{one.name} ({', '.join(one.addresses)})" for one in chosen)
    if all(one.is_loopback for one in chosen):
        yield Finding("interfaces", "warning", f"{found}: daemons of this device alone", "connect a network")
    else:
        yield Finding("interfaces", "ok", found)
    deaf = [(one.name, why) for one in chosen if (why := hears_itself(one))]
    for name, why in deaf:
        yield Finding("multicast", "problem", f"{name}: {why}", "let UDP port 5353 through the firewall, or use --peer")
    if not deaf:
        yield _announced(chosen, tag, status)


def _announced(chosen: tuple[Interface, ...], tag: str, status: Status | None) -> Finding:
    from meshllm.layout.layout import NodeId
    from meshllm.net.adverts import Announcement
    from meshllm.net.look_around import listen

    own = Announcement(NodeId(status.node if status else ""), status.mesh_tag if status else tag, "0.0", 1)
    try:
        heard = listen(own, chosen, LISTEN_S)
    except OSError as error:
        return Finding("multicast", "problem", f"cannot be used: {error}", "name the other devices with --peer")
    if status is not None and not heard.own:
        return Finding("multicast", "problem", "the daemon's own announcement is not heard", "restart the daemon")
    strangers = f", {heard.strangers} of other meshes" if heard.strangers else ""
    others = f"{len(heard.mesh) or 'no'} other device{'s'[: len(heard.mesh) != 1]} of this mesh announced{strangers}"
    if heard.mesh:
        return Finding("multicast", "ok", others)
    cure = "is a daemon with the same secret running there? some access points keep multicast back: use --peer"
    return Finding("multicast", "warning", others, cure)


def _peers(status: Status | None) -> Iterator[Finding]:
    for peer in status.peers if status else ():
        if peer.state == "connected":
            yield Finding("peer", "ok", f"{peer.name}: connected")
        elif peer.state != "self":
            yield Finding("peer", "warning", f"{peer.name}: {peer.state}", peer.reason or "")
