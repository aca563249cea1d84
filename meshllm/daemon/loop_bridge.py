"""What crosses between the two loops, and nothing else does: commands go down to the data loop, events come up.

Values are frozen and no object is shared but the model's file, which both only read, and the socket of a data link,
which is handed over for good.
Each direction is a Crossing (crossing.py) of bounded length; data_loop.DataLoop has the control loop's ends.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TypeAlias

from meshllm.layout.layout import Layout, NodeId
from meshllm.mesh.batching import Outcome
from meshllm.mesh.messages import Epoch, RequestId, Submit
from meshllm.model.model_file import ModelFile
from meshllm.net.data_link import DataKeys

MAX_COMMANDS = 4096  # waiting for the data loop; a step is the longest it does not look
MAX_EVENTS = 4096  # waiting for the control loop

# --- commands: control loop -> data loop ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareEpoch:
    """Pack the slice of `rank` (None: no slice here), wait for one data link with each of `members` (the others).

    Answered by EpochPrepared or EpochRefused. Ranks are those of the layout; `epoch.driver` drives.
    """

    epoch: Epoch
    layout: Layout
    rank: int | None
    is_driver: bool
    model_file: ModelFile
    members: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class AttachDataLink:
    """A fresh data link, keys agreed. The socket becomes the data loop's, which closes it.

    May come before its PrepareEpoch; it is then kept for a while. A second link with the same node replaces the first
    while that has not proved itself, and is closed otherwise.
    """

    epoch: Epoch
    node: NodeId
    sock: socket.socket
    keys: DataKeys


@dataclass(frozen=True, slots=True)
class CommitEpoch:
    """The epoch is in force: a driver takes requests for it from now on. A rank obeys its driver anyway."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class RetireEpoch:
    """Close its links, free slice and cache, drop its requests without events; also while it is being prepared."""

    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class Admit:
    """On the driver: run this request in this epoch.

    Followed by Answered with Tokens any number of times, then with Finished or Failed.
    """

    epoch: Epoch
    submit: Submit


@dataclass(frozen=True, slots=True)
class CancelAdmitted:
    """On the driver: drop it; its slot is free before the next step. At most one event of it may still be under way."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Stop:
    """Retire everything and end the thread."""


Command: TypeAlias = PrepareEpoch | AttachDataLink | CommitEpoch | RetireEpoch | Admit | CancelAdmitted | Stop

# --- events: data loop -> control loop --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochPrepared:
    """The slice is packed and all data links are up."""

    epoch: Epoch
    slice_bytes: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class EpochRefused:
    """PrepareEpoch could not be carried out; everything it took is freed."""

    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class EpochBroken:
    """A prepared epoch can run no further step; it is already torn down here. node: who is to blame, if one is.
    lost_file: of this device, where a step could not read it as a whole.

    Its running requests end with it; they get no events of their own, since only the control loop knows names.
    """

    epoch: Epoch
    node: NodeId | None
    reason: str
    lost_file: ModelFile | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """Of a request that was admitted to this epoch; Finished and Failed are its last."""

    epoch: Epoch
    message: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What this member of an epoch spent since the last such event, on steps that decode only (no prompt tokens).

    Sent when a burst of steps ends and about once a second during one. n_steps counts all steps, prompt steps too.
    """

    epoch: Epoch
    n_steps: int
    decode_steps: int
    decode_tokens: int
    bytes_sent: int
    bytes_received: int
    exchange_us: float
    compute_us: float
    read_bytes: int  # of weights, by the steps of one row
    read_us: float  # that these steps computed


@dataclass(frozen=True, slots=True)
class DataLoopEnded:
    """The last event. error: None after Stop, else the data loop died of this, and the daemon should."""

    error: str | None


Event: TypeAlias = EpochPrepared | EpochRefused | EpochBroken | Answered | StepCosts | DataLoopEnded
