"""Two daemons in one mesh, asked through both: it must not matter which one a client talks to."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.mesh import Daemon, Mesh

TEXTS = ["Name one red fruit.", "Spell the word tunnel.", "What is 7 plus 5?", "Greet me in Spanish."]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[list[Daemon]]:
    with Mesh(tmp_path_factory.mktemp("roots")) as mesh:
        daemons = [mesh.start(name, "--context", "256", model=smollm2_path) for name in ("one", "two")]
        mesh.wait_ranks(2, *daemons)
        yield daemons


def test_samp_03_a_seed_gives_the_same_answer_on_every_root(roots: list[Daemon]) -> None:
    for fields in ({"temperature": 0.8}, {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}):
        drawn = [root.complete("Once upon a time", 24, seed=7, **fields)["token_ids"] for root in (*roots, *roots)]
        assert all(ids == drawn[0] for ids in drawn)
        assert roots[0].complete("Once upon a time", 24, seed=8, **fields)["token_ids"] != drawn[0]


def test_conc_01_answers_of_two_roots_do_not_mix(roots: list[Daemon]) -> None:
    def ask(i: int) -> object:
        return roots[i % 2].complete(TEXTS[i // 2 % 4], 16)["token_ids"]

    alone = [ask(i) for i in range(8)]
    assert alone[::2] == alone[1::2]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(16))) == [*alone, *alone]
