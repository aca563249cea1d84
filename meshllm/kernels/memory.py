"""Memory for packed weights."""

from __future__ import annotations

import contextlib
import mmap
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from meshllm.errors import KernelError

ALIGNMENT: Final = 64  # of packed weights
HUGE_PAGE: Final = 2**21

Bytes: TypeAlias = npt.NDArray[np.uint8]


def allocate_weights(size: int) -> Bytes:
    """Zeroed bytes for packed weights, at a multiple of ALIGNMENT, on huge pages where the system has them.

    The pages are taken when they are written. Freed when the last view is gone. Raises KernelError without memory.
    """
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise KernelError(f"no {size} bytes of address space for weights: give this device a smaller slice") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: small pages are right too, only slower
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + size]
