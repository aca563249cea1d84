"""How far the numbers of a request may go: the one list, by which the API checks requests and commands their options.

A leaf without imports: `ask` must start fast.
"""

from __future__ import annotations

from typing import Final

MAX_TEMPERATURE: Final = 100.0
TOP_K_OFF: Final = -1  # and 0
MAX_TOP_K: Final = 2**31 - 1  # as wide as on the wire
MAX_SEED: Final = 2**64 - 1
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
