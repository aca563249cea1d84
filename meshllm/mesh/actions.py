"""What a Node wants done: closed set of frozen values, executed in order by the control loop's one `match`. Pure.

A peer's fault is an action (`CloseLink`), because one bad peer must not raise through the other links. `Report` is what
gets logged: the pure layer does not log. `Send`, `Admit` and `Deliver` carry token ids and are never logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, TypeAlias

from meshllm.layout.layout import Layout, NodeId
from meshllm.mesh.messages import ControlMessage, Epoch, Failed, Finished, ModelHash, RequestId, Submit, Tokens
from meshllm.model.slicing import Slice

LinkId = NewType("LinkId", int)  # given by the control loop, never used twice in a process
Address: TypeAlias = tuple[str, int]  # host (IPv6 link-local with %scope), port
Field: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Send:
    """Queue a message on a control link; order within a link is kept. A full queue is the link's loss."""

    link: LinkId
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Send what is queued (bounded time), close. No `link_lost` is expected for it, and one that comes is ignored."""

    link: LinkId
    reason: str
    at_fault: bool  # the peer broke the protocol


@dataclass(frozen=True, slots=True)
class Dial:
    """Try these side by side and keep the first that answers: `link_opened(..., dialed=key)`, or `dial_failed`.

    key: to be handed back. At most one dial of a key is under way.
    """

    key: str
    node: NodeId | None  # whom we hope to find there; only the Hello tells
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class PrepareEpoch:
    """Pack the slice, allocate the cache, get data links to `members`; then `prepared` or `prepare_refused`.

    rank None: no slice here (a driver without a slice). An epoch is prepared beside the one that runs.
    """

    epoch: Epoch
    model: ModelHash
    layout: Layout
    rank: int | None
    driver: bool
    members: tuple[NodeId, ...]  # the others, with each of whom there must be one data link
    dial: tuple[tuple[NodeId, Address], ...]  # those of them that this node dials; the rest dial us


@dataclass(frozen=True, slots=True)
class CommitEpoch:
    """The epoch is in force: on its driver, requests of later `Admit`s run in it; older epochs finish what they run."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class RetireEpoch:
    """Close its data links, free slice and cache, drop its requests without events; also while still preparing."""

    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class Gather:
    """Get what this slice needs of the model's file from peers, beside what runs, then `held`; it replaces the last."""

    model: ModelHash
    part: Slice


@dataclass(frozen=True, slots=True)
class Admit:
    """On the driver: run this request in this epoch, the newest committed. Answers come as `tokens_drawn` and so on."""

    epoch: Epoch
    submit: Submit


@dataclass(frozen=True, slots=True)
class CancelAdmitted:
    """On the driver: stop it and free its slot. No event is expected for it any more; one that comes is ignored."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Resuming:
    """To a reader: what computed the answer is lost, so other devices go on with it; its next token comes later."""

    reason: str


Delivery: TypeAlias = Tokens | Resuming | Finished | Failed


@dataclass(frozen=True, slots=True)
class Deliver:
    """To the local reader of a request submitted here. Finished and Failed are the last of a request."""

    request: RequestId
    message: Delivery


@dataclass(frozen=True, slots=True)
class Report:
    """A state change to log: an event in the past tense and its fields."""

    event: str
    fields: tuple[tuple[str, Field], ...] = ()


Action: TypeAlias = (
    Send
    | CloseLink
    | Dial
    | PrepareEpoch
    | CommitEpoch
    | RetireEpoch
    | Gather
    | Admit
    | CancelAdmitted
    | Deliver
    | Report
)
