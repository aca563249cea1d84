"""How fast each rotary pair turns: base and scaling -> radians a position. Kernels know neither. Pure.

RoPE: Su 2021. linear: Chen 2023, "position interpolation". llama3: by the numbers of Llama 3.1's config.json. yarn:
Peng 2023, NTK-by-parts with a temperature of attention. longrope: Ding 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from meshllm.model.metadata_keys import Keys

MIN_FACTOR: Final = 1e-3  # a smaller one would make frequencies that no float holds
MAX_FACTOR: Final = 1e6
MAX_CONTEXT: Final = 2**27


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Stretching of rotary positions by a factor, of all pairs (linear) or of those that turn slowly (llama3, yarn).

    Factors of single frequencies may also come as a tensor, rope_freqs.weight, and need no entry here.
    """

    kind: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_context: int = 0  # tokens that the model was first trained for
    low: float = 1.0  # turns in original_context below which a pair is stretched wholly (yarn: beta slow)
    high: float = 4.0  # and above which not at all (yarn: beta fast)
    attention_factor: float = 1.0  # of cosines and sines


def read_rope_scaling(keys: Keys) -> RopeScaling:
    """What the file asks for. Raises ModelFileError for a kind that is not known, or one with a number missing."""
    kind = keys.text("rope.scaling.type")
    if kind is None and keys.has("rope.scale_linear"):
        return RopeScaling("linear", keys.number("rope.scale_linear", MIN_FACTOR, MAX_FACTOR))
    match kind:
        case None | "none":
            return RopeScaling()
        case "linear":
            return RopeScaling("linear", keys.number("rope.scaling.factor", MIN_FACTOR, MAX_FACTOR, default=1.0))
        case "llama3":
            low = keys.number("rope.scaling.low_freq_factor", 0.0, MAX_FACTOR)
            high = keys.number("rope.scaling.high_freq_factor", low, MAX_FACTOR)
            return RopeScaling("llama3", *_stretch(keys), low, high)
        case "yarn":
            return _read_yarn(keys)
        case "longrope":
            return read_longrope(keys)
        case _:
            return keys.refuse("rope.scaling.type", kind, "none, linear, llama3, yarn or longrope")


def read_longrope(keys: Keys) -> RopeScaling:
    """Factors of single frequencies, one set within the original context and one beyond it, are tensors of the file."""
    factor = keys.number("rope.scaling.attn_factor", 0.0, MAX_FACTOR, default=1.0)
    return RopeScaling("longrope", original_context=_original_context(keys), attention_factor=factor)


def _read_yarn(keys: Keys) -> RopeScaling:
    factor, original = _stretch(keys)
    slow = keys.number("rope.scaling.yarn_beta_slow", 0.0, MAX_FACTOR, default=1.0)
    fast = keys.number("rope.scaling.yarn_beta_fast", slow, MAX_FACTOR, default=32.0)
    temperature = keys.number("rope.scaling.attn_factor", 0.0, MAX_FACTOR, default=1.0)
    return RopeScaling("yarn", factor, original, slow, fast, temperature * (1 + 0.1 * math.log(max(factor, 1.0))))


def _stretch(keys: Keys) -> tuple[float, int]:
    return keys.number("rope.scaling.factor", MIN_FACTOR, MAX_FACTOR), _original_context(keys)


def _original_context(keys: Keys) -> int:
    return keys.integer("rope.scaling.original_context_length", MAX_CONTEXT)


def inverse_frequencies(theta: float, dim: int, scaling: RopeScaling) -> tuple[float, ...]:
    """Radians a position of each of dim / 2 pairs: theta^(-2i / dim), stretched."""
    plain = [theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    match scaling.kind:
        case "none" | "longrope":
            return tuple(plain)
        case "linear":
            return tuple(f / scaling.factor for f in plain)
        case "llama3":
            kept = [_kept_of_llama3(f, scaling) for f in plain]
        case "yarn":
            first, last = _yarn_ramp(theta, dim, scaling)
            kept = [1 - min(1.0, max(0.0, (i - first) / max(last - first, 1e-3))) for i in range(dim // 2)]
    return tuple(f * part + f / scaling.factor * (1 - part) for f, part in zip(plain, kept, strict=True))


def _kept_of_llama3(frequency: float, scaling: RopeScaling) -> float:
    """The part of a frequency that stays: by how often it turns in the original context."""
    turns = scaling.original_context * frequency / (2 * math.pi)
    return min(1.0, max(0.0, (turns - scaling.low) / (scaling.high - scaling.low)))


def _yarn_ramp(theta: float, dim: int, scaling: RopeScaling) -> tuple[int, int]:
    """The last pair that stays as it is, and the first that is stretched wholly."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = math.floor(pair_that_turns(scaling.high)), math.ceil(pair_that_turns(scaling.low))
    return max(first, 0), min(last, dim - 1)
