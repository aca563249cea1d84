"""What the node does not know of its daemon, and `status` tells."""

from __future__ import annotations

from dataclasses import dataclass

from meshllm.daemon.device import UNKNOWN_BYTES, free_bytes
from meshllm.layout.layout import Device
from meshllm.mesh.facts import NodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFacts:
    """As of now."""

    config: NodeConfig
    device: Device
    tag: str
    addresses: tuple[str, ...]  # where it may be reached, best first
    uptime_s: float
    free_bytes: int
    unknown_bytes: int = UNKNOWN_BYTES  # memory figures from here on mean: unknown


def gather_facts(config: NodeConfig, device: Device, tag: str, hosts: tuple[str, ...], uptime_s: float) -> OwnFacts:
    """hosts: addresses of this device without ports."""
    addresses = tuple(f"[{host}]:{config.port}" if ":" in host else f"{host}:{config.port}" for host in hosts)
    return OwnFacts(
        config=config, device=device, tag=tag, addresses=addresses, uptime_s=uptime_s, free_bytes=free_bytes()
    )
