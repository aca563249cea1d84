"""The crossing between two trio loops in two threads."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from meshllm.daemon.crossing import Crossing
from meshllm.errors import LocalProtocolError


def run_beside(function: Callable[[], Awaitable[None]]) -> threading.Thread:
    thread = threading.Thread(target=trio.run, args=(function,))
    thread.start()
    return thread


async def test_items_cross_in_order_and_none_is_lost() -> None:
    down: Crossing[int] = Crossing(10_000)
    up: Crossing[int] = Crossing(8)

    async def echo() -> None:
        while (item := await down.receive()) >= 0:
            await up.send(item)

    thread = run_beside(echo)
    for item in range(3000):
        down.post(item)
    with trio.fail_after(20):
        assert [await up.receive() for _ in range(3000)] == list(range(3000))
    down.post(-1)
    await trio.to_thread.run_sync(thread.join)


async def test_many_threads_may_post() -> None:
    crossing: Crossing[int] = Crossing(100_000)
    threads = [
        threading.Thread(target=lambda n=n: [crossing.post(n * 1000 + i) for i in range(1000)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    with trio.fail_after(20):
        got = [await crossing.receive() for _ in range(4000)]
    assert sorted(got) == list(range(4000))
    for n in range(4):
        assert [item for item in got if item // 1000 == n] == list(range(n * 1000, n * 1000 + 1000))
    for thread in threads:
        thread.join()


async def test_full_queue_refuses_a_post_and_makes_send_wait() -> None:
    crossing: Crossing[int] = Crossing(2)
    crossing.post(1)
    crossing.post(2)
    with pytest.raises(LocalProtocolError):
        crossing.post(3)
    with trio.move_on_after(0.05) as scope:
        await crossing.send(3)
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crossing.send, 4)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert crossing.take() == 1
    assert [crossing.take(), crossing.take(), crossing.take()] == [2, 4, None]


async def test_cancelled_receive_loses_nothing() -> None:
    crossing: Crossing[str] = Crossing(2)
    with trio.move_on_after(0.02):
        await crossing.receive()
    crossing.post("kept")
    with trio.fail_after(5):
        assert await crossing.receive() == "kept"


def test_post_to_a_loop_that_is_over_does_no_harm() -> None:
    crossing: Crossing[int] = Crossing(2)

    async def wait_a_moment() -> None:
        with trio.move_on_after(0.01):
            await crossing.receive()

    trio.run(wait_a_moment)
    crossing.post(1)
    assert crossing.take() == 1
