"""Daemons as they run at home: they find each other, share one model, and each gives the same, right answer."""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.margins import CLEAR_MARGIN, first_small
from tests.system.mesh import Daemon, Mesh, bridged_hosts

FORMATS = ("Q4_1", "Q4_0", "Q8_0")
SAME_TOKENS = 24  # tokens for which all roots are compared with each other, clear margin or not


def _check_golden(daemon: Daemon, cases) -> None:
    for case in cases:
        got = daemon.complete(case.prompt, len(case.tokens))
        assert tuple(got["token_ids"]) == case.tokens, f"{daemon.name} after {case.prompt[-8:]}"


def _check_same_from_each(daemons: list[Daemon], prompt: tuple[int, ...]) -> None:
    answers = {daemon.name: tuple(daemon.complete(prompt, SAME_TOKENS)["token_ids"]) for daemon in daemons}
    assert len(set(answers.values())) == 1, answers


@pytest.mark.parametrize("quant", FORMATS)
def test_one_daemon_answers_the_golden_vectors(mesh: Mesh, smollm2_quant, greedy, quant: str) -> None:
    one = mesh.start("one", model=smollm2_quant(quant))
    mesh.wait_ranks(1, one)
    _check_golden(one, greedy(quant, one_layout=True))


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("n", [2, 3])
def test_daemons_together_answer_the_golden_vectors_from_each_root(
    mesh: Mesh, smollm2_quant, greedy, n: int, quant: str
) -> None:
    daemons = [mesh.start(f"d{i}", model=smollm2_quant(quant)) for i in range(n)]
    statuses = mesh.wait_ranks(n, *daemons)
    assert {peer.state for status in statuses for peer in status.peers} == {"self", "connected"}
    _check_golden(daemons[-1], greedy(quant))
    for root in daemons[:-1]:
        _check_golden(root, greedy(quant)[:3])
    _check_same_from_each(daemons, greedy(quant)[0].prompt)


def test_three_daemons_share_a_model_of_one_kv_head(mesh: Mesh, gemma3_path, golden) -> None:
    """Float32's margins are not known of it, so steps are compared that are clear by twice the usual."""
    daemons = [mesh.start(f"d{i}", model=gemma3_path) for i in range(3)]
    (status, *_) = mesh.wait_ranks(3, *daemons)
    assert sum(part.heads[1] - part.heads[0] for peer in status.peers if (part := peer.slice)) == 4
    compared = 0
    for case, root in zip(golden("gemma3_vectors")["cases"], cycle(daemons), strict=False):
        if n := first_small(case["margins"], 2 * CLEAR_MARGIN):
            got = root.complete(case["prompt_ids"], n)
            assert got["token_ids"] == case["greedy_ids"][:n], case["prompt"]
            compared += n
    assert compared > 70


def test_four_daemons_share_a_model_of_three_kv_heads(mesh: Mesh, smollm2_path, greedy) -> None:
    daemons = [mesh.start(f"d{i}", model=smollm2_path) for i in range(4)]
    (status, *_) = mesh.wait_ranks(4, *daemons)
    slices = [peer.slice for peer in status.peers if peer.slice is not None]
    assert len(slices) == 4
    assert sum(part.heads[1] - part.heads[0] for part in slices) == 9
    assert sum(part.ffn[1] - part.ffn[0] for part in slices) == 1536
    assert sum(part.vocab[1] - part.vocab[0] for part in slices) == 49152
    _check_golden(daemons[3], greedy("Q4_1")[:8])
    _check_same_from_each(daemons, greedy("Q4_1")[1].prompt)


@pytest.mark.parametrize("n", [2, 3])
def test_hosts_on_a_switch_find_each_other_by_multicast_and_answer(
    need_namespaces: None, tmp_path, smollm2_path, greedy, n: int
) -> None:
    with bridged_hosts(n) as hosts, Mesh(tmp_path) as mesh:
        daemons = [mesh.start(host, model=smollm2_path, host=host) for host in hosts]
        statuses = mesh.wait_ranks(n, *daemons)
        addresses = [peer.address for peer in statuses[0].peers if peer.state == "connected"]
        assert len(addresses) == n - 1
        assert all(address and address.startswith(("10.77.0.", "[fe80:")) for address in addresses), addresses
        _check_golden(daemons[-1], greedy("Q4_1")[:8])
        _check_same_from_each(daemons, greedy("Q4_1")[2].prompt)


def test_one_device_alone_is_chosen_where_a_second_would_make_it_slower(mesh: Mesh, smollm2_path, greedy) -> None:
    daemons = [mesh.start(f"d{i}", model=smollm2_path, layout="1") for i in range(2)]
    statuses = mesh.wait_ranks(1, *daemons)
    assert all(status.layout and len(status.layout.left_out) == 1 for status in statuses)
    for root in daemons:
        _check_golden(root, greedy("Q4_1")[:4])
