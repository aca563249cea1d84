"""What steps cost, counted by one member of an epoch and handed up now and then: bytes, microseconds, steps. Pure."""

from __future__ import annotations

from typing import Final

from meshllm.daemon.loop_bridge import StepCosts
from meshllm.mesh.messages import Epoch, Step

REPORT_S: Final = 1.0  # between two reports within a burst of steps


class CostCounter:
    """Counts the steps of an epoch since the last report. Steps with prompt tokens count as steps and nothing more."""

    def __init__(self, epoch: Epoch, slice_bytes: int, now: float) -> None:
        """slice_bytes: of weights that a step reads."""
        self._epoch = epoch
        self._slice_bytes = slice_bytes
        self._reported = now
        self._clear()

    def add(self, step: Step, *, sent: int, received: int, exchange_s: float, total_s: float) -> None:
        """A step is over. exchange_s: of total_s, spent on sending to, waiting for and receiving from other members."""
        self._n_steps += 1
        if any(len(entry.tokens) > 1 or entry.sampling is None for entry in step.entries):
            return
        self._decode_steps += 1
        self._decode_tokens += len(step.entries)
        self._bytes_sent += sent
        self._bytes_received += received
        self._exchange_s += exchange_s
        self._compute_s += total_s - exchange_s
        if len(step.entries) == 1:
            self._read_bytes += self._slice_bytes
            self._read_s += total_s - exchange_s

    def report(self, now: float, *, burst_ended: bool) -> StepCosts | None:
        """What is to be handed up now, if anything."""
        if self._n_steps == 0 or not (burst_ended or now - self._reported >= REPORT_S):
            return None
        costs = StepCosts(
            epoch=self._epoch,
            n_steps=self._n_steps,
            decode_steps=self._decode_steps,
            decode_tokens=self._decode_tokens,
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            exchange_us=self._exchange_s * 1e6,
            compute_us=self._compute_s * 1e6,
            read_bytes=self._read_bytes,
            read_us=self._read_s * 1e6,
        )
        self._reported = now
        self._clear()
        return costs

    def _clear(self) -> None:
        self._n_steps = self._decode_steps = self._decode_tokens = 0
        self._bytes_sent = self._bytes_received = self._read_bytes = 0
        self._exchange_s = self._compute_s = self._read_s = 0.0
