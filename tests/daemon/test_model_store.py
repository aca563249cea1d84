"""Model store: files by what they hold, names that point at them, and files that change behind its back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import tiny_model

from meshllm.daemon.model_store import ModelStore
from meshllm.errors import ConfigError, ModelFileError, NoModelError, UsageError


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "state")


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[..., Path]:
    """model_file("a.gguf", 1) -> a runnable file; equal numbers, equal bytes."""

    def write(name: str, number: int = 0) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tiny_model(number))
        return path

    return write


def test_registered_file_is_found_by_name_path_and_default(store: ModelStore, model_file: Callable[..., Path]) -> None:
    path = model_file("tiny.gguf")
    added, _ = store.add(path)
    assert added.name == "tiny"
    assert added.path.read_bytes() == path.read_bytes()
    assert store.resolve("tiny") == store.resolve() == added
    assert store.resolve(str(path)).sha256 == added.sha256
    assert store.list() == (added,)


def test_store_outlives_the_name_of_the_file(store: ModelStore, model_file: Callable[..., Path]) -> None:
    path = model_file("tiny.gguf")
    _, method = store.add(path)
    assert method in ("hard link", "clone")
    path.unlink()
    assert store.resolve("tiny").path.exists()


def test_file_that_cannot_be_linked_gets_a_symbolic_link(
    store: ModelStore, model_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_file_system(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_file_system)
    path = model_file("tiny.gguf")
    _, method = store.add(path)
    if method == "clone":
        pytest.skip("this file system clones")
    assert method == "symbolic link"
    path.unlink()
    with pytest.raises(NoModelError, match=r"tiny\.gguf, which tiny links to, is gone"):
        store.resolve("tiny")


def test_copy_is_a_file_of_its_own(store: ModelStore, model_file: Callable[..., Path]) -> None:
    path = model_file("tiny.gguf")
    added, method = store.add(path, copy=True)
    assert method in ("copy", "clone")
    assert not added.path.samefile(path)


@pytest.mark.parametrize("case", ["PEER-07"])
def test_identity_is_what_the_file_holds(case: str, store: ModelStore, model_file: Callable[..., Path]) -> None:
    assert case
    same = {store.sha256_of(model_file("a/model.gguf", 1)), store.sha256_of(model_file("b/other.gguf", 1))}
    assert len(same) == 1
    assert store.sha256_of(model_file("c/model.gguf", 2)) not in same


@pytest.mark.parametrize("case", ["PEER-07"])
def test_hash_is_computed_once_for_a_file(case: str, store: ModelStore, model_file: Callable[..., Path]) -> None:
    assert case
    path = model_file("a.gguf")
    reads: list[int] = []
    first = store.sha256_of(path, lambda done, total: reads.append(done))
    again = ModelStore(store.folder.parent).sha256_of(path, lambda done, total: reads.append(done))
    assert first == again
    assert len(reads) == 1
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    os.utime(path, ns=(1, 1))
    assert store.sha256_of(path) != first


def test_file_changed_after_it_was_registered_is_refused(store: ModelStore, model_file: Callable[..., Path]) -> None:
    added, _ = store.add(model_file("tiny.gguf"))
    with added.path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    os.utime(added.path, ns=(1, 1))
    with pytest.raises(ModelFileError, match="was changed after it was registered"):
        store.resolve("tiny")


def test_name_moves_to_the_new_file_and_the_old_one_goes(store: ModelStore, model_file: Callable[..., Path]) -> None:
    old, _ = store.add(model_file("a.gguf", 1), "m")
    new, _ = store.add(model_file("b.gguf", 2), "m")
    assert store.resolve("m") == new
    assert not old.path.exists()


def test_file_goes_with_its_last_name(store: ModelStore, model_file: Callable[..., Path]) -> None:
    path = model_file("a.gguf")
    added, _ = store.add(path, "one")
    store.add(path, "two")
    store.remove("one")
    assert added.path.exists()
    store.remove("two")
    assert not added.path.exists()
    assert path.exists()
    with pytest.raises(NoModelError):
        store.remove("two")


def test_default_is_the_one_last_used(store: ModelStore, model_file: Callable[..., Path]) -> None:
    store.add(model_file("a.gguf", 1))
    store.add(model_file("b.gguf", 2))
    store.mark_used("b")
    assert store.resolve().name == "b"
    store.remove("b")
    assert store.resolve().name == "a"


def test_nothing_there_says_what_to_do(store: ModelStore) -> None:
    assert store.list() == ()
    with pytest.raises(NoModelError, match="meshllm pull"):
        store.resolve()


def test_unknown_name_is_answered_with_the_nearest(store: ModelStore, model_file: Callable[..., Path]) -> None:
    store.add(model_file("smollm2.gguf"))
    with pytest.raises(NoModelError, match="did you mean smollm2"):
        store.resolve("smolm2")
    with pytest.raises(NoModelError, match="no such file"):
        store.resolve("./smollm2.gguf")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-x", "ü", "a" * 129, "a\n"])
def test_name_that_could_leave_the_folder_is_refused(
    store: ModelStore, model_file: Callable[..., Path], name: str
) -> None:
    with pytest.raises(UsageError, match="cannot name a model"):
        store.add(model_file("a.gguf"), name)


def test_file_that_cannot_be_run_is_not_registered(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_bytes(b"<!DOCTYPE html><html><body>302</body></html>")
    with pytest.raises(ModelFileError, match="HTML"):
        store.add(path)
    assert store.list() == ()


def test_damaged_index_is_named(store: ModelStore, model_file: Callable[..., Path]) -> None:
    store.add(model_file("a.gguf"))
    (store.folder / "index.json").write_text('{"models": 3}')
    with pytest.raises(ConfigError, match=r"index\.json: damaged"):
        store.list()


def test_many_writers_lose_nothing(store: ModelStore, model_file: Callable[..., Path]) -> None:
    paths = [model_file(f"m{i}.gguf", i) for i in range(8)]
    threads = [threading.Thread(target=ModelStore(store.folder.parent).add, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [model.name for model in store.list()] == [f"m{i}" for i in range(8)]
