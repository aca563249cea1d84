"""What all messages are made of: their base and the ids in them. Pure."""

from __future__ import annotations

from typing import NewType

import msgspec

from meshllm.layout.layout import NodeId

RequestId = NewType("RequestId", str)  # 32 hex digits, made by the root
ModelHash = NewType("ModelHash", str)  # SHA-256 of the file, 64 hex digits


class Epoch(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A layout's number: grows only; the driver's id breaks ties between halves of a split mesh.

    life: the driver's incarnation, so that a driver that was started anew and counts from 1 again names other epochs.
    """

    counter: int
    driver: NodeId
    life: int = 0


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages."""
