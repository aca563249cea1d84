"""What one exchange of partial sums costs: N processes on this machine, sealed frames over loopback TCP.

    python -m benchmarks.exchange [--peers 2] [--width 2048] [--read-mb 12] [--steps 200]

Each rank reads weights of --read-mb before each of 32 exchanges, as a layer does (0: nothing), so that caches are as
cold as they are at work. Needs a core for each peer and an idle machine: else the figures are the scheduler's.
Prints one JSON line: microseconds an exchange (medians over steps) for the rank that waited least and the one that
waited most. The least is what an exchange costs; the rest is waiting for the others.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics

import numpy as np

from meshllm.kernels.binding import Kernels, NativeProgram, NativeWeight, Precision
from meshllm.kernels.links import Communicator, Progress
from meshllm.kernels.memory import allocate_weights
from meshllm.layout.layout import NodeId
from meshllm.mesh.messages import DataHello, Epoch
from meshllm.model.formats import Format
from meshllm.model.opcodes import BufferKind, Op, Opcode, WeightKind, encode_ops
from meshllm.net.data_link import DataLink, derive_keys

EXCHANGES = 32
WARM_UP = 20  # steps


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialer = socket.create_connection(server.getsockname())
        return dialer, server.accept()[0]


def program_of(width: int, read_mb: float) -> NativeProgram:
    """Products with a weight of read_mb, each followed by an exchange of `width` values."""
    kernels = Kernels("", 1)
    rows = max(32, round(read_mb * 1e6 / (width * 18 / 32) / 32) * 32)
    data = allocate_weights(kernels.packed_size(Format.Q4_0, rows, width))
    data[:] = 0x11
    weight = NativeWeight(WeightKind.PACKED, Format.Q4_0, rows, width, data)
    read = [Op(Opcode.QUANTIZE, out=2, in_=0), Op(Opcode.MATMUL, out=3, in_=2, weight=0)] if read_mb else []
    ops = [*read, Op(Opcode.EXCHANGE, out=0, in_=1)] * EXCHANGES
    buffers = [(BufferKind.F32, width), (BufferKind.F32, width), (BufferKind.Q8, width), (BufferKind.F32, rows)]
    cache = (1, 1, 8, 1, 16, 1)
    return NativeProgram(kernels, encode_ops(ops), buffers, [weight], cache, max_tokens=1, precision=Precision.F16)


def run_rank(program: NativeProgram, rank: int, links: list[DataLink | None], n_steps: int) -> float:
    """Median microseconds an exchange."""
    contributors = [list(range(len(links)))] * EXCHANGES
    communicator = Communicator(program, rank, links, contributors)
    zero, none, times = np.zeros(1, np.int32), np.zeros(0, np.int32), []
    for step in range(n_steps):
        program.begin(zero, zero, zero, none)
        communicator.begin(step)
        while communicator.run(50e-6, 1e-3) is not Progress.FINISHED:
            pass
        times.append(communicator.exchange_s * 1e6 / EXCHANGES)
    return statistics.median(times[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--read-mb", type=float, default=12.0)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    nodes = [NodeId(f"{i + 1:016x}") for i in range(args.peers)]
    hellos = [DataHello(Epoch(1, nodes[0]), node, os.urandom(32), True) for node in nodes]
    pairs = {(i, j): tcp_pair() for i in range(args.peers) for j in range(i + 1, args.peers)}
    theirs, ours = os.pipe()
    rank = next((rank for rank in range(1, args.peers) if os.fork() == 0), 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    links: list[DataLink | None] = [None] * args.peers
    for (i, j), ends in pairs.items():
        if rank in (i, j):
            other = j if rank == i else i
            keys = derive_keys(hellos[rank], hellos[other], dialed=rank == i)
            links[other] = DataLink(ends[0 if rank == i else 1], keys, 1 << 24)
    median = run_rank(program_of(args.width, args.read_mb), rank, links, args.steps)
    if rank:
        os.write(ours, f"{median}\n".encode())
        os._exit(0)
    os.close(ours)
    with os.fdopen(theirs) as told:
        medians = sorted([median, *(float(line) for line in told)])
    print(json.dumps(vars(args) | {"least_us": round(medians[0], 1), "most_us": round(medians[-1], 1)}))


if __name__ == "__main__":
    main()
