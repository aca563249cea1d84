"""What a device says of its own speed after it has worked for a while."""

from __future__ import annotations

import pytest

from meshllm.daemon.loop_bridge import StepCosts
from meshllm.daemon.observed_speed import PAUSE_S, STALE_S, WINDOW_S, ObservedSpeed
from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.messages import Epoch

DEVICE = Device(node=NodeId("a" * 32), read_gbps=10.0, matmul_gops=100.0, usable_bytes=1 << 30)


def costs(read_gbps: float, read_s: float = 0.8, epoch: int = 1) -> StepCosts:
    """A second of decoding at this speed."""
    return StepCosts(
        epoch=Epoch(epoch, DEVICE.node),
        n_steps=10,
        decode_steps=10,
        decode_tokens=10,
        bytes_sent=0,
        bytes_received=0,
        exchange_us=2e5,
        compute_us=read_s * 1e6,
        read_bytes=int(read_gbps * read_s * 1e9),
        read_us=read_s * 1e6,
    )


def work(speed: ObservedSpeed, read_gbps: float, begin_s: float, seconds: float) -> list[float]:
    """Seconds after begin_s at which the device is to be announced anew."""
    return [s for s in range(int(seconds) + 1) if speed.has_changed(costs(read_gbps), begin_s + s)]


def test_a_device_that_slows_down_says_so_after_ten_seconds() -> None:
    speed = ObservedSpeed(DEVICE)
    assert work(speed, 6.0, 100.0, 15.0) == [WINDOW_S]
    assert (speed.device.work_gbps, speed.device.work_epoch) == (pytest.approx(6.0), 1)
    assert (speed.device.read_gbps, speed.device.usable_bytes) == (DEVICE.read_gbps, DEVICE.usable_bytes)


def test_noise_is_no_change() -> None:
    speed = ObservedSpeed(DEVICE)
    assert work(speed, 10.0, 0.0, 15.0) == [WINDOW_S]  # the first look is news in any case
    assert work(speed, 9.7, 16.0, 300.0) == []
    assert speed.device.work_gbps == pytest.approx(10.0)


def test_it_speaks_at_most_once_a_minute() -> None:
    speed = ObservedSpeed(DEVICE)
    assert work(speed, 6.0, 0.0, 10.0) == [10]
    assert work(speed, 9.0, 11.0, 100.0) == [PAUSE_S - 1]
    assert speed.device.work_gbps == pytest.approx(9.0)


def test_what_was_long_ago_does_not_count() -> None:
    speed = ObservedSpeed(DEVICE)
    assert work(speed, 5.0, 0.0, 8.0) == []
    later = 9.0 + STALE_S
    assert work(speed, 10.0, later, 20.0) == [WINDOW_S]
    assert speed.device.work_gbps == pytest.approx(10.0)


def test_another_epoch_begins_anew_and_an_older_one_is_not_heard() -> None:
    speed = ObservedSpeed(DEVICE)
    assert work(speed, 5.0, 0.0, 9.0) == []
    assert not any(speed.has_changed(costs(10.0, epoch=2), 10.0 + s) for s in range(10))
    assert not speed.has_changed(costs(1.0), 20.0)
    assert speed.has_changed(costs(10.0, epoch=2), 20.0)
    assert (speed.device.work_gbps, speed.device.work_epoch) == (pytest.approx(10.0), 2)


def test_a_glance_is_not_believed_and_neither_are_steps_of_many_rows() -> None:
    speed = ObservedSpeed(DEVICE)
    assert not any(speed.has_changed(costs(2.0, read_s=0.01), s) for s in range(int(STALE_S)))
    many_rows = costs(2.0)
    object.__setattr__(many_rows, "read_bytes", 0)
    assert not any(speed.has_changed(many_rows, s) for s in range(int(STALE_S)))
