"""The schedule of exchanges: who adds to the residual stream at each of them, how many bytes a partial sum has. Pure.

All-to-all in one round: each contributor sends its partial to every other rank, and every rank adds the same partials
in rank order. Contributors are the ranks with heads (attention) or hidden units (ffn); the others only receive. Ranks
and driver find the same schedule from the layout alone. Partials travel as frames that the native communicator makes
and takes (native/partial_frame.h), beside the messages of a data link: msgpack [2, step, exchange, data].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, assert_never

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import ExchangePrecision, Layout

ExchangeKind = Literal["attention", "ffn"]
Schedule: TypeAlias = tuple[tuple[int, ...], ...]  # [i]: the ranks that add at exchange i of a step, in rank order

BLOCK_VALUES: Final = 32  # of q8_0
BLOCK_BYTES: Final = 34  # f16 scale, 32 int8
FRAME_BYTES: Final = 64  # around the data of a message, at most
CANDIDATES_BYTES: Final = 64 * 1024  # of one row, at most: 512 candidates and what stands beside them fit four times
TOKEN_BYTES: Final = 5  # of a token id on the wire, at most
ENTRY_BYTES: Final = 256  # of a StepEntry but its tokens, at most


def partial_row_bytes(precision: ExchangePrecision, width: int) -> int:
    """Bytes of one row of `width` values on the wire. Raises LocalProtocolError for q8_0 of a width without blocks."""
    match precision:
        case "q8_0":
            if width % BLOCK_VALUES:
                raise LocalProtocolError(f"q8_0 exchange of width {width}, which is no multiple of {BLOCK_VALUES}")
            return width // BLOCK_VALUES * BLOCK_BYTES
        case "f16":
            return 2 * width
        case "f32":
            return 4 * width
    assert_never(precision)


def make_schedule(layout: Layout, kinds: Sequence[ExchangeKind]) -> Schedule:
    """The schedule of a program with these exchanges, in order."""
    ranks: dict[ExchangeKind, tuple[int, ...]] = {
        "attention": tuple(rank for rank, share in enumerate(layout.shares) if share.slice.heads),
        "ffn": tuple(rank for rank, share in enumerate(layout.shares) if share.slice.ffn),
    }
    return tuple(ranks[kind] for kind in kinds)


def data_frame_limit(layout: Layout, width: int, max_tokens: int) -> int:
    """Bytes of the largest data message that a member of this layout may send, for steps of up to max_tokens rows."""
    partial = partial_row_bytes(layout.exchange, width) * max_tokens
    candidates = CANDIDATES_BYTES * layout.slots
    step = TOKEN_BYTES * max_tokens + ENTRY_BYTES * layout.slots
    return FRAME_BYTES + max(partial, candidates, step)
