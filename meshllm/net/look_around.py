"""One look at the network for `meshllm doctor`: does multicast work here, and who announces itself. Synchronous.

What an interface sends to the group of mDNS it must hear itself: a firewall that drops it does so for others' too. An
access point that keeps it from other devices is not seen so; then nobody else is heard.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import zeroconf

from meshllm.net.adverts import OWN_ID, SERVICE_TYPE, Announcement, Sighting, read_advert
from meshllm.net.discovery import FAULTS, multicast_targets
from meshllm.net.interfaces import Interface

GROUP: Final = "224.0.0.251"
PORT: Final = 5353
ECHO_S: Final = 0.5  # for what is looped back inside this device


@dataclass(frozen=True, slots=True)
class Heard:
    """What announced itself: other devices of this mesh, adverts of other meshes, and whether our own was among it."""

    mesh: frozenset[str]  # node ids
    strangers: int
    own: bool


def hears_itself(interface: Interface) -> str | None:
    """None if this interface hears what it sends to the group of mDNS, or has no IPv4 to try it with; else what
    happens.
    """
    address = next((text for text in interface.addresses if ":" not in text), None)
    if address is None:
        return None
    mark = os.urandom(2)  # the message's id, which mDNS ignores
    name = b"".join(bytes([len(label)]) + label.encode() for label in SERVICE_TYPE.strip(".").split(".")) + b"\0"
    query = mark + struct.pack("!5H", 0, 1, 0, 0, 0) + name + struct.pack("!2H", 12, 1)  # PTR, IN
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(("", PORT))
            own = socket.inet_aton(address)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + own)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
            sock.sendto(query, (GROUP, PORT))
            return None if _comes_back(sock, query) else "what it sends by multicast does not come back"
    except OSError as error:
        return f"multicast cannot be used: {error.strerror}"


def _comes_back(sock: socket.socket, query: bytes) -> bool:
    deadline = time.monotonic() + ECHO_S
    while (left := deadline - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            if sock.recv(9000) == query:
                return True
        except TimeoutError:
            break
    return False


def listen(own: Announcement, chosen: Sequence[Interface], seconds: float) -> Heard:
    """Asks who is there, and listens so long. Raises OSError where the network cannot be used."""
    mesh: set[str] = set()
    strangers: set[str] = set()
    heard: list[str] = []

    class Listener(zeroconf.ServiceListener):
        def add_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
            info = zc.get_service_info(type_, name, timeout=int(1000 * seconds))
            if info is None:
                return
            found = read_advert(info.port, info.properties, info.parsed_scoped_addresses(), own, chosen)
            if isinstance(found, Sighting):
                mesh.add(found.node)
            elif found == OWN_ID:
                heard.append(name)
            else:
                strangers.add(name)

        def update_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
            pass

        def remove_service(self, zc: zeroconf.Zeroconf, type_: str, name: str) -> None:
            pass

    try:
        with zeroconf.Zeroconf(interfaces=multicast_targets(chosen), ip_version=zeroconf.IPVersion.All) as zc:
            zc.add_service_listener(SERVICE_TYPE, Listener())
            time.sleep(seconds)
    except FAULTS as error:
        raise OSError(str(error) or type(error).__name__) from None
    return Heard(frozenset(mesh), len(strangers), bool(heard))
