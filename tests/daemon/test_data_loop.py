"""Data loops that run a real model together over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon.data_mesh import SMOLLM2_SLICES, make_layout, node_id, open_mesh, submit_of

from meshllm.mesh.messages import Epoch

LEAST_MARGIN = 0.5  # golden/README: where two tokens are closer than this, either may come first


def follows(found: list[int], case: dict[str, Any]) -> bool:
    """Whether found is the golden continuation up to its first close call."""
    margins = case["margins"]
    n_sure = next((i for i, margin in enumerate(margins) if margin < LEAST_MARGIN), len(margins))
    return found[:n_sure] == case["greedy_ids"][:n_sure]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0"])
async def test_greedy_text_is_golden_on_any_number_of_ranks(
    n_ranks: int, quant: str, golden: Callable[[str], Any], smollm2_quant: Callable[[str], Path]
) -> None:
    cases = [case for case in golden("greedy_vectors")["cases"] if case["quant"] == quant][::3]
    epoch = Epoch(1, node_id(0))
    async with open_mesh(n_ranks) as mesh:
        await mesh.prepare(epoch, make_layout(SMOLLM2_SLICES[n_ranks], mesh.nodes()), smollm2_quant(quant))
        submits = [submit_of(case["prompt_ids"], request=i, max_tokens=24) for i, case in enumerate(cases)]
        answers = await mesh.ask(epoch, submits)
    wrong = [case["prompt"] for case, answer in zip(cases, answers, strict=True) if not follows(answer, case)]
    assert not wrong
