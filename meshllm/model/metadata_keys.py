"""Checked numbers of a GGUF's metadata under an architecture's prefix, refused with the key that is wrong. Pure."""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np

from meshllm.model.gguf import GgufFile
from meshllm.model.gguf_values import GgufArray


class Keys:
    """Keys as they stand in the file after "llama." or another architecture's name."""

    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        self._gguf = gguf
        self._prefix = architecture

    def refuse(self, key: str, found: object, expected: str) -> NoReturn:
        """Raises ModelFileError about a value."""
        self._gguf.refuse(f"{self._prefix}.{key} is {found}, expected {expected}: get another conversion of the model")

    def has(self, key: str) -> bool:
        """Whether the file has it."""
        return f"{self._prefix}.{key}" in self._gguf.metadata

    def text(self, key: str) -> str | None:
        """A string, None where there is none."""
        return self._gguf.find_str(f"{self._prefix}.{key}")

    def integer(self, key: str, limit: int, default: int | None = None) -> int:
        """A count from 1 to limit; an array with one value a layer is accepted where all are equal."""
        full = f"{self._prefix}.{key}"
        if isinstance(self._gguf.metadata.get(full), GgufArray):
            found: int | None = self._same_in_all_layers(full)
        else:
            found = self._gguf.find_int(full)
        value = default if found is None else found
        if value is None:
            self._missing(full)
        if not 1 <= value <= limit:
            self.refuse(key, value, f"1 to {limit}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number, low < value <= high."""
        full = f"{self._prefix}.{key}"
        found = self._gguf.find_float(full)
        value = default if found is None else float(found)
        if value is None:
            self._missing(full)
        if not (math.isfinite(value) and low < value <= high):
            self.refuse(key, value, f"over {low:g}, at most {high:g}")
        return value

    def switched_number(self, key: str, high: float, off: float) -> float:
        """A number over 1 / high, at most high; `off` where there is none, or 0, which converters write for none."""
        found = self._gguf.find_float(f"{self._prefix}.{key}")
        return self.number(key, 1 / high, high) if found else off

    def is_off(self, key: str) -> bool:
        """Whether an integer is absent, or 0, which converters write for none."""
        return not self._gguf.find_int(f"{self._prefix}.{key}")

    def _missing(self, full: str) -> NoReturn:
        self._gguf.refuse(f"{full} is missing: get another conversion of the model")

    def _same_in_all_layers(self, full: str) -> int:
        numbers = self._gguf.find_numbers(full)
        if numbers is None or not numbers.size or numbers.dtype.kind not in "iu" or not np.all(numbers == numbers[0]):
            self._gguf.refuse(f"{full} differs between layers, which this version does not run: choose another model")
        return int(numbers[0])
