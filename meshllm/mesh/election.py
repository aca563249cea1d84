"""Who drives, and who can take part: pure functions of what a node sees. Pure.

Views differ for a moment after a change; a rank obeys only the driver that it would elect itself, so two drivers never
share a rank for long, and numbers of epochs decide in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshllm.layout.layout import NodeId


def elect(own: NodeId, serving: Sequence[NodeId]) -> NodeId:
    """The driver: the lowest id of ourselves and the peers that serve the same model."""
    return min([own, *serving])


def fully_linked(
    first: NodeId, others: Sequence[NodeId], are_linked: Callable[[NodeId, NodeId], bool]
) -> tuple[list[NodeId], list[tuple[NodeId, NodeId]]]:
    """The devices that all have links to each other, and the rest, each with one that it has no link to.

    `first` is in and linked to all. The others are taken in order: those with fewest missing links first, then by id.
    """
    missing = {a: sum(not are_linked(a, b) for b in others if b != a) for a in others}
    chosen = [first]
    left_out: list[tuple[NodeId, NodeId]] = []
    for node in sorted(others, key=lambda n: (missing[n], n)):
        apart = next((member for member in chosen[1:] if not are_linked(node, member)), None)
        if apart is None:
            chosen.append(node)
        else:
            left_out.append((node, apart))
    return chosen, left_out
