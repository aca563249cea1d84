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
def greedy(golden: Callable[[str], Any]) -> Callable[..., list[Greedy]]:
    """greedy("Q8_0") -> what the golden vectors say of that format, prompts with no clear token left out.

    Ranks that share a model are given what they can do at the moment, so how their sums round changes from one run to
    the next: a step counts only where float32 arithmetic is clear too. With one_layout=True llama.cpp's margin decides
    alone: it may be clear by chance (Q4_1 after "E = mc": 0.51, float32 0.33, layouts of three ranks 0.0 to 0.6).
    """

    def of(quant: str, *, one_layout: bool = False) -> list[Greedy]:
        exact = {(case["quant"], case["prompt"]): case["steps"] for case in golden("greedy_f32_check")["cases"]}
        found = []
        for case in golden("greedy_vectors")["cases"]:
            if case["quant"] != quant:
                continue
            margins = [margin for _, _, margin, _ in exact[quant, case["prompt"]]]
            clear = min(first_small(case["margins"]), len(margins) if one_layout else first_small(margins))
            if clear:
                found.append(Greedy(tuple(case["prompt_ids"]), tuple(case["greedy_ids"][:clear])))
        assert sum(len(case.tokens) for case in found) > 80
        return found

    return of
