"""Fixtures of the system tests: meshes of real daemons, and what the model must answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.margins import first_small
from tests.system.mesh import Mesh, why_no_namespaces


@dataclass(frozen=True)
class Greedy:
    """A prompt and the tokens that must follow it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # up to the first step whose margin is small


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    """Daemons on this machine; all that a test started ends with it."""
    with Mesh(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def need_namespaces() -> None:
    """Skips, with the reason, where no network namespaces can be made."""
    if why := why_no_namespaces():
        pytest.skip(why)


@pytest.fixture(scope="session")
def greedy(golden: Callable[[str], Any]) -> Callable[[str], list[Greedy]]:
    """greedy("Q8_0") -> what the golden vectors say of that format, prompts with no clear token left out."""

    def of(quant: str) -> list[Greedy]:
        found = []
        for case in golden("greedy_vectors")["cases"]:
            clear = first_small(case["margins"])
            if case["quant"] == quant and clear:
                found.append(Greedy(tuple(case["prompt_ids"]), tuple(case["greedy_ids"][:clear])))
        assert len(found) > 5
        return found

    return of
