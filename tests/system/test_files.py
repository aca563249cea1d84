"""Files reach the devices: from several, resumed, verified, at a rate that leaves room, and only once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import msgspec
import pytest

from meshllm.daemon.manifests import make_manifest, write_manifest
from meshllm.daemon.model_store import ModelStore
from meshllm.mesh.manifest import CHUNK_BYTES, HASH_BYTES
from meshllm.model.model_file import ModelFile
from meshllm.status import Status
from tests.disks import tmpfs
from tests.margins import clear_tokens
from tests.system.conftest import Greedy
from tests.system.mesh import Daemon, Mesh, bridged_hosts, serves

COUNTING = ", ".join(map(str, range(1, 26))) + ","  # each next token is sure by a nat or more
ANSWER = 400  # tokens: a few seconds of answering


def check_greedy(daemon: Daemon, cases: list[Greedy]) -> None:
    for case in cases[:3]:
        assert tuple(daemon.complete(case.prompt, len(case.tokens))["token_ids"]) == case.tokens


def fetched(n_bytes: int) -> Callable[[Status], bool]:
    """Whether so much has come, and not all."""
    return lambda status: status.fetch is not None and n_bytes <= status.fetch.done_bytes < status.fetch.wanted_bytes


@contextmanager
def answering(daemon: Daemon) -> Iterator[None]:
    """One answer after the other runs, so that files come slowly; none of them may be cut short."""
    enough = Event()

    def ask_on() -> list[int]:
        lengths = []
        while not enough.is_set():
            lengths.append(len(daemon.complete(COUNTING, ANSWER)["token_ids"]))
        return lengths

    with ThreadPoolExecutor(1) as pool:
        lengths = pool.submit(ask_on)
        try:
            yield
        finally:
            enough.set()
        assert set(lengths.result()) == {ANSWER}


def received_bytes(host: str) -> int:
    """By the network interface of a namespace, since it was made."""
    words = ["ip", "netns", "exec", host, "cat", "/sys/class/net/eth0/statistics/rx_bytes"]
    return int(subprocess.run(words, check=True, capture_output=True, timeout=20).stdout)


@pytest.mark.parametrize("named", [False, True])
def test_daemon_without_a_file_becomes_root_and_rank(mesh: Mesh, smollm2_path, greedy, named) -> None:
    kitchen = mesh.start("kitchen", model=smollm2_path)
    mesh.wait_ranks(1, kitchen)
    attic = mesh.start("attic", *(["--model", smollm2_path.stem] if named else []), model=None)
    _, status = mesh.wait_ranks(2, kitchen, attic)
    assert status.model is not None
    assert status.model.name == smollm2_path.stem
    check_greedy(attic, greedy("Q4_1"))
    kept = ModelStore(attic.folder).resolve(smollm2_path.stem)
    assert hashlib.sha256(kept.path.read_bytes()).hexdigest() == kept.sha256 == status.model.sha256
    kitchen.kill()
    mesh.wait_ranks(1, attic)
    check_greedy(attic, greedy("Q4_1"))


@pytest.mark.usefixtures("need_namespaces")
def test_second_start_moves_no_weights(mesh: Mesh, smollm2_path) -> None:
    with bridged_hosts(2) as hosts:
        kitchen = mesh.start("kitchen", model=smollm2_path, host=hosts[0])
        attic = mesh.start("attic", model=None, host=hosts[1])
        mesh.wait_ranks(2, kitchen, attic)
        first = received_bytes(hosts[1])
        assert first > smollm2_path.stat().st_size
        attic.stop()
        mesh.wait_ranks(1, kitchen)
        attic.run()
        mesh.wait_ranks(2, kitchen, attic)
        assert received_bytes(hosts[1]) - first < CHUNK_BYTES
        mesh.__exit__(None, None, None)


def test_part_of_a_file_serves_and_is_kept_for_the_next_start(mesh: Mesh, smollm2_quant) -> None:
    path = smollm2_quant("F16")
    small = ("--memory", "100M", "--context", "256", "--slots", "1")
    kitchen = mesh.start("kitchen", "--context", "256", "--slots", "1", model=path)
    mesh.wait_ranks(1, kitchen)
    want = clear_tokens(kitchen.complete(COUNTING, 24, logprobs=2))
    attic = mesh.start("attic", *small, model=None)
    mesh.wait_ranks(2, kitchen, attic)
    (partial,) = (attic.folder / "models" / "partial").glob("*.gguf")
    assert 0 < partial.stat().st_blocks * 512 < path.stat().st_size - CHUNK_BYTES
    assert attic.complete(COUNTING, len(want))["token_ids"] == want
    attic.kill()
    mesh.wait_ranks(1, kitchen)
    before = partial.stat().st_mtime_ns
    attic.run()
    mesh.wait_ranks(2, kitchen, attic)
    assert attic.complete(COUNTING, len(want))["token_ids"] == want
    assert partial.stat().st_mtime_ns == before


@pytest.mark.usefixtures("need_namespaces")
def test_receiver_killed_in_the_middle_goes_on_where_it_was(mesh: Mesh, smollm2_path) -> None:
    size = smollm2_path.stat().st_size
    with bridged_hosts(2) as hosts:
        kitchen = mesh.start("kitchen", model=smollm2_path, host=hosts[0])
        mesh.wait_ranks(1, kitchen)
        with answering(kitchen):
            attic = mesh.start("attic", model=None, host=hosts[1])
            mesh.wait(fetched(30 << 20), attic)
            attic.kill()
            attic.run()
            (status,) = mesh.wait(fetched(30 << 20), attic)
            assert status.fetch is not None
        mesh.wait_ranks(2, attic, kitchen)
        assert received_bytes(hosts[1]) < 1.06 * size + 8 * CHUNK_BYTES  # headers, and what was under way
        mesh.__exit__(None, None, None)


def test_source_killed_in_the_middle_is_replaced_by_another(mesh: Mesh, smollm2_path, greedy) -> None:
    kitchen, cellar = (mesh.start(name, model=smollm2_path) for name in ("kitchen", "cellar"))
    mesh.wait_ranks(2, kitchen, cellar)
    with answering(kitchen):
        attic = mesh.start("attic", model=None)
        (status,) = mesh.wait(fetched(20 << 20), attic)
        assert status.fetch is not None
        assert sorted(status.fetch.sources) == ["cellar", "kitchen"]
        cellar.kill()
    mesh.wait(lambda status: serves(status, 2), attic)
    check_greedy(attic, greedy("Q4_1"))


def _damaged(daemon: Daemon, path: Path) -> None:
    """The disk of a daemon that has stopped changes some bytes of its file, and nothing else shows it."""
    store = ModelStore(daemon.folder)
    sha256 = store.sha256_of(path)
    with ModelFile.open(path) as file:
        manifest = make_manifest(file, sha256, path.stat().st_size)
        damaged = file.gguf.tensors["blk.20.ffn_up.weight"].offset
    write_manifest(daemon.folder / "models" / "manifests" / f"{sha256}.manifest", manifest)
    before = path.stat()
    with path.open("r+b") as raw:
        raw.seek(damaged)
        raw.write(b"\0\1\2\3")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_damaged_chunk_is_had_from_another_device_and_its_sender_is_named(
    mesh: Mesh, smollm2_path, greedy, tmp_path
) -> None:
    copy = Path(shutil.copy(smollm2_path, tmp_path / "copy.gguf"))
    cellar = mesh.start("cellar", model=copy)
    mesh.wait_ranks(1, cellar)
    cellar.stop()
    _damaged(cellar, copy)
    cellar.run()
    attic = mesh.start("attic", model=None)
    mesh.wait(lambda status: status.fetch is not None and "'cellar' sent damaged" in (status.fetch.error or ""), attic)
    kitchen = mesh.start("kitchen", model=smollm2_path)
    mesh.wait_ranks(3, kitchen, attic, cellar)
    assert "chunk_damaged" in attic.log
    cellar.stop()
    mesh.wait_ranks(2, kitchen, attic)
    check_greedy(attic, greedy("Q4_1"))


def test_device_that_vouches_for_wrong_hashes_is_found_out(mesh: Mesh, smollm2_path, greedy) -> None:
    alpha = mesh.start("alpha", model=smollm2_path)
    mesh.wait_ranks(1, alpha)
    alpha.stop()
    sha256 = ModelStore(alpha.folder).sha256_of(smollm2_path)
    with ModelFile.open(smollm2_path) as file:
        right = make_manifest(file, sha256, smollm2_path.stat().st_size)
    hashes = bytearray(right.hashes)
    hashes[HASH_BYTES * 7] ^= 1
    wrong = msgspec.structs.replace(right, hashes=bytes(hashes))
    write_manifest(alpha.folder / "models" / "manifests" / f"{sha256}.manifest", wrong)
    alpha.run()
    kitchen = mesh.start("kitchen", model=smollm2_path)
    mesh.wait_ranks(2, alpha, kitchen)
    attic = mesh.start("attic", model=None)
    mesh.wait_ranks(3, alpha, kitchen, attic)
    assert "the manifest of 'alpha' is not that of other devices" in attic.log
    check_greedy(attic, greedy("Q4_1"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    with tmpfs(tmp_path / "disk", 48) as folder:
        yield folder


def test_full_disk_is_said_and_the_transfer_goes_on_when_there_is_room(
    small_disk: Path, mesh: Mesh, smollm2_path, greedy
) -> None:
    kitchen = mesh.start("kitchen", model=smollm2_path)
    state = ("--state-dir", str(small_disk), "--key-file", str(mesh.folder / "attic" / "mesh-key"))
    attic = mesh.start("attic", *state, model=None)
    (status,) = mesh.wait(lambda status: status.fetch is not None and status.fetch.error, attic)
    assert status.fetch is not None
    assert "MiB of smol-Q4_1 are still to come, the disk has" in (status.fetch.error or "")
    check_greedy(attic, greedy("Q4_1"))  # a root needs only the head
    subprocess.run(["mount", "-o", "remount,size=256m", str(small_disk)], check=True)
    mesh.wait_ranks(2, kitchen, attic)
    check_greedy(attic, greedy("Q4_1"))
    attic.stop()  # before its disk goes


def test_pull_copies_the_whole_file_from_another_device(mesh: Mesh, smollm2_path, smollm2_quant) -> None:
    kitchen = mesh.start("kitchen", model=smollm2_path)
    attic = mesh.start("attic", model=smollm2_quant("Q4_0"))
    mesh.wait(lambda status: len(status.peers) == 2 and status.peers[1].model is not None, attic, kitchen)
    command = [sys.executable, "-m", "meshllm.cli.main"]
    place = ["--state-dir", str(attic.folder)]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words, *place], env=attic.environment, capture_output=True, text=True, check=False, timeout=60
        )

    done = run("pull", smollm2_path.stem, "--name", "mine", "--socket", str(attic.socket))
    assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
    assert "from kitchen" in done.stderr
    (row,) = (row for row in json.loads(run("models", "--json").stdout)["models"] if row["name"] == "mine")
    assert Path(row["path"]).read_bytes() == smollm2_path.read_bytes()
    again = run("pull", smollm2_path.stem, "--name", "mine", "--socket", str(attic.socket))
    assert "was here already" in again.stderr
    unknown = run("pull", "no-such-model", "--socket", str(attic.socket))
    assert unknown.returncode == 4


def test_part_of_a_model_that_the_mesh_no_longer_serves_gives_way(
    mesh: Mesh, smollm2_path, smollm2_quant, greedy
) -> None:
    kitchen = mesh.start("kitchen", model=smollm2_quant("F16"))
    attic = mesh.start("attic", "--layout", "1", model=None)
    mesh.wait(lambda status: status.model is not None, attic)  # its head, no more: it is not in the layout
    kitchen.stop()
    cellar = mesh.start("cellar", model=smollm2_path)
    mesh.wait(lambda status: status.model is not None and status.model.name == smollm2_path.stem, attic)
    mesh.wait(lambda status: status.state == "serving", attic, cellar)
    check_greedy(attic, greedy("Q4_1"))
