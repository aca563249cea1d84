"""What an mDNS advert says, checked: adverts are what strangers send. Pure, but for the form of zeroconf's records.

TXT holds only id, protocol version and mesh tag: names and models go over links, which are authenticated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import zeroconf

from meshllm.layout.layout import NodeId
from meshllm.net.interfaces import MAX_ADDRESSES, Interface, dialable_addresses
from meshllm.net.link import Address

SERVICE_TYPE = "_meshllm._tcp.local."

_ID = re.compile(r"[0-9a-f]{16}")
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}")


@dataclass(frozen=True, slots=True)
class Announcement:
    """What this daemon says of itself."""

    node: NodeId
    tag: str
    version: str  # of the protocol, major.minor
    port: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """A daemon of this mesh was announced, or its announcement taken back (addresses is then empty)."""

    node: NodeId
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Ignored:
    """An advert that is not used, and why: for a rate-limited debug line."""

    reason: str


OWN_ID = Ignored("our own id")


def read_advert(
    port: int | None,
    properties: Mapping[bytes, bytes | None],
    addresses: Sequence[str],
    own: Announcement,
    chosen: Sequence[Interface],
) -> Sighting | Ignored:
    """A checked sighting out of an advert's parts. Pure: every part may be anything."""
    fields = {key: (properties.get(key.encode()) or b"").decode("ascii", "replace") for key in ("id", "v", "tag")}
    if not port or not 0 < port < 65536:
        return Ignored("no port")
    if not _ID.fullmatch(fields["id"]) or not _ID.fullmatch(fields["tag"]) or not _VERSION.fullmatch(fields["v"]):
        return Ignored("malformed TXT record")
    if fields["tag"] != own.tag:
        return Ignored("another mesh")
    if fields["id"] == own.node:
        return OWN_ID
    hosts = dialable_addresses(addresses[:MAX_ADDRESSES], chosen)
    if not hosts:
        return Ignored("no address that can be reached from here")
    return Sighting(NodeId(fields["id"]), tuple((host, port) for host in hosts))


def service_info(own: Announcement, addresses: Sequence[str]) -> zeroconf.ServiceInfo:
    """The records that announce this daemon."""
    return zeroconf.ServiceInfo(
        SERVICE_TYPE,
        f"{own.node}.{SERVICE_TYPE}",
        port=own.port,
        properties={"id": own.node, "v": own.version, "tag": own.tag},
        server=f"meshllm-{own.node}.local.",
        parsed_addresses=list(addresses),
    )
