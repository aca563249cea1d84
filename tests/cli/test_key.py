"""`meshllm key`: the secret goes from one device to the next, and never where it does not belong."""

from __future__ import annotations

import stat
from pathlib import Path


def test_new_secret_is_shown_again_and_private(meshllm, tmp_path: Path) -> None:
    made = meshllm("key", "new", "--state-dir", str(tmp_path / "a"))
    shown = meshllm("key", "show", "--state-dir", str(tmp_path / "a"))
    assert (made.returncode, shown.returncode) == (0, 0), made.stderr + shown.stderr
    assert made.stdout == shown.stdout
    assert made.stdout.startswith(b"mesh1-")
    assert made.stdout.count(b"\n") == 1
    assert made.stdout.strip() not in made.stderr
    assert stat.S_IMODE((tmp_path / "a" / "mesh-key").stat().st_mode) == 0o600


def test_secret_is_carried_to_another_device_through_a_pipe(meshllm, tmp_path: Path) -> None:
    secret = meshllm("key", "new", "--state-dir", str(tmp_path / "a")).stdout
    assert meshllm("key", "set", "--state-dir", str(tmp_path / "b"), input=secret).returncode == 0
    assert meshllm("key", "show", "--state-dir", str(tmp_path / "b")).stdout == secret
    again = meshllm("key", "set", "--state-dir", str(tmp_path / "b"), secret.strip().decode())
    assert again.returncode == 0, "setting what is there already is no error"


def test_secret_is_not_replaced_unless_forced(meshllm, tmp_path: Path) -> None:
    where = ("--key-file", str(tmp_path / "key"))
    first = meshllm("key", "new", *where).stdout
    refused = meshllm("key", "new", *where)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"--force" in refused.stderr
    assert meshllm("key", "show", *where).stdout == first
    assert meshllm("key", "new", "--force", *where).stdout != first


def test_mistyped_secret_is_refused_and_not_repeated(meshllm, tmp_path: Path) -> None:
    where = ("--key-file", str(tmp_path / "key"))
    secret = meshllm("key", "new", *where).stdout.strip().decode()
    wrong = secret[:-9] + ("a" if secret[-9] != "a" else "b") + secret[-8:]
    done = meshllm("key", "set", "--force", *where, input=wrong.encode())
    assert done.returncode == 2
    assert b"mistyped" in done.stderr
    assert wrong.encode() not in done.stderr
    assert meshllm("key", "show", *where).stdout.strip().decode() == secret


def test_no_secret_says_how_to_make_one(meshllm, tmp_path: Path) -> None:
    done = meshllm("key", "show", "--key-file", str(tmp_path / "key"))
    assert (done.returncode, b"meshllm key new" in done.stderr) == (2, True)
    assert meshllm("key", "set", "--key-file", str(tmp_path / "key")).returncode == 2
