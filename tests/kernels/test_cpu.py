"""CPUs and memory as systems tell them, from folders that look like theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshllm.kernels.cpu import cpu_quota, free_memory, huge_pages, usable_cpus, usable_memory


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_threads_are_affinity_or_quota_whichever_is_less(tmp_path: Path, field_cases: dict[str, Any]) -> None:
    """HOST-09."""
    for i, case in enumerate(field_cases["HOST-09"]["input"]["cgroup_v2"]):
        root = write(tmp_path / str(i), {"sys/fs/cgroup/cpu.max": case["cpu.max"] + "\n"})
        assert usable_cpus(root, frozenset(range(case["affinity"]))) == case["threads"]


def test_a_quota_of_half_a_cpu_still_gives_a_thread(tmp_path: Path) -> None:
    root = write(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000"})
    assert cpu_quota(root) == 0.5
    assert usable_cpus(root, frozenset(range(4))) == 1


def test_the_tightest_quota_above_the_process_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/meshllm.service\n",
            "sys/fs/cgroup/system.slice/cpu.max": "200000 100000",
            "sys/fs/cgroup/system.slice/meshllm.service/cpu.max": "max 100000",
            "sys/fs/cgroup/system.slice/meshllm.service/memory.max": "1000",
            "sys/fs/cgroup/system.slice/meshllm.service/memory.current": "400",
            "sys/fs/cgroup/system.slice/meshllm.service/memory.stat": "anon 100\ninactive_file 300\n",
        },
    )
    assert usable_cpus(root, frozenset(range(8))) == 2
    assert usable_memory(root) == 1000
    assert free_memory(root) == 900


def big_little(root: Path) -> Path:
    capacities = {cpu: 414 if cpu < 4 else 1024 for cpu in range(8)}
    return write(root, {f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": str(c) for cpu, c in capacities.items()})


def test_slow_cores_of_a_mixed_board_are_left_out(tmp_path: Path) -> None:
    """HOST-11."""
    root = big_little(tmp_path / "arm")
    assert usable_cpus(root, frozenset(range(8))) == 4
    assert usable_cpus(root, frozenset({0, 1, 4})) == 1
    assert usable_cpus(root, frozenset({0, 1, 2})) == 3  # none of the fast ones is ours
    intel = write(tmp_path / "intel", {"sys/devices/cpu_core/cpus": "0-7\n", "sys/devices/cpu_atom/cpus": "8-15\n"})
    assert usable_cpus(intel, frozenset(range(16))) == 8
    assert usable_cpus(intel, frozenset(range(6, 12))) == 2


def test_siblings_of_a_core_count_once(tmp_path: Path) -> None:
    folder = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(tmp_path, {folder.format(cpu): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)})
    assert usable_cpus(root, frozenset(range(8))) == 4


def test_unknown_is_none_or_what_sysconf_says_never_zero(tmp_path: Path) -> None:
    """HOST-03: a hardened unit hides /proc/meminfo and the cgroup files."""
    for memory in (usable_memory(tmp_path), free_memory(tmp_path)):
        assert memory is None or memory > 2**20
    assert usable_cpus(tmp_path) >= 1


@pytest.mark.parametrize("garbage", ["", "max", "x y", "-1 -1", "5 0", "9" * 400, "\0\0"])
def test_garbage_in_system_files_is_as_good_as_none(garbage: str, tmp_path: Path) -> None:
    names = ["sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.max", "sys/devices/cpu_core/cpus", "proc/self/cgroup"]
    root = write(tmp_path, dict.fromkeys(names, garbage))
    assert usable_cpus(root, frozenset(range(3))) == 3
    usable_memory(root)
    free_memory(root)


def test_huge_pages_are_what_the_system_has_chosen(tmp_path: Path) -> None:
    file = "sys/kernel/mm/transparent_hugepage/enabled"
    assert huge_pages(write(tmp_path / "a", {file: "always [madvise] never\n"})) == "madvise"
    assert huge_pages(write(tmp_path / "b", {file: "always madvise [never]\n"})) == "never"
    assert huge_pages(tmp_path) is None
