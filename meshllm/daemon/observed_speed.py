"""What this device's kernels read in daily work, for the planner: the measure at the start is short, and was taken when
others may have used the machine; a device that gets hot, or is shared, slows down later. Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from meshllm.daemon.loop_bridge import StepCosts
from meshllm.layout.layout import Device

WINDOW_S: Final = 10.0  # a speed is believed when it was seen for so long
WINDOW_READ_S: Final = 2.0  # of which the kernels ran so long at least
STALE_S: Final = 60.0  # a window that took longer says little about now
PAUSE_S: Final = 60.0  # between two announcements: each may move the mesh
NOTICEABLE: Final = 0.05  # a smaller difference is noise


class ObservedSpeed:
    """Follows the costs of steps. `device`: this device as it is to be announced."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._epoch = 0
        self._begun_s = 0.0
        self._read_bytes = 0
        self._read_s = 0.0
        self._announced_s = float("-inf")

    def has_changed(self, costs: StepCosts, now: float) -> bool:
        """Takes costs in; whether `device` is another now."""
        epoch = costs.epoch.counter
        if not costs.read_bytes or epoch < self._epoch:
            return False
        if epoch > self._epoch:  # other slices: nothing of before can be compared
            self._epoch, self._read_bytes = epoch, 0
        if self._read_bytes == 0 or now - self._begun_s > STALE_S:
            self._begun_s, self._read_bytes, self._read_s = now, 0, 0.0
        self._read_bytes += costs.read_bytes
        self._read_s += costs.read_us / 1e6
        if now - self._begun_s < WINDOW_S or self._read_s < WINDOW_READ_S or now - self._announced_s < PAUSE_S:
            return False
        work_gbps = self._read_bytes / self._read_s / 1e9
        self._read_bytes = 0
        if self.device.work_epoch == epoch and abs(work_gbps / self.device.work_gbps - 1) < NOTICEABLE:
            return False
        self.device = msgspec.structs.replace(self.device, work_gbps=work_gbps, work_epoch=epoch)
        self._announced_s = now
        return True
