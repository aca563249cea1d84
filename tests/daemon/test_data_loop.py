"""Data loops that run a real model together over real sockets."""

from __future__ import annotations

import errno
import itertools
import os
import select
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from daemon.data_mesh import SMOLLM2_SLICES, DataMesh, make_layout, node_id, open_mesh, submit_of

from meshllm.daemon.loop_bridge import (
    Admit,
    CancelAdmitted,
    EpochBroken,
    EpochPrepared,
    EpochRefused,
    RetireEpoch,
)
from meshllm.kernels.binding import guard_map
from meshllm.layout.layout import Layout
from meshllm.mesh.framing import encode_body
from meshllm.mesh.messages import Candidates, DataMessage, Epoch, Failed, Finished, Ready, Step, StepEntry
from meshllm.mesh.request import LOST
from meshllm.model.model_file import ModelFile
from meshllm.parameters import SampledToken, SamplingParameters
from tests.margins import first_small


def follows(found: list[int], case: dict[str, Any]) -> bool:
    """Whether found is the golden continuation up to its first close call."""
    n_sure = first_small(case["margins"])
    return found[:n_sure] == case["greedy_ids"][:n_sure]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0"])
async def test_greedy_text_is_golden_on_any_number_of_ranks(
    n_ranks: int, quant: str, golden: Callable[[str], Any], smollm2_quant: Callable[[str], Path]
) -> None:
    cases = [case for case in golden("greedy_vectors")["cases"] if case["quant"] == quant][::3]
    epoch = Epoch(1, node_id(0))
    async with open_mesh(n_ranks) as mesh:
        await mesh.prepare(epoch, make_layout(SMOLLM2_SLICES[n_ranks], mesh.nodes()), smollm2_quant(quant))
        submits = [submit_of(case["prompt_ids"], request=i, max_tokens=24) for i, case in enumerate(cases)]
        answers = await mesh.ask(epoch, submits)
    wrong = [case["prompt"] for case, answer in zip(cases, answers, strict=True) if not follows(answer, case)]
    assert not wrong


UNUSED = itertools.count(1000)  # request ids


async def ask_alone(mesh: DataMesh, epoch: Epoch, prompt: list[int], n_tokens: int) -> list[int]:
    (answer,) = await mesh.ask(epoch, [submit_of(prompt, request=next(UNUSED), max_tokens=n_tokens)])
    return answer


async def test_driver_without_a_slice_drives(smollm2_path: Path, golden: Callable[[str], Any]) -> None:
    case = golden("greedy_vectors")["cases"][12]
    epoch = Epoch(1, node_id(0))
    async with open_mesh(3) as mesh:
        layout = make_layout(SMOLLM2_SLICES[2], mesh.nodes()[1:])
        await mesh.prepare(epoch, layout, smollm2_path)
        assert follows(await ask_alone(mesh, epoch, case["prompt_ids"], 12), case)


async def test_frames_larger_than_socket_buffers_do_not_deadlock(smollm2_path: Path) -> None:
    """Partials of a 230-token prompt are 265 KB, the buffers 32."""
    epoch, prompt = Epoch(1, node_id(0)), list(range(100, 330))
    async with open_mesh(3, buffer_bytes=32 * 1024) as mesh:
        await mesh.prepare(epoch, make_layout(SMOLLM2_SLICES[3], mesh.nodes()), smollm2_path)
        answer = await ask_alone(mesh, epoch, prompt, 2)
    assert len(answer) == 2


async def test_killed_link_breaks_the_epoch_and_names_the_peer(smollm2_path: Path) -> None:
    epoch = Epoch(1, node_id(0))
    async with open_mesh(2) as mesh:
        await mesh.prepare(epoch, make_layout(SMOLLM2_SLICES[2], mesh.nodes()), smollm2_path)
        driver, rank = mesh.members
        driver.loop.post(Admit(epoch, submit_of([1, 2, 3], max_tokens=200)))
        await driver.until(lambda: driver.tokens)
        mesh.sockets[0, 1].shutdown(socket.SHUT_RDWR)
        began = trio.current_time()
        for member in mesh.members:
            await member.until(lambda m=member: m.find(EpochBroken, epoch))
        assert trio.current_time() - began < 2.0
        assert {node: event.node for node, event in mesh.broken(epoch).items()} == {
            driver.node: rank.node,
            rank.node: driver.node,
        }


