"""Safety after every event and liveness after healing, in worlds drawn from seeds.

A failure prints the seed; `MESHLLM_SIMULATION_SEED=123 pytest tests/simulation -k many` runs that world again. A usual
run has the same 500 worlds each time, so that a change is judged by what it changes; `MESHLLM_SIMULATION_WORLDS=1000`
runs so many that nobody has seen, in as many processes as there are CPUs. `make nightly` runs 10,000.
"""

from __future__ import annotations

import os
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
from cluster import SHAPE, Cluster, Options

from meshllm.layout.split import reserved_bytes
from meshllm.mesh.messages import Failed, Finished

WORLDS = range(10_000, 10_500)  # seeds of a usual run
AGAIN = "again: MESHLLM_SIMULATION_SEED={} pytest tests/simulation -k many"
FIXED_SEEDS = (
    *range(8),
    8,
    12,
    21,
    29,
    39,
    43,
    44,
    52,
    143,
    1019,
    1033,
    5028,
    5068,
    3427613644,
    20290,
    20347,
    30853,
    1346056580,
)  # those from 8 on once failed


def _draw_options(seed: int) -> Options:
    layouts = ("all", "all", "auto", 2)
    n = 1 + seed % 5 if seed % 11 else 5
    if seed % 10 == 5:  # (the seeds that once failed end otherwise, and keep their worlds)
        n = 6 + seed // 10 % 4
    if seed % 7 == 3 and 1 < n < 6:  # no room for two layouts, nor for one on fewer devices
        whole = SHAPE.slice_bytes(SHAPE.whole()) + 512 * SHAPE.position_bytes(SHAPE.whole())
        return Options(n=n, memory=reserved_bytes(SHAPE) + int(1.25 * whole / n) + 50_000)
    more = seed % 10 in (0, 5, 6, 7)
    layout = layouts[seed % 4] if seed % 5 else "all"
    return Options(n=n, layout=layout, faults=0.02 if more else 0.0, partitions=more)


def _torment(cluster: Cluster) -> None:
    """One blow of the world, or some use of the mesh."""
    rng, n = cluster.scheduler.rng, len(cluster.processes)
    victim, other = cluster.processes[rng.randrange(n)], rng.randrange(n)
    draw = rng.random()
    if draw < 0.55:
        cluster.submit(rng.randrange(n), max_tokens=rng.choice((1, 5, 40, 200)))
    elif draw < 0.60 and cluster.invariants.readers:
        cluster.cancel(rng.choice(list(cluster.invariants.readers)))
    elif draw < 0.66:
        if victim.node is not None:
            victim.kill(silent=rng.random() < 0.5)
            victim.cluster.scheduler.after(rng.choice((0.1, 1.0, 6.0)), lambda: _revive(victim))
    elif draw < 0.68:
        if victim.node is not None and not victim.paused:
            victim.stop()
            victim.cluster.scheduler.after(rng.uniform(0.1, 5.0), lambda: _revive(victim))
    elif draw < 0.76:
        if cluster.options.partitions and rng.random() < 0.3:
            cluster.network.split([rng.random() < 0.5 for _ in range(n)])
        elif victim.index != other:
            cluster.network.cut(victim.index, other)
            if rng.random() < 0.6:
                cluster.network.cut(other, victim.index)
    elif draw < 0.84:
        cluster.network.heal()
    elif draw < 0.89:
        if victim.node is not None:
            victim.paused = True
            victim.cluster.scheduler.after(rng.choice((0.3, 1.5, 4.0)), victim.resume)
    elif draw < 0.92:
        victim.offset += rng.choice((0.5, 3.0, 3600.0))
    elif draw < 0.95:
        cluster.network.slow = rng.choice((0.0001, 0.001, 0.02, 0.2))
    elif draw < 0.97:
        cluster.refusals = rng.choice((0.0, 0.1, 0.5))
    elif cluster.options.faults:
        cluster.network.faults = rng.choice((0.0, 0.1, 1.0)) * cluster.options.faults


def _revive(process: object) -> None:
    if process.node is None:  # type: ignore[attr-defined]
        process.start()  # type: ignore[attr-defined]


def _heal(cluster: Cluster) -> None:
    cluster.network.heal()
    cluster.network.mend()
    cluster.network.slow, cluster.refusals = 0.001, 0.0
    for process in cluster.processes:
        if process.paused:
            process.resume()
        _revive(process)


