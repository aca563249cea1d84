"""The control loop's face of the mesh: what happened goes in with the time, what to do comes out as actions. Sans-IO, pure.

One Node a daemon, owned by its control loop. After every call: run `take_actions()` in order, and sleep until
`next_deadline()` at most, then `wake`. Time is any monotonic clock in seconds. Nothing here raises because of a peer or the
world; LocalProtocolError means that the caller used it wrongly.
"""

from __future__ import annotations

from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.actions import Action, Address, LinkId
from meshllm.mesh.facts import AddressSource, ModelFacts, NodeConfig, NodeView
from meshllm.mesh.messages import ControlMessage, Epoch, RequestId, Submit
from meshllm.parameters import SampledToken


class Node:
    """See the head of this file."""

    def __init__(self, config: NodeConfig, device: Device, model: ModelFacts | None, now: float) -> None: ...

    # --- the world: addresses and links

    def addresses_found(
        self, source: AddressSource, node: NodeId | None, addresses: tuple[Address, ...], now: float
    ) -> None:
        """Somebody may listen there: "static" (from the configuration, kept and retried for ever) or "mdns" (node known)."""

    def addresses_gone(self, node: NodeId, now: float) -> None:
        """mDNS says that a node left: it is no longer dialled there. Its link, if any, decides whether it lives."""

    def dial_failed(self, key: str, reason: str, now: float) -> None:
        """No address of a Dial answered. It is tried again later, ever more seldom."""

    def link_opened(self, link: LinkId, address: Address, dialed: str | None, now: float) -> None:
        """A fresh control link, TLS done, either way. address: the other end's. dialed: the key of the Dial, None if accepted.

        An accepted link is reported before its first message is passed to `receive`; ours is sent at once.
        """

    def receive(self, link: LinkId, message: ControlMessage, now: float) -> None:
        """A message of a link, in order. A message of a link that was closed here is ignored."""

    def link_lost(self, link: LinkId, reason: str, now: float) -> None:
        """The link ended by the other side, by the network or by a fault in its bytes."""

    # --- this device

    def set_model(self, model: ModelFacts | None, device: Device, now: float) -> None:
        """The model served here, or what this device can do, changed."""

    def set_free_bytes(self, free_bytes: int) -> None:
        """Free memory as of now, for the next heartbeats."""

    def prepared(self, epoch: Epoch, now: float) -> None:
        """PrepareEpoch was carried out, all data links are up. Ignored if the epoch was retired meanwhile, as are the next two."""

    def prepare_refused(self, epoch: Epoch, reason: str, now: float) -> None:
        """PrepareEpoch could not be carried out (memory, file): what it took is freed."""

    def epoch_broken(self, epoch: Epoch, node: NodeId | None, reason: str, now: float) -> None:
        """A prepared or preparing epoch lost a data link or a step (to `node`, if one is to blame). RetireEpoch follows."""

    # --- requests whose root is this daemon

    def submit(self, request: Submit, now: float) -> None:
        """Starts a request of a local reader; its answer comes as Deliver actions until Finished or Failed.

        Raises LocalProtocolError if the id is in use.
        """

    def cancel(self, request: RequestId, now: float) -> None:
        """The reader left: nothing more is delivered. Unknown ids are ignored."""

    # --- the driver's data loop, of requests that were admitted

    def tokens_drawn(self, request: RequestId, start: int, tokens: tuple[SampledToken, ...], now: float) -> None:
        """Tokens from index `start` of the whole answer on."""

    def request_finished(self, request: RequestId, reason: str, n_tokens: int, now: float) -> None:
        """reason: "stop" or "length"; n_tokens: of the whole answer."""

    def request_failed(self, request: RequestId, code: str, reason: str, now: float) -> None:
        """It ended without a finish; code as of errors.py."""

    # --- time and results

    def shutdown(self, reason: str, now: float) -> None:
        """A clean stop: local answers fail, epochs are retired, peers are told, links are closed."""

    def wake(self, now: float) -> None:
        """A deadline has come (early is harmless)."""

    def next_deadline(self) -> float:
        """When `wake` is wanted; math.inf if never."""

    def take_actions(self) -> list[Action]:
        """What to do, in order; each is handed out once."""

    def view(self, now: float) -> NodeView:
        """The state for `status`."""