async def test_killed_link_is_noticed_while_nothing_runs(smollm2_path: Path) -> None:
    epoch = Epoch(1, node_id(0))
    async with open_mesh(2) as mesh:
        await mesh.prepare(epoch, make_layout(SMOLLM2_SLICES[2], mesh.nodes()), smollm2_path)
        await trio.sleep(0.3)  # both are parked
        mesh.sockets[0, 1].shutdown(socket.SHUT_RDWR)
        for member in mesh.members:
            await member.until(lambda m=member: m.find(EpochBroken, epoch), 2.0)


async def test_hung_rank_breaks_the_epoch_and_all_name_it(smollm2_path: Path) -> None:
    """The third rank proves its links and then is silent, as a stopped process is."""
    epoch, hung = Epoch(1, node_id(0)), node_id(2)
    async with open_mesh(2) as mesh:
        layout = make_layout(SMOLLM2_SLICES[3], [*mesh.nodes(), hung])
        async with mesh.puppet(epoch, hung, layout, smollm2_path):
            driver = mesh.members[0]
            driver.loop.post(Admit(epoch, submit_of([1, 2, 3])))
            began = trio.current_time()
            for member in mesh.members:
                await member.until(lambda m=member: m.find(EpochBroken, epoch))
            assert 1.5 < trio.current_time() - began < 4.0
    assert {event.node for event in mesh.broken(epoch).values()} == {hung}
    assert len(mesh.broken(epoch)) == 2


GARBAGE = {
    "random bytes": os.urandom(64),
    "a huge length": b"\xff\xff\xff\xff",
    "a length too short for a seal": b"\x01\x00\x00\x00x",
    "a frame that is not sealed": b"\x40\x00\x00\x00" + bytes(64),
    "plain text": b"GET / HTTP/1.1\r\nHost: meshllm\r\n\r\n",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_closes_the_link_and_ends_the_epoch_but_not_the_loop(garbage: bytes, smollm2_path: Path) -> None:
    epoch, again = Epoch(1, node_id(0)), Epoch(2, node_id(0))
    async with open_mesh(2) as mesh:
        layout = make_layout(SMOLLM2_SLICES[2], mesh.nodes())
        await mesh.prepare(epoch, layout, smollm2_path)
        driver, rank = mesh.members
        mesh.sockets[0, 1].send(garbage)
        for member in mesh.members:
            await member.until(lambda m=member: m.find(EpochBroken, epoch), 5.0)
        assert mesh.broken(epoch)[driver.node].node == rank.node
        await mesh.prepare(again, layout, smollm2_path)
        assert len(await ask_alone(mesh, again, [1, 2, 3], 3)) == 3


def partial(step: int, exchange: int, data: bytes) -> bytes:
    """The frame of a partial sum, as native/partial_frame.h has it."""
    return b"\x94\x02" + struct.pack(">BQBHBI", 0xCF, step, 0xCD, exchange, 0xC6, len(data)) + data


async def send_forged(
    mesh: DataMesh, epoch: Epoch, layout: Layout, model: Path, message: DataMessage | bytes
) -> EpochBroken:
    """What the others make of a message that a member seals properly but may not send."""
    forger = node_id(len(mesh.members))
    async with mesh.puppet(epoch, forger, layout, model) as links:
        for link in links:
            link.send(message if isinstance(message, bytes) else encode_body(message))
        driver = mesh.members[0]
        driver.loop.post(Admit(epoch, submit_of([1, 2, 3])))
        await driver.until(lambda: driver.find(EpochBroken, epoch))
    (event,) = mesh.broken(epoch).values()
    assert event.node == forger
    return event


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (partial(0, 0, b"short"), "of 5 bytes"),
        (partial(0, 10_000, b""), "exchange 10000"),
        (partial(7, 0, b""), "of step 7"),
        (b"\x94\x02\x00\x00\xc4\x00", "malformed"),  # a partial in msgpack's own widths
        (Candidates(3, ()), "of step 3"),
        (Step(0, (StepEntry(0, 0, (1,)),)), "is not the driver"),
        (Ready(), "Ready"),
    ],
)
async def test_member_that_breaks_the_rules_is_named(
    message: DataMessage | bytes, fault: str, smollm2_path: Path
) -> None:
    async with open_mesh(1) as mesh:
        layout = make_layout(SMOLLM2_SLICES[2], [node_id(0), node_id(1)])
        event = await send_forged(mesh, Epoch(1, node_id(0)), layout, smollm2_path, message)
    assert fault in event.reason


