"""Facts of this device: kept where they should be, unknown where the system does not tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshllm.daemon.device import (
    UNKNOWN_BYTES,
    default_name,
    describe_device,
    free_bytes,
    load_node_id,
    prefers_aes,
    usable_bytes,
)
from meshllm.errors import ConfigError
from meshllm.kernels.binding import Kernels
from meshllm.layout.layout import NodeId

NODE = NodeId("a" * 16)


def test_a_state_folder_has_one_node_id_for_ever(tmp_path: Path) -> None:
    node = load_node_id(tmp_path / "state")
    assert len(node) == 16
    assert int(node, 16) >= 0
    assert load_node_id(tmp_path / "state") == node
    assert load_node_id(tmp_path / "other") != node


def test_a_damaged_node_id_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "node-id").write_bytes(b"\xff../../x\n")
    assert load_node_id(tmp_path) == (tmp_path / "node-id").read_text().strip()


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*--state-dir"):
        load_node_id(tmp_path / "file" / "state")


def test_unknown_memory_is_no_limit_and_never_zero_host_03() -> None:
    assert usable_bytes(None, None) == UNKNOWN_BYTES
    assert usable_bytes(8 << 30, None) == int((8 << 30) * 0.9)
    assert usable_bytes(None, 4 << 30) == int((4 << 30) * 0.8)
    assert free_bytes() > 0


def test_the_best_of_the_first_measurements_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([(2.0, 30.0), (10.0, 20.0), (5.0, 5.0), (5.0, 5.0), (5.0, 5.0)])
    monkeypatch.setattr("meshllm.daemon.device.measure_device", lambda _: next(measured))
    kernels = Kernels("scalar", 1)
    found = [describe_device(NODE, kernels, "1", tmp_path, 1 << 30) for _ in range(7)]  # two more than are measured
    assert [(one.read_gbps, one.matmul_gops) for one in found[:2]] == [(2.0, 30.0), (10.0, 30.0)]
    assert found[-1] == found[1]
    assert found[-1].usable_bytes == 1 << 30
    assert json.loads((tmp_path / "speed.json").read_text())["times"] == 5


def test_another_build_or_a_damaged_file_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([(2.0, 3.0), (1.0, 1.0), (4.0, 4.0)])
    monkeypatch.setattr("meshllm.daemon.device.measure_device", lambda _: next(measured))
    kernels = Kernels("scalar", 1)
    assert describe_device(NODE, kernels, "1", tmp_path, None).read_gbps == 2.0
    assert describe_device(NODE, kernels, "2", tmp_path, None).read_gbps == 1.0
    (tmp_path / "speed.json").write_bytes(b"\x00")
    assert describe_device(NODE, kernels, "2", tmp_path, None).read_gbps == 4.0


def test_a_host_name_cannot_write_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "ki\x1b[31mtchen" + "家" * 60)
    name = default_name()
    assert name.startswith("ki[31mtchen家")
    assert name.isprintable()
    assert len(name.encode()) <= 100


def test_the_cipher_is_one_of_two() -> None:
    assert prefers_aes() in (True, False)
