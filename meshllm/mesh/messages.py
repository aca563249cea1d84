"""Every message between daemons, with its number and limits. The protocol version is here.

Control messages travel on the control link between every two peers; step messages on the data links of one epoch.
Both are msgpack arrays [tag, fields...]; decoding checks every type, `check` the limits that types cannot say. Pure.
"""

from __future__ import annotations

import msgspec

from meshllm.layout.layout import Device, Layout, NodeId
from meshllm.mesh.file_messages import FileHello as FileHello
from meshllm.mesh.file_messages import Held as Held
from meshllm.mesh.file_messages import Need as Need
from meshllm.mesh.wire import Epoch as Epoch
from meshllm.mesh.wire import Message as Message
from meshllm.mesh.wire import ModelHash as ModelHash
from meshllm.mesh.wire import RequestId as RequestId
from meshllm.model.slicing import Slice
from meshllm.parameters import SampledToken, SamplingParameters

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 2
FILLERS_SINCE = 2  # minor
PROTOCOL_VERSION = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"

N_FILLERS = 3
FILLER_BYTES = 32 * 1024  # of each: 20 Mbit/s take 13 ms for one

# --- control link -----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=1):
    """First message both ways on every control link."""

    major: int
    minor: int
    build: str
    node: NodeId
    incarnation: int  # random at each start: two devices with one node id differ in it
    name: str
    port: int  # where this node listens, on the address that the link came from
    device: Device
    model: ModelHash | None
    model_name: str | None
    threads: int
    isa: str
    whole: bool = True  # else it holds some of the file and fetches what a layout gives it
    held: tuple[Slice, ...] = ()  # what it was given before, the latest first


class DataHello(Message, frozen=True, tag=9):
    """First message both ways on a data link, inside TLS; then both switch to sealed frames on the raw socket.

    random: 32 fresh bytes; both sides' make the keys. aes: AES-GCM is fast here; ChaCha20-Poly1305 unless both say so.
    """

    epoch: Epoch
    node: NodeId
    random: bytes
    aes: bool


class Heartbeat(Message, frozen=True, tag=2):
    """Each 0.5 s. echo: the peer's last `sent`, so that the peer knows the round trip without comparing clocks."""

    sent: float
    echo: float | None
    held_s: float  # between receiving `echo` and sending this
    free_bytes: int
    epoch: Epoch | None  # committed here
    rtt_us: tuple[tuple[NodeId, float], ...]  # to the others, for the planner
    mbps: tuple[tuple[NodeId, float], ...] = ()  # 1e6 bits a second from each, as its Fillers came


class Filler(Message, frozen=True, tag=6):
    """N_FILLERS at once, a few times when a link is new: how fast they come is its throughput."""

    left: int  # so many follow
    data: bytes


class PeerAddresses(Message, frozen=True, tag=3):
    """Where other peers listen: learnt addresses."""

    addresses: tuple[tuple[NodeId, tuple[tuple[str, int], ...]], ...]


class ServedModel(Message, frozen=True, tag=4):
    """The model that the sender serves changed."""

    model: ModelHash | None
    model_name: str | None
    device: Device
    whole: bool = True
    held: tuple[Slice, ...] = ()


class Prepare(Message, frozen=True, tag=10):
    """Driver -> rank: reserve memory, map the file, pack the slice, link to the other ranks."""

    epoch: Epoch
    model: ModelHash
    layout: Layout


class Prepared(Message, frozen=True, tag=11):
    epoch: Epoch


class Refused(Message, frozen=True, tag=12):
    """seen: the largest epoch the sender knows, so that the driver can offer a larger one."""

    epoch: Epoch
    reason: str
    seen: Epoch | None


class Commit(Message, frozen=True, tag=13):
    epoch: Epoch


class Abort(Message, frozen=True, tag=14):
    """The epoch is not, or no longer, in force; ranks free what it took."""

    epoch: Epoch
    reason: str


class Submit(Message, frozen=True, tag=20):
    """Root -> driver: continue this prompt. `generated` holds what the reader already has (a replay), else ()."""

    request: RequestId
    model: ModelHash
    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    max_tokens: int  # of the whole answer, `generated` included
    end_tokens: tuple[int, ...]  # () to ignore them
    sampling: SamplingParameters


class Tokens(Message, frozen=True, tag=21):
    """Driver -> root. start: index of the first token in the whole answer: a doubled message is seen as such."""

    request: RequestId
    start: int
    tokens: tuple[SampledToken, ...]


class Finished(Message, frozen=True, tag=22):
    """Driver -> root. "stop": an end token was drawn, the last token; "length": max_tokens or context reached."""

    request: RequestId
    reason: str
    n_tokens: int


class Failed(Message, frozen=True, tag=23):
    """Driver -> root: no more will come, and why."""

    request: RequestId
    code: str
    reason: str


class Cancel(Message, frozen=True, tag=24):
    """Root -> driver: nobody reads this any more."""

    request: RequestId


class Goodbye(Message, frozen=True, tag=30):
    """The last message of a link. refused: the receiver is at fault and should know it; else a clean stop."""

    reason: str
    refused: bool = False


LinkHello = Hello | DataHello | FileHello  # what may come first on a fresh link, and says which kind it is

ControlMessage = (
    Hello
    | Heartbeat
    | Filler
    | PeerAddresses
    | ServedModel
    | Prepare
    | Prepared
    | Refused
    | Commit
    | Abort
    | Need
    | Held
    | Submit
    | Tokens
    | Finished
    | Failed
    | Cancel
    | Goodbye
)


# --- data link: one between every two members of an epoch (its ranks, and its driver) --------------------------------


class StepEntry(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one slot at consecutive positions from `position` on; the slot's cache before them stands.

    sampling: given if candidates are wanted for the last token. prompt_tokens: length of the prompt, for penalties.
    """

    slot: int
    position: int
    tokens: tuple[int, ...]
    sampling: SamplingParameters | None = None
    prompt_tokens: int = 0


class Step(Message, frozen=True, tag=1):
    """Driver -> ranks. Steps of an epoch count from 0. copies: (to, from, n) slot copies made before (prefix reuse)."""

    step: int
    entries: tuple[StepEntry, ...]
    copies: tuple[tuple[int, int, int], ...] = ()


class Candidates(Message, frozen=True, tag=3):
    """Rank -> driver, after every step, which is over here: for each entry with sampling, its encoded candidates.

    The format is engine.sampling's. A rank without vocabulary sends an empty message.
    """

    step: int
    data: tuple[bytes, ...]


class Ready(Message, frozen=True, tag=4):
    """First message both ways on a data link, the dialer's first: both ends have the keys. Not a word before it."""


class Leave(Message, frozen=True, tag=5):
    """Last message of a member. node: who is to blame, if anyone; so that all name the same device."""

    node: NodeId | None
    reason: str


DataMessage = Step | Candidates | Ready | Leave
