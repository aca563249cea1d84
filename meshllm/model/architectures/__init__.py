"""The architectures that run, by the name in general.architecture: one file each. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshllm.model.architectures.gemma3 import GEMMA3
from meshllm.model.architectures.granite import GRANITE
from meshllm.model.architectures.layer import Architecture
from meshllm.model.architectures.llama import LLAMA
from meshllm.model.architectures.phi3 import PHI3
from meshllm.model.architectures.qwen2 import QWEN2
from meshllm.model.architectures.qwen3 import QWEN3
from meshllm.model.architectures.smollm3 import SMOLLM3

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
    "smollm3": SMOLLM3,
    "phi3": PHI3,
    "granite": GRANITE,
}
