"""What this process may really use: CPUs (affinity, cgroup quota, the fast cluster of a mixed board) and memory.

Nothing is assumed of /proc: a hardened unit hides it. What the system does not tell is None, never 0. `root` is the
root of the file system, another one in tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CAPACITY_MARGIN: Final = 0.8  # a core of at least this share of the fastest one's capacity belongs to the fast ones
_UNLIMITED: Final = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63
_ROOT: Final = Path("/")


def usable_cpus(root: Path = _ROOT, affinity: frozenset[int] | None = None) -> int:
    """Threads that compute best here: fast cores that this process may run on, not more than its quota of CPU time.

    SMT siblings count once. At least 1.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if affinity is None else affinity
    cores = _one_per_core(root, _fast_cpus(root, allowed))
    quota = cpu_quota(root)
    return max(1, min(len(cores), len(cores) if quota is None else int(quota)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that the cgroups allow; None without a limit."""
    quotas = []
    for folder in _cgroup_folders(root):
        words = (_read(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    v1 = root / "sys/fs/cgroup/cpu"
    quota, period = _number(_read(v1 / "cpu.cfs_quota_us")), _number(_read(v1 / "cpu.cfs_period_us"))
    if quota and period:
        quotas.append(quota / period)
    return min(quotas, default=None)


def usable_memory(root: Path = _ROOT) -> int | None:
    """Bytes that this process may have in all: the machine's memory or the cgroups' limit; None if unknown."""
    return min([*_machine_memory("SC_PHYS_PAGES"), *(limit for limit, _ in _memory_limits(root))], default=None)


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes that are free for this process now, page cache that can be dropped included; None if unknown."""
    free = [limit - used for limit, used in _memory_limits(root) if used is not None]
    available = _available(root)
    free += _machine_memory("SC_AVPHYS_PAGES") if available is None else [available]
    return max(0, min(free)) if free else None


def huge_pages(root: Path = _ROOT) -> str | None:
    """Whether memory may come in huge pages: "always", "madvise" or "never"; None if the system does not tell."""
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    return text.partition("[")[2].partition("]")[0] or None


def _fast_cpus(root: Path, allowed: frozenset[int]) -> frozenset[int]:
    """Big cores of big.LITTLE, performance cores of Intel hybrids; all that are allowed if none of those is."""
    performance = _cpu_list(_read(root / "sys/devices/cpu_core/cpus"))
    if performance and _cpu_list(_read(root / "sys/devices/cpu_atom/cpus")):
        return allowed & performance or allowed
    capacity = {cpu: _capacity(root, cpu) for cpu in allowed}
    known = {cpu: value for cpu, value in capacity.items() if value is not None}
    if len(known) < len(allowed):
        return allowed
    fastest = max(known.values(), default=0)
    return frozenset(cpu for cpu, value in known.items() if value >= CAPACITY_MARGIN * fastest) or allowed


def _capacity(root: Path, cpu: int) -> int | None:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}"
    return _number(_read(folder / "cpu_capacity"))


def _one_per_core(root: Path, cpus: frozenset[int]) -> frozenset[int]:
    """SMT siblings share a core's arithmetic: the first of each core."""
    chosen: set[int] = set()
    for cpu in sorted(cpus):
        siblings = _cpu_list(_read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        if not siblings & chosen:
            chosen.add(cpu)
    return frozenset(chosen)


def _cpu_list(text: str | None) -> frozenset[int]:
    """0-3,8 -> {0, 1, 2, 3, 8}; nothing for what is not such a list."""
    found: set[int] = set()
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            found.update(range(int(first), min(int(last or first), int(first) + 4096) + 1))
    return frozenset(found)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Folders of this process's cgroup (v2) and all above it: each may limit."""
    top = root / "sys/fs/cgroup"
    own = next(
        (line[3:] for line in (_read(root / "proc/self/cgroup") or "").splitlines() if line.startswith("0::")), "/"
    )
    parts = [part for part in own.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:depth])


def _memory_limits(root: Path) -> list[tuple[int, int | None]]:
    """(limit, used without what can be dropped) of each cgroup that has a limit."""
    limits: list[tuple[int, int | None]] = []
    for folder in _cgroup_folders(root):
        limit, used = _number(_read(folder / "memory.max")), _number(_read(folder / "memory.current"))
        if limit is not None:
            limits.append((limit, None if used is None else used - _droppable(folder, "inactive_file")))
    v1 = root / "sys/fs/cgroup/memory"
    limit, used = _number(_read(v1 / "memory.limit_in_bytes")), _number(_read(v1 / "memory.usage_in_bytes"))
    if limit is not None and limit < _UNLIMITED:
        limits.append((limit, None if used is None else used - _droppable(v1, "total_inactive_file")))
    return limits


def _droppable(folder: Path, key: str) -> int:
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return _number(value) or 0
    return 0


def _available(root: Path) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            kib = _number(line.split()[1])
            return None if kib is None else kib * 1024
    return None


def _machine_memory(name: str) -> list[int]:
    try:
        pages, page = os.sysconf(name), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return []
    return [pages * page] if pages > 0 and page > 0 else []


def _read(path: Path) -> str | None:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isdecimal() else None
