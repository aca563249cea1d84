"""Some processes, each one Node over the fake data plane, in one simulated world. Everything follows from the seed.

Actions are executed as the control loop would: in order, each call of a Node followed by its actions and its next
deadline. Messages go through the real encoder and decoder, whose checks they must pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from data_plane import END_TOKEN, VOCAB, DataPlane
from invariants import Invariants, Reader
from network import Link, Network, Scheduler, Way

from meshllm.layout.layout import Device
from meshllm.layout.split import reserved_bytes
from meshllm.mesh.actions import (
    Action,
    Admit,
    CancelAdmitted,
    CloseLink,
    CommitEpoch,
    Deliver,
    Dial,
    Gather,
    LinkId,
    PrepareEpoch,
    Report,
    RetireEpoch,
    Send,
)
from meshllm.mesh.facts import LayoutMode, ModelFacts, NodeConfig
from meshllm.mesh.framing import FrameDecoder, encode_frame
from meshllm.mesh.messages import DataHello, Epoch, FileHello, ModelHash, RequestId, Submit
from meshllm.mesh.node import Node
from meshllm.model.slicing import ModelShape, Slice
from meshllm.parameters import SamplingParameters

SHAPE = ModelShape(
    n_layers=4,
    dim=64,
    n_heads=9,
    n_kv_heads=3,
    head_dim=32,
    ffn_dim=512,
    vocab_size=VOCAB,
    context_length=256,
    head_bytes=10_000,
    kv_head_bytes=10_000,
    ffn_unit_bytes=500,
    vocab_row_bytes=100,
    fixed_bytes=1000,
    head_align=1,
    ffn_align=32,
)
MODEL = ModelFacts(hash=ModelHash("ab" * 32), name="simulated", shape=SHAPE)


@dataclass
class Options:
    """A world."""

    n: int = 3
    layout: LayoutMode = "all"
    memory: int = 100_000_000
    refusals: float = 0.0
    partial: float = 0.0  # chance of a process to begin without the model's weights
    faults: float = 0.0  # of links, at most: see network.py
    partitions: bool = False


class Process:
    """One daemon, which may die and live again."""

    def __init__(self, cluster: Cluster, index: int, node_id: str, options: Options) -> None:
        self.cluster, self.index, self.node_id, self.options = cluster, index, node_id, options
        self.life = 0
        self.node: Node | None = None
        self.data: DataPlane | None = None
        self.paused = False
        self.offset = cluster.scheduler.rng.uniform(0.0, 1e6)  # of its monotonic clock
        self.links: dict[LinkId, tuple[Link, int]] = {}
        self.queue: list[Callable[[], None]] = []  # while paused
        self.reports: list[Report] = []
        self.whole = cluster.scheduler.rng.random() >= options.partial if options.partial else True
        self.parts: list[Slice] = []  # fetched, and kept on disk
        self._woken_for = math.inf
        self._wakes: list[float] = []

    @property
    def now(self) -> float:
        return self.cluster.scheduler.now + self.offset

    def start(self) -> None:
        rng = self.cluster.scheduler.rng
        self.life += 1
        config = NodeConfig(
            node=self.node_id,
            incarnation=rng.getrandbits(63),
            name=f"device-{self.index}",
            port=7000 + self.index,
            build="sim",
            threads=1,
            isa="scalar",
            layout_mode=self.options.layout,
            context=256,
            slots=2,
        )
        speed = 5.0 + 3.0 * self.index
        device = Device(node=self.node_id, read_gbps=speed, matmul_gops=10 * speed, usable_bytes=self.options.memory)
        self.links, self.queue, self.paused, self._woken_for = {}, [], False, math.inf
        self.data = DataPlane(self.cluster, self)
        self.node = Node(config, device, replace(MODEL, whole=self.whole, held=tuple(self.parts[:-5:-1])), self.now)
        for other in self.cluster.processes:
            if other is not self:
                static = rng.random() < 0.5
                node = None if static else other.node_id
                place = ((f"10.0.0.{other.index}", 7000 + other.index),)
                self.call(lambda n, now, node=node, place=place: n.addresses_found("mdns", node, place, now))
        self.call(lambda n, now: n.wake(now))

    def kill(self, *, silent: bool) -> None:
        """kill -9, or (silent) the power goes."""
        self.node = self.data = None
        links, self.links = self.links, {}
        for link, side in links.values():
            link.close(side, "connection reset", silent=silent)
        if not silent:
            self.cluster.member_died(self)
        for reader in self.cluster.invariants.readers.values():
            reader.gone = reader.gone or (reader.root == self.index and reader.ended is None)

    def stop(self) -> None:
        """A clean stop."""
        self.call(lambda node, now: node.shutdown("told to stop", now))
        if self.node is not None and not self.paused:
            self.kill(silent=False)

    def resume(self) -> None:
        self.paused = False
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def later(self, delay: float, work: Callable[[], None]) -> None:
        """Work of this life of the process, put off while it is paused."""
        life = self.life

        def run() -> None:
            if self.life == life and self.node is not None:
                self.queue.append(work) if self.paused else work()

        self.cluster.scheduler.after(delay, run)

    def call(self, what: Callable[[Node, float], None]) -> None:
        """One call of the Node, its actions, its deadline."""
        if self.node is None:
            return
        if self.paused:
            self.queue.append(lambda: self.call(what))
            return
        what(self.node, self.now)
        for action in self.node.take_actions():
            self._execute(action)
        self._arm()

    def _arm(self) -> None:
        if self.node is None:
            return
        deadline = self.node.next_deadline()
        if deadline >= self._woken_for:  # that wake arms the next
            return
        self._woken_for = deadline
        self.later(max(0.0, deadline - self.now) + 1e-4, self._wake)

    def _wake(self) -> None:
        self._woken_for = math.inf
        self.cluster.wakes += 1
        self._wakes.append(self.cluster.scheduler.now)
        del self._wakes[:-100]
        assert len(self._wakes) < 100 or self._wakes[-1] - self._wakes[0] > 0.1, "a busy loop of deadlines"
        self.call(lambda node, now: node.wake(now))

    def _execute(self, action: Action) -> None:
        invariants, who = self.cluster.invariants, (self.index, self.life)
        if self.node is None or self.data is None:
            return
        match action:
            case Send(link, message):
                if link in self.links:
                    held, side = self.links[link]
                    held.send(side, encode_frame(message))
            case CloseLink(link, reason):
                if link in self.links:
                    held, side = self.links.pop(link)
                    held.close(side, reason)
            case Dial(key, _, addresses):
                self.cluster.dial(self, key, addresses[0][1] - 7000)
            case PrepareEpoch():
                invariants.prepares(self.node_id, action)
                if action.rank is not None:
                    part = action.layout.shares[action.rank].slice
                    assert self.whole or any(held.holds(part) for held in self.parts), "offered what is not here"
                self.data.prepare(action)
            case CommitEpoch(epoch):
                assert self.data.epochs[epoch].linked
                invariants.commits_epoch(who, action)
            case RetireEpoch(epoch, reason):
                self.data.retire(epoch)
                self.cluster.member_left(self, epoch, reason)
            case Gather(model, part):
                self._gather(model, part)
            case Admit():
                invariants.admits(who, action)
                self.data.admit(action)
            case CancelAdmitted(request):
                self.data.cancel(request)
            case Deliver():
                invariants.delivers(action)
            case Report():
                self.reports.append(action)

    def _gather(self, model: ModelHash, part: Slice) -> None:
        """Fetches, at once or slowly, or finds no space."""
        rng = self.cluster.scheduler.rng
        problem = None if rng.random() >= self.cluster.refusals else "no space left"

        def done() -> None:
            if problem is None:
                self.parts.append(part)
            self.call(lambda node, now: node.held(model, part, problem, now))

        self.later(rng.choice((0.0, 0.5, 5.0)), done)

    # --- links

    def link_way(self, link_id: LinkId) -> Way:
        """This end of a fresh link."""
        life = self.life
        decoder = FrameDecoder()

        def receive(item: object) -> None:
            if self.life == life and self.node is not None and isinstance(item, bytes):
                for message in decoder.feed(item):
                    assert not isinstance(message, DataHello | FileHello)
                    self.call(lambda node, now, message=message: node.receive(link_id, message, now))
                decoder.admit()

        def lost(reason: str) -> None:
            if self.life == life and self.node is not None:
                self.links.pop(link_id, None)
                self.call(lambda node, now: node.link_lost(link_id, reason, now))

        return Way(receive, lost)


class Cluster:
    """The world."""

    def __init__(self, seed: int, options: Options) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler)
        self.invariants = Invariants()
        self.options = options
        self.refusals = options.refusals
        self.buffer_bytes = reserved_bytes(SHAPE)
        self.wakes = 0
        self._link_count = 0
        self._request_count = 0
        ids = [f"{self.scheduler.rng.getrandbits(64):016x}" for _ in range(options.n)]
        self.processes: list[Process] = []
        self.processes.extend(Process(self, i, node_id, options) for i, node_id in enumerate(ids))
        for process in self.processes:
            self.scheduler.after(self.scheduler.rng.uniform(0.0, 2.0), process.start)

    def find(self, node_id: str) -> Process | None:
        """The living process of that id."""
        return next((p for p in self.processes if p.node_id == node_id and p.node is not None), None)

    def is_apart(self, a: Process, b: Process) -> bool:
        """Whether steps cannot pass between two processes now."""
        cut = self.network.is_cut(a.index, b.index) or self.network.is_cut(b.index, a.index)
        return cut or a.paused or b.paused

    def run(self, seconds: float) -> None:
        """Virtual time goes on."""
        until = self.scheduler.now + seconds
        while self.scheduler.run_one(until):
            pass

    def run_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Virtual time goes on until something holds, looked at each half second; False if it does not in so many."""
        until = self.scheduler.now + seconds
        while not holds() and self.scheduler.now < until:
            self.run(0.5)
        return holds()

    def dial(self, caller: Process, key: str, index: int) -> None:
        """A dial by a process: TLS needs both ways and a callee that runs."""
        callee, life = self.processes[index], caller.life
        delay = 3 * self.network.delay()

        def connect() -> None:
            if caller.life != life or caller.node is None:
                return
            if callee.node is None:
                caller.call(lambda node, now: node.dial_failed(key, "connection refused", now))
            elif self.is_apart(caller, callee):
                caller.later(3.0, lambda: caller.call(lambda n, now: n.dial_failed(key, "timed out", now)))
            else:
                self._open(caller, callee, key)

        self.scheduler.after(delay, connect)

    def _open(self, caller: Process, callee: Process, key: str) -> None:
        ids = (LinkId(self._link_count), LinkId(self._link_count + 1))
        self._link_count += 2
        ways = (caller.link_way(ids[0]), callee.link_way(ids[1]))
        link = self.network.connect((caller.index, callee.index), ways)
        caller.links[ids[0]], callee.links[ids[1]] = (link, 0), (link, 1)
        place = (f"10.0.0.{callee.index}", 7000 + callee.index)
        callee.call(lambda node, now: node.link_opened(ids[1], (f"10.0.0.{caller.index}", 54321), None, now))
        caller.call(lambda node, now: node.link_opened(ids[0], place, key, now))

    # --- the data plane's links

    def member_died(self, gone: Process) -> None:
        """The kernel of the dead process's device resets its data links."""
        for other in self.processes:
            if other is not gone and other.data is not None and not self.network.is_cut(gone.index, other.index):
                for epoch, data in other.data.epochs.items():
                    if gone.node_id in data.action.members and data.linked:
                        other.data.notice_broken(epoch, gone.node_id, "connection reset")

    def member_left(self, leaver: Process, epoch: Epoch, reason: str) -> None:
        """A member retired an epoch: its data links end."""
        for other in self.processes:
            if other is not leaver and other.data is not None and epoch in other.data.epochs:
                data = other.data.epochs[epoch]
                if data.linked and leaver.node_id in data.action.members and not self.is_apart(leaver, other):
                    other.data.notice_broken(epoch, leaver.node_id, f"left the epoch: {reason}")

    def break_epoch(self, epoch: Epoch, node: str, reason: str) -> None:
        """A step did not come about: every member that still runs notices in its own time."""
        for process in self.processes:
            if process.data is not None and epoch in process.data.epochs and process.node_id != node:
                process.data.notice_broken(epoch, node, reason)

    # --- requests

    def submit(self, index: int, max_tokens: int = 30, end_tokens: tuple[int, ...] = (END_TOKEN,)) -> RequestId | None:
        """A reader asks at a process; None if that is not running."""
        process, rng = self.processes[index], self.scheduler.rng
        if process.node is None or process.paused:
            return None
        self._request_count += 1
        request = RequestId(f"{self._request_count:032x}")
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))
        sampling = SamplingParameters(temperature=0.0)
        submit = Submit(request, MODEL.hash, prompt, (), max_tokens, end_tokens, sampling)
        self.invariants.readers[request] = Reader(submit, index, self.scheduler.now)
        process.call(lambda node, now: node.submit(submit, now))
        return request

    def cancel(self, request: RequestId) -> None:
        """The reader goes away."""
        reader = self.invariants.readers[request]
        if reader.ended is None and not reader.gone and not self.processes[reader.root].paused:
            reader.cancelled = True
            self.processes[reader.root].call(lambda node, now: node.cancel(request, now))
