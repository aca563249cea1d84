"""Tables of state machines: every pair is in it or refused as a bug; nothing leaves an end; all is reachable."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import product

import pytest

from meshllm.errors import LocalProtocolError
from meshllm.layout.layout import NodeId
from meshllm.mesh import epoch, membership, offer, request
from meshllm.mesh.election import elect, fully_linked
from meshllm.mesh.messages import Epoch, ModelHash, RequestId, Submit
from meshllm.mesh.request import RootRequest
from meshllm.parameters import SamplingParameters

TABLES = {
    "peer": (membership.TRANSITIONS, membership.PeerState.NEW, None, membership.PeerEvent),
    "epoch": (epoch.TRANSITIONS, epoch.EpochState.PREPARING, epoch.EpochState.ENDED, epoch.EpochEvent),
    "offer": (offer.TRANSITIONS, offer.OfferState.OFFERED, offer.OfferState.ENDED, offer.OfferEvent),
    "request": (request.TRANSITIONS, request.RootState.WAITING, request.RootState.ENDED, request.RootEvent),
}
Table = tuple[Mapping[tuple[StrEnum, StrEnum], StrEnum], StrEnum, StrEnum | None, type[StrEnum]]


@pytest.mark.parametrize("name", TABLES)
def test_every_state_and_event_is_used(name: str) -> None:
    table, start, end, events = TABLES[name]
    reachable = {start}
    while grown := {table[s, e] for s, e in table if s in reachable} - reachable:
        reachable |= grown
    assert reachable == set(type(start)), "a state that cannot be reached"
    assert {event for _, event in table} == set(events), "an event that does nothing anywhere"
    if end is not None:
        assert not any(state is end for state, _ in table), "something leaves the end"
        alive = {state for state in type(start) if state is not end}
        assert all(any(table.get((s, e)) is end for e in events) for s in alive), "a state that cannot end"


@pytest.mark.parametrize(("state", "event"), list(product(request.RootState, request.RootEvent)))
def test_requests_follow_their_table(state: request.RootState, event: request.RootEvent) -> None:
    submit = Submit(RequestId("0" * 32), ModelHash("0" * 64), (1,), (), 1, (), SamplingParameters())
    found = RootRequest(submit, since=0.0, deadline=1.0, state=state)
    if (state, event) in request.TRANSITIONS:
        found.step(event)
        assert found.state is request.TRANSITIONS[state, event]
    else:
        with pytest.raises(LocalProtocolError):
            found.step(event)


def test_epochs_are_ordered_by_counter_then_driver() -> None:
    low, high = NodeId("0" * 16), NodeId("f" * 16)
    assert Epoch(1, high) < Epoch(2, low)
    assert Epoch(2, low) < Epoch(2, high)
    assert Epoch(2, low, 1) != Epoch(2, low, 2), "a restarted driver's numbers are new ones"


def test_lowest_id_drives() -> None:
    assert elect(NodeId("b"), [NodeId("c")]) == "b"
    assert elect(NodeId("b"), [NodeId("c"), NodeId("a")]) == "a"
    assert elect(NodeId("b"), []) == "b"


def test_devices_without_a_link_between_them_are_not_combined() -> None:
    a, b, c, d = (NodeId(x) for x in "abcd")
    apart = {(b, c), (c, b)}
    chosen, left_out = fully_linked(a, [b, c, d], lambda x, y: (x, y) not in apart)
    assert chosen == [a, d, b]
    assert left_out == [(c, b)]
