"""When a plan is worth leaving a layout that works."""

from __future__ import annotations

import msgspec
import pytest

from meshllm.layout.layout import Device, Layout, NodeId
from meshllm.layout.planner import plan
from meshllm.mesh.epoch import EpochBook
from meshllm.mesh.facts import ModelFacts, NodeConfig
from meshllm.mesh.membership import Membership
from meshllm.mesh.messages import ModelHash
from meshllm.mesh.outbox import Outbox
from meshllm.mesh.planning import Planning
from meshllm.mesh.situation import Situation
from tests.shapes import LLAMA_1B

MODEL = ModelFacts(hash=ModelHash("ab" * 32), name="one", shape=LLAMA_1B)
ONE, TWO = NodeId("1" * 16), NodeId("2" * 16)


def device(node: NodeId, read_gbps: float) -> Device:
    return Device(node=node, read_gbps=read_gbps, matmul_gops=100.0, usable_bytes=4 << 30)


def planning_of_one() -> Planning:
    config = NodeConfig(
        node=ONE, incarnation=1, name="one", port=4000, build="t", threads=1, isa="x", layout_mode="all"
    )
    return Planning(config, Membership(), EpochBook(ONE, Outbox()), Outbox())


def test_a_device_that_is_excluded_from_its_own_plan_says_why() -> None:
    planning = planning_of_one()
    planning.model, planning.device = MODEL, device(ONE, 10.0)
    assert planning.plan(1.0) is not None
    planning.exclude(ONE, "its memory is full", 2.0)
    assert planning.plan(3.0) is None
    assert planning.problem == "no device can take part: its memory is full"


def layout(devices: list[Device]) -> Layout:
    found = plan(devices, [], LLAMA_1B, mode="all", context=4096, slots=1, exchange="f16", driver=ONE)
    assert isinstance(found, Layout)
    return found


@pytest.mark.parametrize(("read_gbps", "moves"), [(10.0, False), (9.7, False), (10.3, False), (4.0, True)])
def test_a_device_seen_slower_or_faster_at_work_moves_the_mesh_only_for_a_gain(read_gbps: float, moves: bool) -> None:
    planning = planning_of_one()
    now = [device(ONE, 10.0), device(TWO, read_gbps)]
    old, new = layout([device(ONE, 10.0), device(TWO, 10.0)]), layout(now)
    situation = Situation(MODEL, tuple((1, one) for one in now), ())
    assert planning.is_worth_moving(old, new, situation) is moves
    assert planning.is_worth_moving(old, msgspec.structs.replace(new, context=2048), situation)
