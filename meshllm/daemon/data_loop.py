"""The data plane: a thread with a trio loop of its own that runs the steps of the epochs in force.

Started and fed by the control loop through loop_bridge. Kernels are called right here, with the GIL released: a hop to
another thread would cost more than an exchange. Only packing a slice runs in a worker thread, so that a running epoch
goes on. Never parses JSON, never decides who takes part, never logs.
"""

from __future__ import annotations

from meshllm.daemon.loop_bridge import Command, Event
from meshllm.kernels.binding import Kernels
from meshllm.layout.layout import NodeId


class DataLoop:
    """The control loop's handle. `post` and `close` may be called from any thread, `next_event` from one trio task."""

    def __init__(self, node: NodeId, kernels: Kernels) -> None:
        """node: this daemon's id. kernels: nobody else may run them once `start` was called."""

    def start(self) -> None:
        """Starts the thread."""

    def post(self, command: Command) -> None:
        """Hands a command down, at once. Raises LocalProtocolError if the data loop has taken none for far too long."""

    async def next_event(self) -> Event:
        """The next event, when there is one. Cancellable; nothing is lost. DataLoopEnded is the last one."""

    def interrupt(self) -> None:
        """From any thread, after Stop was posted: a running kernel call returns within one op."""

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end; False if it has not in this time. Blocks: at the end of the daemon only."""
