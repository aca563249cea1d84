"""Addresses as people write them: host and port out of text. Looks no name up. A leaf: imports nothing of ours."""

from __future__ import annotations

import re
import socket

_LABEL = re.compile(r"(?!-)[\w-]{1,63}(?<!-)")
_MAX_NAME = 253  # characters of a host's name


def split_address(text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of "host", "host:port", "[::1]:80", "::1" or "fe80::1%eth0". Without default_port a port is needed.

    ValueError, which says what is expected, for anything else.
    """
    expected = "host:port or [IPv6]:port" if default_port is None else "host, host:port or [IPv6]:port"
    found = re.fullmatch(r"\[([^\[\]]+)\](?::([0-9]+))?|([^:\[\]]+)(?::([0-9]+))?|([^\[\]]+)", text.strip())
    if found is None:
        raise ValueError(f"expected {expected}")
    ipv6, host, digits = found[1] or found[5], found[3], found[2] or found[4]
    if not (_is_ipv6(ipv6) if ipv6 else _is_host(host)) or (digits is None and default_port is None):
        raise ValueError(f"expected {expected}")
    if digits is not None and not (len(digits) <= 5 and 0 < int(digits) < 65536):
        raise ValueError("expected a port, 1 to 65535, after the colon")
    return ipv6 or host, int(digits or default_port or 0)


def _is_host(text: str) -> bool:
    """Whether it is an IPv4 address or can be a name. What is all digits and dots must be an address."""
    if re.fullmatch(r"[0-9.]+", text):
        return _is_numeric(socket.AF_INET, text)
    return len(text) <= _MAX_NAME and all(_LABEL.fullmatch(label) for label in text.removesuffix(".").split("."))


def _is_ipv6(text: str) -> bool:
    address, percent, scope = text.partition("%")
    return _is_numeric(socket.AF_INET6, address) and (not percent or re.fullmatch(r"[\w.-]{1,15}", scope) is not None)


def _is_numeric(family: socket.AddressFamily, text: str) -> bool:
    try:
        socket.inet_pton(family, text)
    except (OSError, ValueError):
        return False
    return True