async def test_cancelled_request_gives_its_slot_up_at_once(smollm2_path: Path) -> None:
    epoch = Epoch(1, node_id(0))
    async with open_mesh(2) as mesh:
        layout = make_layout(SMOLLM2_SLICES[2], mesh.nodes(), slots=1, context=2048)
        await mesh.prepare(epoch, layout, smollm2_path)
        driver = mesh.members[0]
        long, short = submit_of([1, 2, 3], request=1, max_tokens=1500), submit_of([5, 6], request=2, max_tokens=2)
        driver.loop.post(Admit(epoch, long))
        driver.loop.post(Admit(epoch, short))
        await driver.until(lambda: len(driver.tokens[long.request]) >= 3)
        driver.loop.post(CancelAdmitted(long.request))
        n_drawn = len(driver.tokens[long.request])
        await driver.until(lambda: short.request in driver.ends, 5.0)
        assert len(driver.tokens[long.request]) <= n_drawn + 2
        assert long.request not in driver.ends


async def test_request_cancelled_while_its_prompt_is_computed_gives_way(smollm2_path: Path) -> None:
    """The prompt takes many chunks; the next request does not wait for them."""
    epoch = Epoch(1, node_id(0))
    async with open_mesh(1) as mesh:
        layout = make_layout(SMOLLM2_SLICES[1], mesh.nodes(), slots=1, context=8192)
        await mesh.prepare(epoch, layout, smollm2_path)
        driver = mesh.members[0]
        long = submit_of([i % 4000 + 10 for i in range(8000)], request=1)
        driver.loop.post(Admit(epoch, long))
        await trio.sleep(0.3)
        driver.loop.post(CancelAdmitted(long.request))
        began = trio.current_time()
        await ask_alone(mesh, epoch, [5, 6], 1)
        assert trio.current_time() - began < 4.0  # one chunk of at most 256 tokens, on a machine that is busy
        assert not driver.tokens[long.request]


async def test_old_epoch_finishes_its_answer_while_the_new_one_serves(smollm2_path: Path) -> None:
    old, new = Epoch(1, node_id(0)), Epoch(2, node_id(0))
    async with open_mesh(2) as mesh:
        driver = mesh.members[0]
        prompt = [504, 3575, 282]
        await mesh.prepare(old, make_layout(SMOLLM2_SLICES[2], mesh.nodes()), smollm2_path)
        alone = await ask_alone(mesh, old, prompt, 60)
        running = submit_of(prompt, request=7, max_tokens=60)
        driver.loop.post(Admit(old, running))
        await driver.until(lambda: driver.tokens[running.request])
        await mesh.prepare(new, make_layout(SMOLLM2_SLICES[2], mesh.nodes()), smollm2_path)
        (other,) = await mesh.ask(new, [submit_of(prompt, request=8, max_tokens=20)])
        await driver.until(lambda: running.request in driver.ends)
        assert [token.token for token in driver.tokens[running.request]] == alone
        assert other == alone[:20]
        for member in mesh.members:
            member.loop.post(RetireEpoch(old, "superseded"))
        assert await ask_alone(mesh, new, prompt, 5) == alone[:5]


async def test_replay_goes_on_where_the_answer_was(smollm2_path: Path) -> None:
    """A request that brings along what its reader has, on another layout, with the same seed."""
    sampling = SamplingParameters(temperature=0.9, seed=2**64 - 3)
    prompt = [504, 3575, 282, 4649]
    async with open_mesh(2) as mesh:
        one, two = Epoch(1, node_id(0)), Epoch(2, node_id(0))
        await mesh.prepare(one, make_layout(SMOLLM2_SLICES[2], mesh.nodes(), exchange="f32"), smollm2_path)
        (whole,) = await mesh.ask(one, [submit_of(prompt, request=1, max_tokens=12, sampling=sampling)])
        swapped = make_layout(SMOLLM2_SLICES[2], mesh.nodes()[::-1], exchange="f32")
        await mesh.prepare(two, swapped, smollm2_path)
        submit = submit_of(prompt, request=2, max_tokens=12, sampling=sampling, generated=tuple(whole[:5]))
        driver = mesh.members[0]
        driver.tokens[submit.request] += [SampledToken(token) for token in whole[:5]]
        (rest,) = await mesh.ask(two, [submit])
        end = driver.ends[submit.request]
    assert rest == whole
    assert isinstance(end, Finished)
    assert end.n_tokens == 12


