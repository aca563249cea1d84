"""Fixtures of the model tests: tiny GGUF files, and the files that golden facts are about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_files import TINY, Tensor, gguf_bytes, tiny_tensors

from meshllm.model.model_file import ModelFile


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., bytes]:
    """gguf_bytes, for tests."""
    return gguf_bytes


@pytest.fixture
def tiny() -> tuple[dict[str, object], list[Tensor]]:
    """Metadata and tensors of a whole one-layer model, to be changed by a test."""
    return dict(TINY), tiny_tensors()


@pytest.fixture(scope="session")
def model_of(
    smollm2_path: Path, shared_dir: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], ModelFile]]:
    """model_of("qwen3") -> its open file; skips where its vocabulary is not here."""
    opened: dict[str, ModelFile] = {}

    def get(family: str) -> ModelFile:
        if family not in opened:
            path = smollm2_path if family == "smollm2" else shared_dir / "data" / f"{family}.vocab.gguf"
            if family == "gemma-3":
                path = request.getfixturevalue("gemma3_path")
            if not path.exists():
                pytest.skip(f"no vocabulary of {family} in {path.parent}")
            opened[family] = ModelFile.open(path)
        return opened[family]

    yield get
    for model in opened.values():
        model.close()


@pytest.fixture
def case(request: pytest.FixtureRequest, field_cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A case from the field, by the id given as an indirect parameter."""
    found: dict[str, Any] = field_cases[request.param]
    return found
