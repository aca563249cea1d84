"""`meshllm doctor`, beside real daemons and on hosts whose network is at fault."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshllm.net.identity import MeshSecret
from tests.system.mesh import Mesh, bridged_hosts, run_in


def doctor(folder: Path, *words: str, host: str | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the findings of `meshllm doctor --json` by what was looked at."""
    command = [sys.executable, "-m", "meshllm", "doctor", "--json", "--state-dir", str(folder), *words]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MESHLLM_")}
    done = subprocess.run(
        run_in(host, command), stdout=subprocess.PIPE, timeout=60, env={**kept, "HOME": str(folder)}, check=False
    )
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {finding["check"]: finding for finding in findings}


def test_nothing_is_wrong_with_two_devices_that_serve(
    need_namespaces: None, tmp_path: Path, smollm2_path: Path
) -> None:
    with bridged_hosts(2) as hosts, Mesh(tmp_path) as mesh:
        daemons = [mesh.start(host, model=smollm2_path, host=host) for host in hosts]
        mesh.wait_ranks(2, *daemons)
        code, found = doctor(daemons[0].folder, "--socket", str(daemons[0].socket), host=hosts[0])
        assert {check for check, finding in found.items() if finding["verdict"] == "problem"} == set()
        assert found["daemon"]["found"] == f"{hosts[0]}: serving, model {smollm2_path.stem}"
        assert found["interfaces"]["found"].startswith("eth0 (10.77.0.1")
        assert found["multicast"]["found"] == "1 other device of this mesh announced"
        assert found["peer"]["found"] == f"{hosts[1]}: connected"
        assert code == 0


def test_device_of_another_secret_is_counted(need_namespaces: None, tmp_path: Path) -> None:
    with bridged_hosts(2) as hosts, Mesh(tmp_path) as mesh:
        own = mesh.start(hosts[0], model=None, host=hosts[0])
        mesh.start(hosts[1], model=None, host=hosts[1], secret=MeshSecret.generate())
        _, found = doctor(own.folder, "--socket", str(own.socket), host=hosts[0])
        assert found["multicast"]["found"] == "no other devices of this mesh announced, 1 of other meshes"
        assert found["daemon"]["verdict"] == "warning"
        assert "meshllm pull" in found["daemon"]["cure"]


@pytest.mark.skipif(shutil.which("nft") is None, reason="there is no nft to make a firewall with")
def test_firewall_that_drops_multicast_is_a_problem_with_a_cure(need_namespaces: None, tmp_path: Path) -> None:
    with bridged_hosts(1) as (host,):
        rules = "table inet f { chain i { type filter hook input priority 0; udp dport 5353 drop; }; }"
        subprocess.run(run_in(host, ["nft", rules]), check=True)
        code, found = doctor(tmp_path, host=host)
        assert code == 1
        assert found["multicast"]["verdict"] == "problem"
        assert found["multicast"]["found"] == "eth0: what it sends by multicast does not come back"
        assert found["multicast"]["cure"] == "let UDP port 5353 through the firewall, or use --peer"


def test_device_without_a_network_is_told_so(need_namespaces: None, tmp_path: Path) -> None:
    with bridged_hosts(1) as (host,):
        subprocess.run(["ip", "-n", host, "link", "set", "eth0", "down"], check=True)
        _, found = doctor(tmp_path, host=host)
        assert found["interfaces"]["verdict"] == "warning"
        assert "daemons of this device alone" in found["interfaces"]["found"]


def test_what_is_missing_before_the_first_start_comes_with_its_cure(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    code, found = doctor(folder)
    assert code == 1
    assert found["daemon"]["verdict"] == "problem"
    assert "meshllm daemon" in found["daemon"]["found"]
    assert found["state folder"]["found"].startswith(f"{folder} (made at the first start)")
    assert "meshllm key set" in found["secret"]["cure"]
    assert "meshllm pull" in found["models"]["cure"]
    assert found["links"]["verdict"] == "ok"
    assert not folder.exists()  # it changes nothing


def test_secret_that_all_may_read_is_a_problem(tmp_path: Path) -> None:
    key = tmp_path / "mesh-key"
    key.write_text(MeshSecret.generate().to_text())
    key.chmod(0o644)
    code, found = doctor(tmp_path)
    assert (code, found["secret"]["verdict"]) == (1, "problem")
    assert f"chmod 600 {key}" in found["secret"]["found"]


def test_configuration_at_fault_ends_the_examination(tmp_path: Path) -> None:
    file = tmp_path / "meshllm.toml"
    file.write_text("thread = 2\n")
    code, found = doctor(tmp_path, "--config", str(file))
    assert code == 1
    assert found["configuration"]["found"] == f'{file}:1: thread: unknown key; did you mean "threads"?'