def _spoil(path: Path, how: str) -> None:
    if how == "cut short":
        os.truncate(path, path.stat().st_size // 2)
    else:
        with path.open("r+b") as writer:
            writer.seek(-100, os.SEEK_END)
            writer.write(bytes(100))


@pytest.mark.parametrize("how", ["cut short", "written into"])
async def test_prepare_is_refused_where_the_file_changed_since_it_was_opened(
    how: str, tmp_path: Path, smollm2_path: Path
) -> None:
    epoch = Epoch(1, node_id(0))
    path = Path(shutil.copy(smollm2_path, tmp_path / "copy.gguf"))
    async with open_mesh(1) as mesh:
        file = ModelFile.open(path)
        guard_map(file, file.data)
        _spoil(path, how)
        mesh.post_prepare(epoch, make_layout(SMOLLM2_SLICES[1], mesh.nodes()), file)
        (member,) = mesh.members
        await member.until(lambda: member.find(EpochRefused, epoch))
        refused = member.find(EpochRefused, epoch)
        assert refused is not None
        assert "copy.gguf: the file was changed" in refused.reason


def _no_descriptor() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_prepare_is_refused_without_file_descriptors_and_works_when_there_are_some(smollm2_path: Path) -> None:
    epoch, again = Epoch(1, node_id(0)), Epoch(2, node_id(0))
    layout = make_layout(SMOLLM2_SLICES[1], [node_id(0)])
    async with open_mesh(1) as mesh:
        (member,) = mesh.members
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(select, "epoll", _no_descriptor)
            mesh.post_prepare(epoch, layout, smollm2_path)
            await member.until(lambda: member.find(EpochRefused, epoch))
        refused = member.find(EpochRefused, epoch)
        assert refused is not None
        assert "Too many open files" in refused.reason
        await mesh.prepare(again, layout, smollm2_path)
        assert len(await ask_alone(mesh, again, [1, 2, 3], 2)) == 2


async def test_retired_while_it_prepares_leaves_nothing(smollm2_path: Path) -> None:
    epoch, again = Epoch(1, node_id(0)), Epoch(2, node_id(0))
    async with open_mesh(2) as mesh:
        layout = make_layout(SMOLLM2_SLICES[2], mesh.nodes())
        mesh.post_prepare(epoch, layout, smollm2_path)  # and no links
        for member in mesh.members:
            member.loop.post(RetireEpoch(epoch, "changed my mind"))
        await mesh.prepare(again, layout, smollm2_path)
        assert len(await ask_alone(mesh, again, [1, 2, 3], 2)) == 2
    assert not any(member.find(EpochPrepared, epoch) for member in mesh.members)


async def test_links_may_come_before_the_epoch(smollm2_path: Path) -> None:
    epoch = Epoch(1, node_id(0))
    async with open_mesh(3) as mesh:
        mesh.wire(epoch)
        await trio.sleep(0.1)
        mesh.post_prepare(epoch, make_layout(SMOLLM2_SLICES[3], mesh.nodes()), smollm2_path)
        for member in mesh.members:
            await member.until(lambda m=member: m.find(EpochPrepared, epoch))
        assert len(await ask_alone(mesh, epoch, [1, 2, 3], 2)) == 2


async def test_request_for_a_layout_that_is_gone_goes_back_to_its_root(smollm2_path: Path) -> None:
    async with open_mesh(1) as mesh:
        submit = submit_of([1, 2, 3])
        await mesh.ask(Epoch(9, node_id(0)), [submit])
        end = mesh.members[0].ends[submit.request]
    assert isinstance(end, Failed)
    assert end.code == LOST


async def test_idle_is_idle(smollm2_path: Path) -> None:
    """Three members that have just answered and wait use less than 0.5 % of a core each."""
    epoch = Epoch(1, node_id(0))
    async with open_mesh(3) as mesh:
        await mesh.prepare(epoch, make_layout(SMOLLM2_SLICES[3], mesh.nodes()), smollm2_path)
        await ask_alone(mesh, epoch, [1, 2, 3], 3)
        await trio.sleep(0.5)
        began_s = time.process_time()
        await trio.sleep(3.0)
        used_s = time.process_time() - began_s
    assert used_s < 3 * 3.0 * 0.005


async def test_costs_are_told_for_each_decoded_token(smollm2_path: Path) -> None:
    epoch = Epoch(1, node_id(0))
    async with open_mesh(2) as mesh:
        await mesh.prepare(epoch, make_layout(SMOLLM2_SLICES[2], mesh.nodes()), smollm2_path)
        await ask_alone(mesh, epoch, [1, 2, 3], 21)
        for member in mesh.members:
            await member.until(lambda m=member: sum(c.n_steps for c in m.costs) == 21)
            assert sum(c.decode_tokens for c in member.costs) == 20
            partials = 2 * 30 * 576 * 2  # two a layer, f16
            sent = sum(c.bytes_sent for c in member.costs) / 20
            assert partials < sent < 1.1 * partials
            assert sum(c.exchange_us for c in member.costs) > 0
