"""The composition root of a daemon: makes every part, starts control loop, data loop and API, ends them on a signal.

What is wrong with configuration, secret, port, state folder or instruction set is one error before anything runs.
After that a start needs nothing: no network, no peers, no model are normal states. A signal ends in this order: no new
requests, running answers end with an error event, peers and mDNS are told goodbye, the data loop stops, the socket is
removed.
"""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import trio

from meshllm import __version__
from meshllm.addresses import split_address
from meshllm.api.server import open_sockets, open_to_others, serve
from meshllm.config import Config
from meshllm.daemon.control_loop import ControlLoop
from meshllm.daemon.data_loop import DataLoop
from meshllm.daemon.device import default_name, describe_device, load_node_id
from meshllm.daemon.generation import Generator
from meshllm.daemon.model_store import ModelStore
from meshllm.daemon.systemd import Notifier, take_listening_sockets
from meshllm.errors import ConfigError, MeshLLMError
from meshllm.kernels.binding import Kernels
from meshllm.kernels.cpu import usable_cpus
from meshllm.log import Logger, configure_logging
from meshllm.mesh.facts import NodeConfig
from meshllm.net.identity import Identity, load_or_make_secret
from meshllm.net.listener import bind
from meshllm.net.reasons import first_of
from meshllm.settings import DEFAULT_PORT, PORT_TRIES

SWITCH_INTERVAL_S: Final = 1e-4  # a thread that comes back from C waits so long for the interpreter, not 5 ms
LEAST_DESCRIPTORS, MOST_DESCRIPTORS = 128, 4096  # an idle daemon has 30; connections of API and mesh come on top
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
DATA_LOOP_STOP_S: Final = 3.0
API_STOP_S: Final = 3.0  # for streams to write their last event


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is made before anything runs."""

    node: NodeConfig
    control: ControlLoop
    data: DataLoop


def run(config: Config) -> int:
    """Runs the daemon until SIGTERM or SIGINT; 0 after a clean stop. Raises MeshLLMError where it cannot run."""
    log = configure_logging(config.log_format, config.log_level)
    _take_descriptors()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with _state_folder(config):
        try:
            trio.run(_main, config, log, os.environ)
        except* MeshLLMError as group:
            raise first_of(group) from group
    log.info("stopped")
    return 0


def _take_descriptors() -> None:
    """As many file descriptors as may be had, up to what a daemon can use. Raises ConfigError for too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MOST_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < LEAST_DESCRIPTORS:
        raise ConfigError(f"only {wanted} files may be open at once, {LEAST_DESCRIPTORS} are needed: raise ulimit -n")


@contextmanager
def _state_folder(config: Config) -> Iterator[None]:
    """Holds the state folder: two daemons must not share one. Raises ConfigError."""
    try:
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (config.state_dir / ".daemon.lock").open("w")
    except OSError as error:
        where = error.filename or config.state_dir
        raise ConfigError(f"{where}: cannot be used ({error.strerror}); choose another with --state-dir") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{config.state_dir}: another daemon uses this state folder; give this one its own with --state-dir"
            ) from None
        yield


async def _main(config: Config, log: Logger, environment: Mapping[str, str]) -> None:
    tcp = split_address(config.tcp) if config.tcp is not None else None
    inherited = take_listening_sockets(environment)
    early: list[int] = []
    for number in STOP_SIGNALS:  # what the receiver leaves behind: one that comes on the way out changes nothing
        signal.signal(number, lambda number, _: early.append(number))
    try:
        with (
            trio.open_signal_receiver(*STOP_SIGNALS) as signals,
            open_sockets(config.socket, config.socket_mode, config.socket_group, tcp, inherited) as api_sockets,
        ):
            if not early:
                await _run(config, log, environment, signals, api_sockets)
    finally:
        for number in STOP_SIGNALS:  # trio closes the pipe that handlers wake it by, and the interpreter the rest
            signal.signal(number, signal.SIG_IGN)


async def _run(
    config: Config,
    log: Logger,
    environment: Mapping[str, str],
    signals: AsyncIterator[int],
    api_sockets: Sequence[socket.socket],
) -> None:
    for address in open_to_others(api_sockets):
        risk = "there is no password: whoever reaches this address may use the model and read /status"
        log.warning("api_open_to_network", address=address, risk=risk, cure="--tcp 127.0.0.1:PORT, or a firewall")
    parts = _make_parts(config, log)
    try:
        await _serve(config, parts, api_sockets, signals, Notifier(environment), log)
    finally:
        if not parts.data.join(DATA_LOOP_STOP_S):
            log.error("data_loop_hung", after_s=DATA_LOOP_STOP_S)


async def _serve(
    config: Config,
    parts: _Parts,
    api_sockets: Sequence[socket.socket],
    signals: AsyncIterator[int],
    notifier: Notifier,
    log: Logger,
) -> None:
    """Runs everything until a signal, then ends it in the order that the head of this file gives."""
    node = parts.node
    generator = Generator(parts.control, config.context)
    stopping, api_ended = trio.Event(), trio.Event()

    async def run_api(*, task_status: trio.TaskStatus[None]) -> None:
        await serve(generator, api_sockets, stopping, log, task_status=task_status)
        api_ended.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(parts.control.run)
        await nursery.start(run_api)
        log.info("started", name=node.name, node=node.node, port=node.port, socket=str(config.socket))
        notifier.send("READY=1", f"STATUS=port {node.port}")
        nursery.start_soon(notifier.keep_alive)
        number = await anext(signals)
        nursery.start_soon(_ignore, signals)
        log.info("stopping", signal=signal.Signals(number).name)
        notifier.send("STOPPING=1")
        stopping.set()
        await parts.control.stop("the daemon is stopping")
        with trio.move_on_after(API_STOP_S):
            await api_ended.wait()
        nursery.cancel_scope.cancel()


async def _ignore(signals: AsyncIterator[int]) -> None:
    """Whoever signals twice has been heard the first time; a second one must not cut the way out short."""
    async for _ in signals:
        pass


def _make_parts(config: Config, log: Logger) -> _Parts:
    """Everything that can be wrong with the configuration is found here. Raises ConfigError or KernelError."""
    node_id = load_node_id(config.state_dir)
    secret, made = load_or_make_secret(config.key_file)
    if made:
        log.info("mesh_secret_made", file=str(config.key_file), next="meshllm key show, then key set on other devices")
    identity = Identity.create(secret, node_id)
    sockets, port = bind(config.port, DEFAULT_PORT, PORT_TRIES)
    kernels = Kernels(config.isa, config.threads or usable_cpus())
    device = describe_device(node_id, kernels, __version__, config.state_dir, config.memory)
    log.info("device_measured", isa=kernels.isa, threads=kernels.n_threads, read_gbps=round(device.read_gbps, 1))
    node = NodeConfig(
        node=node_id,
        incarnation=secrets.randbits(63),
        name=config.name or default_name(),
        port=port,
        build=__version__,
        threads=kernels.n_threads,
        isa=kernels.isa,
        layout_mode=config.layout,
        context=config.context,
        slots=config.slots,
        exchange=config.exchange,
    )
    data = DataLoop(node_id, kernels)
    control = ControlLoop(
        config=node,
        device=device,
        identity=identity,
        data=data,
        sockets=sockets,
        peers=[split_address(peer, default_port=DEFAULT_PORT) for peer in config.peers],
        interfaces=config.interfaces,
        store=ModelStore(config.state_dir),
        wanted_model=config.model,
        log=log,
    )
    return _Parts(node, control, data)
