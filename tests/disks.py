"""Small file systems, for what happens on a full disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(folder: Path, mib: int) -> Iterator[Path]:
    """The folder, made, with a file system of so many MiB; skips where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(folder)]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
