"""Odd hosts: hardened units, hidden /proc, old processors. Each in a real process under the real restriction."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

KERNELS = (
    "from meshllm.kernels.binding import Kernels; from meshllm.kernels.cpu import usable_cpus, usable_memory;"
    "import meshllm.service; kernels = Kernels(n_threads=1); print(kernels.isa, usable_cpus(), usable_memory())"
)


def test_host_01_runs_where_no_memory_may_become_executable() -> None:
    """Case HOST-01: MemoryDenyWriteExecute=yes, as systemd sets it."""
    story = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True);"
        "refused = libc.prctl(65, 1, 0, 0, 0); print('refused' if refused else 'set', flush=True);"  # PR_SET_MDWE
        f"del libc, ctypes; {KERNELS}"
    )
    done = subprocess.run([sys.executable, "-c", story], capture_output=True, text=True, timeout=120)
    if "refused" in done.stdout:
        pytest.skip("this kernel has no PR_SET_MDWE (6.3)")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting /proc anew needs root")
def test_host_03_hidden_proc_leaves_facts_known_or_unknown_never_zero() -> None:
    """Case HOST-03: ProcSubset=pid hides /proc/meminfo and /proc/cpuinfo."""
    mount = 'mount -t proc -o subset=pid proc /proc && ! test -e /proc/meminfo && exec "$@"'
    words = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", KERNELS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if done.returncode and "mount" in done.stderr:
        pytest.skip(f"/proc cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    _, cpus, memory = done.stdout.split()
    assert int(cpus) >= 1
    assert memory == "None" or int(memory) > 64 << 20


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 processors under qemu")
@pytest.mark.parametrize(
    ("cpu", "isa"), [("Nehalem", "scalar"), ("SandyBridge", "scalar"), ("Haswell", "avx2"), ("max,-avx2", "scalar")]
)
def test_host_07_kernels_are_those_that_the_processor_has(cpu: str, isa: str) -> None:
    """Case HOST-07: one build runs on every one of them."""
    story = "from meshllm.kernels.binding import Kernels; print(Kernels(n_threads=1).isa)"
    # numpy itself wants SSE4.2 and more on newer builds: only what is ours is at stake, so it may say no.
    words = ["qemu-x86_64", "-cpu", cpu, sys.executable, "-c", story]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    if "NumPy" in done.stderr and "baseline" in done.stderr:
        pytest.skip("this numpy was built for newer processors")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == isa
