"""Links that are slow or far, and devices of another version: real daemons, in network namespaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshllm.layout.layout import NodeId
from meshllm.status import Status
from tests.margins import clear_tokens
from tests.system.mesh import Mesh, run_in, serves
from tests.system.networks import FIRST, hosts, run
from tests.system.readers import COUNTING, Reader

pytestmark = pytest.mark.usefixtures("need_namespaces")
PORT = 7070


def _limit(host: str, rate: str) -> None:
    run("ip", "netns", "exec", host, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf",
        "rate", rate, "burst", "32kbit", "latency", "400ms")  # fmt: skip


@pytest.mark.parametrize("layout", ["all", "auto"])
def test_link_of_a_few_megabits(tmp_path, smollm2_path, layout: str) -> None:
    """All devices answer as told; "auto" sees that they would be slower together, and says so."""
    with hosts(2) as at, Mesh(tmp_path) as mesh:
        for host in at.names:
            _limit(host, "20mbit")
        first, second = (mesh.start(name, model=smollm2_path, host=name, layout=layout) for name in at.names)
        if layout == "all":
            mesh.wait_ranks(2, first, second)
        else:
            for status in mesh.wait(lambda status: serves(status, 1) and bool(_left_out(status)), first, second):
                assert "slower" in _left_out(status)[0][1]
                (peer,) = (peer for peer in status.peers if peer.state == "connected")
                assert peer.mbps is not None
                assert peer.mbps < 40
        want = clear_tokens(first.complete(COUNTING, 12, logprobs=2))
        assert len(want) > 6
        assert second.complete(COUNTING, 12)["token_ids"][: len(want)] == want
        reader = Reader(first, n=24)
        _limit(at.names[1], "8mbit")
        assert reader.whole()[: len(want)] == want


def _left_out(status: Status) -> tuple[tuple[NodeId, str], ...]:
    return status.layout.left_out if status.layout else ()


@contextmanager
def _relay(host: str, delay_s: float) -> Iterator[None]:
    """On `host`, between the first two."""
    words = [sys.executable, str(Path(__file__).with_name("relay.py")), str(PORT), str(delay_s)]
    with subprocess.Popen(run_in(host, [*words, f"{FIRST}.1", f"{FIRST}.2"])) as process:
        try:
            yield
        finally:
            process.kill()


def test_far_device_that_only_a_relay_leads_to(tmp_path, smollm2_path) -> None:
    """4 ms there and back, two of them at least in each of 30 layers; neither sees the other's announcements."""
    with hosts(3) as at, Mesh(tmp_path) as mesh, _relay(at.names[2], 0.002):
        at.isolate(0, 1)
        at_port = ("--port", str(PORT))
        first = mesh.start("first", *at_port, "--peer", f"{FIRST}.3:{PORT}", model=smollm2_path, host=at.names[0])
        second = mesh.start("second", *at_port, model=smollm2_path, host=at.names[1])
        mesh.wait_ranks(2, first, second)
        want = clear_tokens(first.complete(COUNTING, 8, logprobs=2))
        assert len(want) > 4
        second.kill()
        mesh.wait_ranks(1, first)
        assert first.complete(COUNTING, 8)["token_ids"][: len(want)] == want


OTHER_MAJOR = """
import meshllm.mesh.messages as messages
messages.PROTOCOL_MAJOR += 1
from meshllm.cli.main import main
main()
"""


def test_device_of_another_protocol_major_is_listed_and_not_used(tmp_path, smollm2_path) -> None:
    with hosts(2) as at, Mesh(tmp_path) as mesh:
        first = mesh.start("first", model=smollm2_path, host=at.names[0])
        second = mesh.start("second", model=smollm2_path, host=at.names[1], program=("-c", OTHER_MAJOR))
        for status in mesh.wait(lambda status: any(p.state == "incompatible" for p in status.peers), first, second):
            (peer,) = (peer for peer in status.peers if peer.state == "incompatible")
            assert "bring both to one version" in (peer.reason or "")
        mesh.wait_ranks(1, first)
        assert len(first.complete(COUNTING, 4)["token_ids"]) == 4
        assert len(second.complete(COUNTING, 4)["token_ids"]) == 4
