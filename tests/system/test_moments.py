"""Devices lost, frozen and gained at the worst moments: within a prompt, an answer, while a layout is prepared."""

from __future__ import annotations

import signal
import time

import pytest

from tests.margins import clear_tokens
from tests.system.mesh import Daemon, Mesh
from tests.system.readers import COUNTING, LONG, Reader

LONG_PROMPT = ", ".join(map(str, range(1, 700))) + ","  # some seconds of work; each next token is sure


def _start(mesh: Mesh, model, n: int) -> list[Daemon]:
    """In rank order, the driver first."""
    daemons = [mesh.start(f"d{i}", model=model) for i in range(n)]
    mesh.wait_ranks(n, *daemons)
    return sorted(daemons, key=lambda daemon: daemon.status().node)


def _sees(daemon: Daemon, state: str):
    """Whether a status shows the other in a state."""
    return lambda status: any(peer.name == daemon.name and peer.state == state for peer in status.peers)


@pytest.mark.parametrize("victim", ["rank", "driver"])
def test_answer_outlives_a_device_lost_within_its_prompt(mesh: Mesh, smollm2_path, victim: str) -> None:
    driver, second, third = _start(mesh, smollm2_path, 3)
    lost, left = (third, driver) if victim == "rank" else (driver, third)
    reader = Reader(second, LONG_PROMPT, 24)
    mesh.wait(lambda status: status.requests.active, second)
    time.sleep(0.5)
    assert not reader.tokens, "the prompt was over too soon"
    lost.kill()
    tokens = reader.whole()
    mesh.wait_ranks(2, second, left)
    want = clear_tokens(left.complete(LONG_PROMPT, 24, logprobs=2))
    assert len(want) > 8
    assert tokens[: len(want)] == want


def test_answer_outlives_two_of_four(mesh: Mesh, smollm2_path) -> None:
    driver, second, third, fourth = _start(mesh, smollm2_path, 4)
    want = clear_tokens(third.complete(COUNTING, 32, logprobs=2))
    assert len(want) > 24
    reader = Reader(third)
    assert reader.began.wait(30)
    driver.kill()
    fourth.kill()
    assert reader.whole()[: len(want)] == want
    mesh.wait_ranks(2, second, third)


def test_device_joins_within_an_answer(mesh: Mesh, smollm2_path) -> None:
    """What runs goes on in its layout to its end: the very same tokens."""
    first, _ = _start(mesh, smollm2_path, 2)
    want = first.complete(COUNTING, LONG)["token_ids"]
    reader = Reader(first, n=8 * LONG)
    assert reader.began.wait(30)
    third = mesh.start("third", model=smollm2_path)
    mesh.wait_ranks(3, first, third)
    assert reader.is_alive(), "the answer was over too soon"
    other = clear_tokens(third.complete(COUNTING, 24, logprobs=2))
    assert want[: len(other)] == other
    while len(reader.tokens) < LONG:
        assert reader.is_alive(), reader.error
        time.sleep(0.05)
    reader.leave()
    assert reader.error is None
    assert reader.tokens[:LONG] == want


def test_device_that_freezes_while_a_layout_is_prepared_is_left_out(mesh: Mesh, smollm2_path) -> None:
    first, second = _start(mesh, smollm2_path, 2)
    want = first.complete(COUNTING, LONG)["token_ids"]
    reader = Reader(first, n=len(want))
    assert reader.began.wait(30)
    third = mesh.start("third", model=smollm2_path)
    mesh.wait(_sees(third, "connected"), first)
    third.signal(signal.SIGSTOP)
    mesh.wait(_sees(third, "lost"), first, second)
    assert reader.whole() == want
    mesh.wait_ranks(2, first, second)
    third.signal(signal.SIGCONT)
    mesh.wait_ranks(3, first, second, third)
