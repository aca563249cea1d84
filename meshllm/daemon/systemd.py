"""What systemd and a service say to each other: READY, STOPPING, WATCHDOG out; listening sockets in. No library needed.

sd_notify(3): datagrams of KEY=VALUE lines to the Unix socket NOTIFY_SOCKET ("@": abstract). sd_listen_fds(3):
descriptors from 3 on, for the process LISTEN_PID only. Without systemd nothing happens here.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

import trio

FIRST_DESCRIPTOR = 3
MAX_DESCRIPTORS = 16


class Notifier:
    """Tells systemd how the service is; does nothing where nobody listens."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        digits = environment.get("WATCHDOG_USEC", "")
        self.watchdog_s = int(digits) / 2e6 if watched and digits.isdigit() and int(digits) > 0 else None

    def send(self, *lines: str) -> None:
        """Sends KEY=VALUE lines; a manager that does not take them is no reason to stop."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.settimeout(0.1)
            sock.sendto("\n".join(lines).encode(), self._address)

    async def keep_alive(self) -> None:
        """Feeds the watchdog twice in each of its periods, as long as the loop that runs this turns."""
        while self.watchdog_s is not None:
            self.send("WATCHDOG=1")
            await trio.sleep(self.watchdog_s)


def take_listening_sockets(environment: Mapping[str, str]) -> list[socket.socket]:
    """Unix sockets that systemd already listens on for us, close-on-exec; [] without socket activation."""
    if environment.get("LISTEN_PID") != str(os.getpid()) or not environment.get("LISTEN_FDS", "").isdigit():
        return []
    taken = []
    for descriptor in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + min(int(environment["LISTEN_FDS"]), MAX_DESCRIPTORS)):
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
        if sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM:
            taken.append(sock)
        else:
            sock.close()
    return taken
