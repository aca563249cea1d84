"""What the built native module shows to others: its one entry point, and no executable stack (case HOST-01)."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

native = pytest.importorskip("meshllm._native", reason="the native module is not built")


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} (binutils) is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_module_exports_its_entry_point_alone() -> None:
    exported = {line.split()[-1] for line in _run("nm", "-D", "--defined-only", native.__file__).splitlines()}
    exported -= {"_init", "_fini", "_edata", "_end", "__bss_start"}
    assert exported <= {"PyInit__native", "_cffi_pypyinit__native"}
    assert "PyInit__native" in exported


def test_module_needs_no_executable_stack() -> None:
    (flags,) = re.findall(r"GNU_STACK(?:\s+0x\w+){5}\s+(\S+)", _run("readelf", "-lW", native.__file__))
    assert flags == "RW"


def test_sources_are_never_built_for_this_machine_alone(repository) -> None:
    texts = {path: path.read_text("utf-8") for path in repository.glob("native/**/CMakeLists.txt")}
    texts |= {path: path.read_text("utf-8") for path in repository.glob("native/Makefile")}
    assert not [path for path, text in texts.items() if "march=native" in text or "fast-math" in text]