def _is_quiet(cluster: Cluster) -> bool:
    """Whether nobody holds an old epoch beside the one in force."""
    return all(process.data is not None and len(process.data.epochs) <= 1 for process in cluster.processes)


def _is_settled(cluster: Cluster) -> bool:
    """Whether all agree on one layout, and nothing else is prepared or going to be."""
    views = [process.node.view(process.now) for process in cluster.processes if process.node]
    whole = cluster.options.layout != "all" or all(v.layout and len(v.layout.shares) == len(views) for v in views)
    return (
        whole
        and _is_quiet(cluster)
        and len({view.epoch for view in views}) == 1
        and all(v.state == "serving" for v in views)
    )


def _check_alive(cluster: Cluster) -> None:
    """After healing all agree on one layout, and every request ends right."""
    needed = 2 if cluster.options.layout == 2 else 1
    settled = cluster.run_until(lambda: _is_settled(cluster), 75.0)  # one that failed often is left out for a minute
    states = [(p.index, v.state, v.epoch, v.detail) for p in cluster.processes if p.node for v in [p.node.view(p.now)]]
    readers = cluster.invariants.readers
    if len(states) >= needed:
        assert settled, states
        asked = [cluster.submit(process.index, max_tokens=20) for process in cluster.processes for _ in range(2)]
        cluster.run_until(lambda: all(request and readers[request].ended for request in asked), 30.0)
        for request in asked:
            assert request is not None
            assert isinstance(readers[request].ended, Finished), (request, states)
        assert cluster.run_until(lambda: _is_settled(cluster), 30.0), states
    cluster.run_until(lambda: all(r.ended or r.gone or r.cancelled for r in readers.values()), 60.0)
    for reader in readers.values():
        assert reader.ended is not None or reader.gone or reader.cancelled, f"never ended: {reader}"
    assert cluster.run_until(lambda: _is_quiet(cluster), 30.0), "epochs were not retired"
    for process in cluster.processes:
        assert process.data is not None
        assert not any(data.requests for data in process.data.epochs.values()), "a request runs for nobody"


def _live_through(seed: int, partial: float = 0.0) -> Cluster:
    cluster = Cluster(seed, replace(_draw_options(seed), partial=partial))
    cluster.run(cluster.scheduler.rng.uniform(0.0, 8.0))
    for _ in range(cluster.scheduler.rng.randint(10, 60)):
        _torment(cluster)
        cluster.run(cluster.scheduler.rng.choice((0.0, 0.1, 0.7, 3.0)))
    _heal(cluster)
    _check_alive(cluster)
    return cluster


@pytest.mark.parametrize("seed", FIXED_SEEDS)
def test_mesh_survives_the_world(seed: int) -> None:
    _live_through(seed)


@pytest.mark.parametrize("seed", range(40, 64))
def test_mesh_survives_while_files_are_fetched(seed: int) -> None:
    _live_through(seed, partial=0.6)


def _live_variously(seed: int) -> None:
    """In every other world some begin without the model's weights."""
    _live_through(seed, partial=0.6 if seed % 2 else 0.0)


def _failure(seed: int) -> str | None:
    """What went wrong in a world; None if nothing did."""
    try:
        _live_variously(seed)
    except Exception as error:
        return f"seed {seed}: {error!r}\n{''.join(traceback.format_tb(error.__traceback__))}{AGAIN.format(seed)}"
    return None


def _seeds() -> range:
    """Of this run."""
    if seed := os.environ.get("MESHLLM_SIMULATION_SEED"):
        return range(int(seed), int(seed) + 1)
    if worlds := os.environ.get("MESHLLM_SIMULATION_WORLDS"):
        first = time.time_ns() % 2**32
        return range(first, first + int(worlds))
    return WORLDS


def test_mesh_survives_many_worlds() -> None:
    seeds = _seeds()
    if len(seeds) == 1:
        _live_variously(seeds[0])
        return
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        failures = [text for text in pool.map(_failure, seeds, chunksize=5) if text]
    assert not failures, f"{len(failures)} of {len(seeds)} worlds\n" + "\n".join(failures[:5])


def test_same_seed_gives_the_same_world() -> None:
    first, second = _live_through(7), _live_through(7)
    assert first.scheduler.now == second.scheduler.now
    assert first.wakes == second.wakes
    assert [p.reports for p in first.processes] == [p.reports for p in second.processes]
    assert Failed  # the worlds above end answers with it
