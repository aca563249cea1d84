"""Kernels for the engine's tests: the best of this machine, two threads."""

from __future__ import annotations

import pytest

from meshllm.kernels.binding import Kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    return Kernels("", 2)
