"""A switch that delays: whatever one of two hosts sends to a port here goes on to the other, that much later.

python relay.py PORT SECONDS HOST HOST
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time


def _pump(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    """Passes on what comes, and its end."""
    held: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def send() -> None:
        data = b"-"
        while data:
            at, data = held.get()
            time.sleep(max(0.0, at - time.monotonic()))
            try:
                if data:
                    sink.sendall(data)
                else:
                    sink.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    threading.Thread(target=send, daemon=True).start()
    data = b"-"
    while data:
        try:
            data = source.recv(65536)
        except OSError:
            data = b""
        held.put((time.monotonic() + delay_s, data))


def main() -> None:
    """Runs until it is ended."""
    port, delay_s, one, other = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
    listener = socket.create_server(("", port))
    while True:
        near, (host, _) = listener.accept()
        try:
            far = socket.create_connection((other if host == one else one, port), timeout=5)
        except OSError:
            near.close()
            continue
        far.settimeout(None)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(*pair, delay_s), daemon=True).start()


if __name__ == "__main__":
    main()
