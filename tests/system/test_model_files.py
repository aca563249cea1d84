"""What happens to a model file while it is served: replaced by another, cut short, written into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshllm.daemon.model_store import ModelStore
from meshllm.net.identity import MeshSecret
from meshllm.status import Status
from tests.margins import clear_tokens
from tests.system.mesh import Daemon, Mesh, serves

COUNTING = ", ".join(map(str, range(1, 26))) + ","  # each next token is sure by a nat or more


def _copy(source: Path, folder: Path) -> Path:
    folder.mkdir()
    return Path(shutil.copy(source, folder / "model.gguf"))


def _failed(status: Status) -> bool:
    return status.state == "failed"


def _sure_answer(daemon: Daemon) -> list[int]:
    sure = clear_tokens(daemon.complete(COUNTING, 24, logprobs=2))
    assert len(sure) > 3
    return sure


def _answer(daemon: Daemon, n: int) -> list[int]:
    return list(daemon.complete(COUNTING, n)["token_ids"])


def test_file_that_takes_the_path_of_a_served_one_is_not_read(mesh: Mesh, smollm2_path, tmp_path) -> None:
    paths = [_copy(smollm2_path, tmp_path / name) for name in "ab"]
    first, second = (mesh.start(f"d-{path.parent.name}", model=path) for path in paths)
    mesh.wait_ranks(2, first, second)
    want = _sure_answer(first)
    for path in paths:
        half = path.read_bytes()[: path.stat().st_size // 2]
        path.with_suffix(".new").write_bytes(half + bytes(path.stat().st_size - len(half)))  # weights of 0
        os.replace(path.with_suffix(".new"), path)
    third = mesh.start("third", model=smollm2_path)  # so that the others pack anew
    mesh.wait_ranks(3, first, second, third)
    assert _answer(first, len(want)) == _answer(second, len(want)) == want


def test_file_cut_short_while_it_is_served_ends_no_daemon(mesh: Mesh, smollm2_path, tmp_path) -> None:
    path = _copy(smollm2_path, tmp_path / "a")
    first, second = mesh.start("d-a", model=path), mesh.start("d-b", model=smollm2_path)
    mesh.wait_ranks(2, first, second)
    want = _sure_answer(second)
    whole = path.read_bytes()
    os.truncate(path, 1 << 20)
    (status,) = mesh.wait(_failed, first)
    assert "model.gguf" in (status.detail or "")
    assert "changed" in first.log
    mesh.wait(lambda status: serves(status, 1), second)
    assert _answer(second, len(want)) == want
    path.with_suffix(".new").write_bytes(whole)
    os.replace(path.with_suffix(".new"), path)  # as it should have been done
    mesh.wait_ranks(2, first, second)
    assert _answer(first, len(want)) == want


def test_answer_whose_file_was_damaged_ends_with_the_device_and_what_to_do(mesh: Mesh, smollm2_path, tmp_path) -> None:
    path = _copy(smollm2_path, tmp_path / "a")
    daemon = mesh.start("kitchen", model=path)
    mesh.wait_ranks(1, daemon)
    long = ", ".join(map(str, range(700)))  # seconds to read, so that the file is cut in the middle of it
    ask = [sys.executable, "-m", "meshllm.cli.main", "ask", "--json", long]
    environment = {**daemon.environment, "MESHLLM_SOCKET": str(daemon.socket)}
    with subprocess.Popen(ask, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as asking:
        mesh.wait(lambda status: status.requests.steps > 3, daemon)
        os.truncate(path, 1 << 20)
        _, said = asking.communicate(timeout=60)
    assert asking.returncode == 4
    assert "'kitchen' cannot go on with its model" in said
    assert "model.gguf: the file was changed" in said
    assert "renaming" in said
    assert "others" not in said


def test_answer_outlives_the_file_of_another_device(mesh: Mesh, smollm2_path, tmp_path) -> None:
    path = _copy(smollm2_path, tmp_path / "a")
    attic, kitchen = mesh.start("attic", model=path), mesh.start("kitchen", model=smollm2_path)
    mesh.wait_ranks(2, attic, kitchen)
    want = _sure_answer(kitchen)
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(_answer, kitchen, 500)
        mesh.wait(lambda status: status.requests.active > 0, kitchen)
        os.truncate(path, 1 << 20)
        answer = asking.result(60)
    assert len(answer) == 500
    assert answer[: len(want)] == want
    mesh.wait(_failed, attic)


def test_file_that_takes_the_path_of_one_that_was_written_into_is_served(mesh: Mesh, smollm2_quant, tmp_path) -> None:
    path = _copy(smollm2_quant("Q8_0"), tmp_path / "a")
    daemon = mesh.start("d-a", model=path)
    (status,) = mesh.wait_ranks(1, daemon)
    before = status.model
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1  # a weight: nothing tells that it is not meant
    path.write_bytes(damaged)
    mesh.wait(lambda status: serves(status, 1) and status.model and status.model != before, daemon)
    path.with_suffix(".new").write_bytes(smollm2_quant("Q8_0").read_bytes())
    os.replace(path.with_suffix(".new"), path)
    mesh.wait(lambda status: serves(status, 1) and status.model == before, daemon)


def test_registered_file_that_is_damaged_and_replaced_is_served_again(mesh: Mesh, smollm2_path, tmp_path) -> None:
    path = _copy(smollm2_path, tmp_path / "a")
    daemon = mesh.start("d-a", model=None)
    folder = daemon.folder / "models"
    ModelStore(daemon.folder).add(path, "mine")
    mesh.wait_ranks(1, daemon)
    (stored,) = folder.glob("*.gguf")
    os.truncate(stored, 1 << 20)
    mesh.wait(_failed, daemon)
    stored.with_suffix(".new").write_bytes(smollm2_path.read_bytes())
    os.replace(stored.with_suffix(".new"), stored)
    mesh.wait_ranks(1, daemon)


def test_file_that_is_written_into_is_served_as_what_it_is_now(mesh: Mesh, smollm2_quant, tmp_path) -> None:
    path = _copy(smollm2_quant("Q8_0"), tmp_path / "a")
    daemon = mesh.start("d-a", model=path)
    (status,) = mesh.wait_ranks(1, daemon)
    before = status.model
    shutil.copyfile(smollm2_quant("Q4_0"), path)
    mesh.wait(lambda status: serves(status, 1) and status.model and status.model != before, daemon)
    other = mesh.start("d-b", model=smollm2_quant("Q4_0"), secret=MeshSecret.generate())
    mesh.wait_ranks(1, other)
    assert _answer(daemon, 12) == _answer(other, 12)
