"""What one exchange of partial sums costs: N processes on this machine, sealed frames over loopback TCP, no kernels.

    python benchmarks/exchange.py [--peers 2] [--bytes 4096] [--exchanges 5000] [--compute-us 0]

Needs a core for each peer and an idle machine: with fewer cores the figures are the scheduler's.
Prints one JSON line: microseconds an exchange as rank 0 sees it (median, mean, 99th percentile). --compute-us lets each
rank be busy for so long between exchanges, as kernels would be.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time

import trio

from meshllm.daemon.step_runner import StepRunner
from meshllm.layout.layout import NodeId
from meshllm.mesh.exchange import ExchangeSchedule
from meshllm.mesh.messages import DataHello, Epoch, Partial, Step, StepEntry
from meshllm.mesh.stepping import StepLimits, StepSequencer
from meshllm.net.data_link import DataLink, derive_keys
from meshllm.net.link_group import LinkGroup


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialer = socket.create_connection(server.getsockname())
        return dialer, server.accept()[0]


async def run_rank(rank: int, nodes: list[NodeId], links: LinkGroup, args: argparse.Namespace) -> list[float]:
    schedule = ExchangeSchedule((tuple(range(len(nodes))),) * args.exchanges, args.bytes)
    limits = StepLimits(1, args.exchanges, 10, 1)
    sequencer = StepSequencer(driver=nodes[rank], ranks=tuple(nodes), own=nodes[rank], schedule=schedule, limits=limits)
    sequencer.begin(Step(0, (StepEntry(0, 0, (1,)),)))
    runner = StepRunner.__new__(StepRunner)  # its waiting and nothing else
    runner.links, runner.sequencer, runner._may_sleep = links, sequencer, lambda: True
    others = tuple(node for node in nodes if node != nodes[rank])
    data = os.urandom(args.bytes)
    times = []
    for exchange in range(args.exchanges):
        busy_until = time.perf_counter() + args.compute_us * 1e-6
        while time.perf_counter() < busy_until:
            pass
        began = time.perf_counter()
        runner.send(others, Partial(0, exchange, bytes(data)))
        await runner.until(lambda i=exchange: sequencer.has_all(i), 5.0, lambda: others)
        sequencer.take_partials(exchange, data)
        times.append((time.perf_counter() - began) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--exchanges", type=int, default=5000)
    parser.add_argument("--compute-us", type=float, default=0.0)
    args = parser.parse_args()
    nodes = [NodeId(f"{i + 1:016x}") for i in range(args.peers)]
    epoch = Epoch(1, nodes[0])
    hellos = [DataHello(epoch, node, os.urandom(32), True) for node in nodes]
    pairs = {(i, j): tcp_pair() for i in range(args.peers) for j in range(i + 1, args.peers)}
    rank = next((rank for rank in range(1, args.peers) if os.fork() == 0), 0)
    links = LinkGroup()
    for (i, j), ends in pairs.items():
        if rank in (i, j):
            other = j if rank == i else i
            keys = derive_keys(hellos[rank], hellos[other], dialed=rank == i)
            links.add(nodes[other], DataLink(ends[0 if rank == i else 1], keys, 1 << 24))
    times = trio.run(run_rank, rank, nodes, links, args)
    if rank:
        time.sleep(0.2)
        os._exit(0)
    times.sort()
    result = {"peers": args.peers, "bytes": args.bytes, "compute_us": args.compute_us}
    result |= {
        "p10_us": times[len(times) // 10],
        "median_us": statistics.median(times),
        "mean_us": statistics.mean(times),
    }
    print(json.dumps(result | {"p99_us": times[int(len(times) * 0.99)]}))


if __name__ == "__main__":
    main()
