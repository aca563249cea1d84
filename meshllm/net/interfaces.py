"""Which network interfaces and addresses this device uses with its peers; what a peer's announced address is worth
here.

Flags and names come from the kernel by ioctl, not from /sys: in a network namespace /sys may still show the host's.
The choice itself is pure. Never used by default: loopback while there is anything else, links that are down, bridges
and virtual Ethernet of containers (the same 172.17.0.1 on every host), VPNs. Patterns change that.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import ifaddr

NOT_BY_DEFAULT = (
    *("docker*", "br-*", "veth*", "virbr*", "vmnet*", "vboxnet*", "cni*", "flannel*", "cali*", "podman*", "lxc*"),
    *("lxdbr*", "tun*", "tap*", "wg*", "tailscale*", "zt*", "ppp*", "utun*", "ipsec*", "nordlynx*", "ham*"),
)
MAX_ADDRESSES = 16  # of one peer that are kept
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_SIOCGIFFLAGS = 0x8913


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface. addresses: IPv4 and IPv6 as text, without a scope. is_up: up and with a carrier."""

    name: str
    index: int
    is_up: bool
    is_loopback: bool
    addresses: tuple[str, ...]


def read_interfaces() -> tuple[Interface, ...]:
    """The interfaces of this network namespace, by index; about a millisecond."""
    addresses: dict[str, list[str]] = {}
    for adapter in ifaddr.get_adapters():
        texts = [str(entry.ip[0]) if isinstance(entry.ip, tuple) else str(entry.ip) for entry in adapter.ips]
        addresses[adapter.nice_name] = [text.partition("%")[0] for text in texts]
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for index, name in sorted(socket.if_nameindex()):
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode()[:15], 0))
            except OSError:  # gone since it was listed
                continue
            flags = struct.unpack_from("H", answer, 16)[0]
            running = _IFF_UP | _IFF_RUNNING
            interfaces.append(
                Interface(
                    name,
                    index,
                    is_up=flags & running == running,
                    is_loopback=bool(flags & _IFF_LOOPBACK),
                    addresses=tuple(sorted(addresses.get(name, []))),
                )
            )
    return tuple(interfaces)


def choose_interfaces(interfaces: Sequence[Interface], patterns: Sequence[str]) -> tuple[Interface, ...]:
    """Those to announce on and to dial through.

    patterns: shell patterns of names; "!pattern" leaves out. Without a positive one all of the default count. If
    nothing but loopback is left, loopback: daemons on a machine without a network still find each other.
    """
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    up = [one for one in interfaces if one.is_up and one.addresses and not _matches(one.name, unwanted)]
    if wanted:
        return tuple(one for one in up if _matches(one.name, wanted))
    lan = tuple(one for one in up if not one.is_loopback and not _matches(one.name, NOT_BY_DEFAULT))
    return lan or tuple(one for one in up if one.is_loopback)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def announced_addresses(chosen: Sequence[Interface]) -> tuple[str, ...]:
    """What to tell peers: the addresses of the chosen interfaces, those of 127/8 and ::1 only if there are no
    others.
    """
    every = [ipaddress.ip_address(text) for one in chosen for text in one.addresses]
    public = [address for address in every if not address.is_loopback]
    return tuple(str(address) for address in sorted(public or every, key=_preference))[:MAX_ADDRESSES]


def dialable_addresses(announced: Sequence[str], chosen: Sequence[Interface]) -> tuple[str, ...]:
    """Addresses of a peer that may be dialled from here, best first, link-local IPv6 with the scope it needs.

    A link-local address is tried on the interface that its announcement came in on, else on each chosen one; scope 0
    is no scope. Loopback counts only where this device itself uses loopback: another device's would be our own.
    """
    on_loopback = any(one.is_loopback for one in chosen)
    result: list[tuple[tuple[int, str], str]] = []
    for text in announced[:MAX_ADDRESSES]:
        bare, _, scope = text.partition("%")
        try:
            address = ipaddress.ip_address(bare)
        except ValueError:
            continue
        if address.is_unspecified or address.is_multicast or (address.is_loopback and not on_loopback):
            continue
        key = _preference(address)
        if address.version == 6 and address.is_link_local:
            result += [(key, f"{address}%{index}") for index in _scopes(scope, chosen)]
        else:
            result.append((key, str(address)))
    return tuple(dict.fromkeys(text for _, text in sorted(result)))[:MAX_ADDRESSES]


def _scopes(scope: str, chosen: Sequence[Interface]) -> list[str]:
    """Indexes of the interfaces that a link-local address may be on: the one named, else every chosen one with IPv6."""
    for one in chosen:
        if scope in (one.name, str(one.index)):
            return [str(one.index)]
    if scope not in ("", "0"):
        return []  # came in on an interface that is not used
    return [str(one.index) for one in chosen if any(":" in text for text in one.addresses) and not one.is_loopback]


def _preference(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, str]:
    """Sort key: IPv4, then IPv6, then link-local of either; the text decides between equals."""
    if address.is_link_local:
        return (3 if address.version == 6 else 2), str(address)
    return (0 if address.version == 4 else 1), str(address)
