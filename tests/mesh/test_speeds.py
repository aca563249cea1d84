"""Which speeds are held against each other."""

from __future__ import annotations

import pytest

from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.speeds import Placed, SpeedBook

ONE, TWO, THREE = (NodeId(digit * 16) for digit in "123")


def device(node: NodeId, read_gbps: float, work_gbps: float = 0.0, epoch: int = 0, incarnation: int = 1) -> Placed:
    return incarnation, Device(
        node=node,
        read_gbps=read_gbps,
        matmul_gops=100.0,
        usable_bytes=1 << 30,
        work_gbps=work_gbps,
        work_epoch=epoch,
    )


def speeds(book: SpeedBook, *devices: Placed) -> list[float]:
    comparable = book.comparable(devices)
    assert all((one.work_gbps, one.work_epoch) == (0.0, 0) for _, one in comparable)
    return [one.read_gbps for _, one in comparable]


def test_first_measures_count_until_all_ranks_have_worked() -> None:
    book = SpeedBook()
    devices = [device(ONE, 20.0), device(TWO, 18.0, 7.0, 4)]
    book.observe(devices, 4, [ONE, TWO])
    assert speeds(book, *devices) == [20.0, 18.0]


def test_work_in_one_epoch_replaces_first_measures() -> None:
    book = SpeedBook()
    devices = [device(ONE, 20.0, 6.5, 4), device(TWO, 12.0, 7.0, 4)]
    book.observe(devices, 4, [ONE, TWO])
    assert speeds(book, *devices) == [6.5, 7.0]


def test_work_in_different_epochs_is_not_compared() -> None:
    book = SpeedBook()
    devices = [device(ONE, 20.0, 6.5, 4), device(TWO, 18.0, 7.0, 4)]
    book.observe(devices, 4, [ONE, TWO])
    devices = [device(ONE, 20.0, 6.5, 4), device(TWO, 18.0, 3.0, 5)]
    book.observe(devices, 5, [ONE, TWO])
    assert speeds(book, *devices) == [6.5, 7.0]


def test_a_newcomer_is_taken_to_lose_what_the_others_lose() -> None:
    book = SpeedBook()
    devices = [device(ONE, 20.0, 7.0, 4), device(TWO, 20.0, 7.0, 4)]
    book.observe(devices, 4, [ONE, TWO])
    assert speeds(book, *devices, device(THREE, 20.0)) == [7.0, 7.0, pytest.approx(7.0)]
    assert speeds(book, *devices, device(THREE, 10.0)) == [7.0, 7.0, pytest.approx(3.5)]


def test_a_device_that_started_again_is_a_newcomer() -> None:
    book = SpeedBook()
    devices = [device(ONE, 20.0, 10.0, 4), device(TWO, 20.0, 2.0, 4)]
    book.observe(devices, 4, [ONE, TWO])
    assert speeds(book, devices[0], device(TWO, 20.0, incarnation=2)) == [10.0, pytest.approx(10.0)]
