"""What networks do to hosts on a switch (mesh.bridged_hosts): addresses, second cables, ports without multicast."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.system.mesh import bridged_hosts

FIRST, SECOND = "10.77.0", "10.78.0"


@dataclass(frozen=True)
class Hosts:
    """Namespaces h0 to hn-1, each with eth0 on br0 of the namespace `switch`, there as port p0 to pn-1."""

    names: list[str]

    @property
    def switch(self) -> str:
        return self.names[0][:-2] + "sw"

    def everywhere(self, *words: str) -> None:
        """`ip WORDS` on each host."""
        for name in self.names:
            ip(name, *words)

    def second_cable(self) -> None:
        """eth1 (10.78.0.x) of each host on a second switch."""
        ip(self.switch, "link", "add", "br1", "type", "bridge", "mcast_snooping", "0")
        ip(self.switch, "link", "set", "br1", "up")
        for i, name in enumerate(self.names):
            ip(name, "link", "add", "eth1", "type", "veth", "peer", "name", f"q{i}", "netns", self.switch)
            ip(self.switch, "link", "set", f"q{i}", "master", "br1", "up")
            ip(name, "addr", "add", f"{SECOND}.{i + 1}/24", "dev", "eth1")
            ip(name, "link", "set", "eth1", "up")

    def split(self, *ports: int) -> None:
        """These hosts stand on a switch of their own from now on."""
        ip(self.switch, "link", "add", "br2", "type", "bridge", "mcast_snooping", "0")
        ip(self.switch, "link", "set", "br2", "up")
        for i in ports:
            ip(self.switch, "link", "set", f"p{i}", "master", "br2")

    def join(self, *ports: int) -> None:
        """Ends a split."""
        for i in ports:
            ip(self.switch, "link", "set", f"p{i}", "master", "br0")

    def isolate(self, *ports: int) -> None:
        """These hosts do not reach each other, only the rest."""
        for i in ports:
            run("ip", "netns", "exec", self.switch, "bridge", "link", "set", "dev", f"p{i}", "isolated", "on")

    def no_multicast_to(self, *ports: int) -> None:
        """These hosts hear no multicast; theirs is heard."""
        for i in ports:
            run("ip", "netns", "exec", self.switch, "bridge", "link", "set", "dev", f"p{i}", "mcast_flood", "off")


@contextmanager
def hosts(n: int, *, ipv6: bool = False) -> Iterator[Hosts]:
    """n hosts on a switch, with IPv6 only where it is asked for: then an address is what the test says."""
    with bridged_hosts(n) as names:
        for name in names if not ipv6 else ():
            run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        yield Hosts(names)


def ip(host: str, *words: str) -> None:
    """`ip WORDS` in a namespace."""
    run("ip", "-n", host, *words)


def run(*words: str) -> None:
    """Runs a command that must succeed."""
    subprocess.run(words, check=True, capture_output=True, timeout=20)
