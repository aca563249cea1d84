"""A model that is opened between our Hello and the peer's must still reach the peer."""

from __future__ import annotations

from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.actions import LinkId, Send
from meshllm.mesh.facts import ModelFacts, NodeConfig
from meshllm.mesh.messages import ModelHash
from meshllm.mesh.node import Node
from meshllm.model.slicing import ModelShape

SHAPE = ModelShape(
    n_layers=2,
    dim=64,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    ffn_dim=96,
    vocab_size=100,
    context_length=512,
    head_bytes=1000,
    kv_head_bytes=1000,
    ffn_unit_bytes=100,
    vocab_row_bytes=64,
    fixed_bytes=1000,
    head_align=1,
    ffn_align=1,
)
FACTS = ModelFacts(hash=ModelHash("ab" * 32), name="tiny", shape=SHAPE)


def make(letter: str) -> tuple[Node, Device]:
    node = NodeId(letter * 16)
    device = Device(node=node, read_gbps=10.0, matmul_gops=50.0, usable_bytes=1 << 30)
    config = NodeConfig(node=node, incarnation=1, name=letter, port=4000, build="test", threads=1, isa="scalar")
    return Node(config, device, None, 0.0), device


def deliver(sender: Node, receiver: Node, link: LinkId, now: float) -> int:
    messages = [action.message for action in sender.take_actions() if isinstance(action, Send) and action.link == link]
    for message in messages:
        receiver.receive(link, message, now)
    return len(messages)


def test_a_model_opened_while_links_are_greeting_reaches_the_peer() -> None:
    (one, _), (two, device) = make("1"), make("2")
    link = LinkId(1)
    one.link_opened(link, ("192.0.2.2", 4000), "x", 0.0)
    two.link_opened(link, ("192.0.2.1", 5000), None, 0.0)
    in_flight = [action.message for action in two.take_actions() if isinstance(action, Send)]  # Hello without a model
    two.set_model(FACTS, device, 0.1)
    for message in in_flight:
        one.receive(link, message, 0.1)
    while deliver(one, two, link, 0.2) + deliver(two, one, link, 0.2):
        pass
    (peer,) = one.view(0.3).peers
    assert (peer.state, peer.model) == ("connected", FACTS.hash)
