"""Writes the C source of the cffi module meshllm._native (API mode) from meshllm.h, the part between its two markers.

usage: build.py OUT.c
"""

import sys
from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).parent / "meshllm.h"


def declarations() -> str:
    """The part of meshllm.h that cffi reads."""
    begin, end = "/* cdef: begin */", "/* cdef: end */"
    text = HEADER.read_text(encoding="utf-8")
    return text[text.index(begin) + len(begin) : text.index(end)]


def main(out: str) -> None:
    ffi = FFI()
    ffi.cdef(declarations())
    ffi.set_source("meshllm._native", '#include "meshllm.h"')
    ffi.emit_c_code(out)


if __name__ == "__main__":
    main(sys.argv[1])
