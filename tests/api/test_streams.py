"""Answers from chosen tokens: what is shown of them, when, and how an answer ends that goes wrong. No sockets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
import trio
from starlette.types import ASGIApp

from meshllm.api.app import make_app
from meshllm.log import configure_logging
from meshllm.model.model_file import ModelFile
from tests.api.asgi import Exchange, post
from tests.emitting_control import EmittingControl, fails_with

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = (19556, 28, 905)


@pytest.fixture(scope="module")
def model_file(smollm2_path: Path) -> Iterator[ModelFile]:
    with ModelFile.open(smollm2_path) as file:
        yield file


@pytest.fixture
def hostile_files(smollm2_path: Path, tmp_path: Path) -> Callable[[str], ModelFile]:
    """The real model with another chat template."""
    content = smollm2_path.read_bytes()
    with ModelFile.open(smollm2_path) as file:
        template = (file.gguf.find_str("tokenizer.chat_template") or "").encode()
    assert content.count(template) == 1

    def make(hostile: str) -> ModelFile:
        path = tmp_path / "hostile.gguf"
        path.unlink(missing_ok=True)
        path.write_bytes(content.replace(template, hostile.encode().ljust(len(template))))
        return ModelFile.open(path)

    return make


@pytest.fixture
def never_made(tmp_path: Path) -> Iterator[Path]:
    """A file that must not be there at the end."""
    yield tmp_path / "mark"
    assert not (tmp_path / "mark").exists()


@pytest.fixture
def control(model_file: ModelFile) -> EmittingControl:
    return EmittingControl(model_file, HELLO)


@pytest.fixture
def app(control: EmittingControl) -> ASGIApp:
    return make_app(control.generator(), structlog.get_logger())


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_stop_01_no_part_of_a_stop_string_is_sent(
    control: EmittingControl, app: ASGIApp, path: str, field_cases: dict[str, Any]
) -> None:
    case = field_cases["STOP-01"]
    control.ids, stop = tuple(case["input"]["emit_ids_smollm2"]), case["input"]["stop"]
    asked: dict[str, Any] = {"prompt": [1]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    streamed = await post(app, path, **asked, stop=stop, stream=True)
    assert "".join(streamed.deltas) == case["expected"]["content"]
    assert not any(letter in text for text in streamed.deltas for letter in "pqr")
    assert streamed.events[-2][1]["choices"][0]["finish_reason"] == case["expected"]["finish_reason"]
    assert control.steps == case["expected"]["model_steps"]
    assert len(control.left) == 1  # the generation was ended, not left to run
    (choice,) = (await post(app, path, **asked, stop=stop)).json["choices"]
    assert (choice.get("text") or choice["message"]["content"], choice["finish_reason"]) == ("mno", "stop")


@pytest.mark.parametrize("case_id", ["UTF-01", "UTF-03"])
async def test_characters_are_whole_in_every_event(
    control: EmittingControl, app: ASGIApp, field_cases: dict[str, Any], case_id: str
) -> None:
    """Cases UTF-01 and UTF-03, at the API."""
    case = field_cases[case_id]
    if case_id == "UTF-01":
        control.ids, want = case["input"]["emit_ids"]["smollm2"], case["expected"]["deltas_smollm2"]
    else:
        control.ids, want = case["input"]["emit_ids_smollm2"], [case["expected"]["content"]]
    streamed = await post(app, COMPLETIONS, prompt=[1], stream=True)
    assert (streamed.deltas if case_id == "UTF-01" else ["".join(streamed.deltas)]) == want
    assert (await post(app, COMPLETIONS, prompt=[1])).json["choices"][0]["text"] == "".join(want)


async def test_choices_of_a_seed_have_seeds_of_their_own(control: EmittingControl, app: ASGIApp) -> None:
    await post(app, COMPLETIONS, prompt=[1], n=3, seed=2**64 - 1)
    assert sorted(submit.sampling.seed for submit in control.submits) == [0, 1, 2**64 - 1]
    assert len({submit.request for submit in control.submits}) == 3


async def test_ignore_eos_leaves_no_end_token(control: EmittingControl, app: ASGIApp) -> None:
    await post(app, COMPLETIONS, prompt=[1])
    await post(app, COMPLETIONS, prompt=[1], ignore_eos=True)
    assert [bool(submit.end_tokens) for submit in control.submits] == [True, False]


# --- time -------------------------------------------------------------------------------------------------------------


async def test_api_03_a_long_prompt_is_bridged_by_valid_chunks(
    control: EmittingControl, app: ASGIApp, autojump_clock: trio.testing.MockClock
) -> None:
    control.first_after_s = 40.0
    started = trio.current_time()
    got = await post(app, COMPLETIONS, prompt=[1], stream=True)
    times = [at - started for at, _ in got.events]
    assert max(b - a for a, b in zip([0, *times], times, strict=False)) <= 15
    chunks = [event for _, event in got.events if event != "[DONE]"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert "".join(got.deltas) == "Hello, world"


async def test_api_09_slow_body_is_refused(app: ASGIApp, autojump_clock: trio.testing.MockClock) -> None:
    content = json.dumps({"prompt": "x" * 60, "max_tokens": 1}).encode()
    started = trio.current_time()
    byte_by_byte = [(1.0, content[i : i + 1]) for i in range(len(content))]
    got = await Exchange(app, COMPLETIONS, byte_by_byte).run()
    assert (got.status, got.error["code"]) == (408, "request_timeout")
    assert trio.current_time() - started < 30


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_failure_in_a_stream_is_its_last_event(control: EmittingControl, app: ASGIApp) -> None:
    control.end = fails_with("unavailable", "kitchen was lost: ask again")
    got = await post(app, COMPLETIONS, prompt=[1], stream=True)
    assert got.status == 200
    assert "".join(got.deltas) == "Hello, world"
    assert got.events[-1][1]["error"] == {
        "message": "kitchen was lost: ask again",
        "type": "server_error",
        "param": None,
        "code": "unavailable",
    }


async def test_failure_of_a_whole_answer_has_its_status(control: EmittingControl, app: ASGIApp) -> None:
    control.end = fails_with("unavailable", "kitchen was lost: ask again")
    got = await post(app, COMPLETIONS, prompt=[1])
    assert (got.status, got.error["code"]) == (503, "unavailable")
    control.end = fails_with("context_length_exceeded", "too long")
    assert (await post(app, COMPLETIONS, prompt=[1])).status == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_fault_of_ours_is_logged_without_the_prompt(
    control: EmittingControl, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    control.end = lambda _: cast(Any, "what no match expects")
    app = make_app(control.generator(), configure_logging("json", "info"))
    got = await post(app, COMPLETIONS, prompt="my secret words", stream=stream)
    error = got.events[-1][1]["error"] if stream else got.error
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    written = "".join(capsys.readouterr())
    structlog.reset_defaults()
    assert "_broken" in written
    assert "my secret words" not in written


@pytest.mark.parametrize("stream", [False, True])
async def test_conc_03_client_that_leaves_ends_its_generation(
    control: EmittingControl, app: ASGIApp, stream: bool
) -> None:
    """Also while a write to it is stuck."""
    control.endless = True
    body = json.dumps({"prompt": [1], "n": 2, "stream": stream}).encode()
    exchange = Exchange(app, COMPLETIONS, [(0, body)], leaves_when=lambda e: len(e.events) == 3)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.run)
            if not stream:
                while control.steps < 50:
                    await trio.lowlevel.checkpoint()
                exchange.gone.set()
    assert len(control.left) == 2
    steps = control.steps
    await trio.testing.wait_all_tasks_blocked()
    assert control.steps == steps


# --- what a file or a stranger brings ---------------------------------------------------------------------------------


async def test_inj_03_hostile_chat_template_is_refused_and_runs_nothing(
    hostile_files: Callable[[str], ModelFile], never_made: Path, field_cases: dict[str, Any]
) -> None:
    for value in field_cases["INJ-03"]["input"]["values"]:
        with hostile_files(value.replace("$MARK", str(never_made))) as file:
            app = make_app(EmittingControl(file, HELLO).generator(), structlog.get_logger())
            got = await post(app, CHAT, messages=[{"role": "user", "content": "Hi"}])
            assert 400 <= got.status < 600, value
            assert "chat template" in got.error["message"]
            assert (await post(app, COMPLETIONS, prompt=[1])).status == 200


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8080", None, 200),
        ("[::1]:8080", None, 200),
        ("[::1]", None, 200),
        ("localhost", None, 200),
        ("Kitchen.local:8080", None, 200),
        ("127.0.0.1:8080", "http://localhost:3000", 200),
        ("evil.example", None, 403),
        ("evil.example:8080", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("", None, 403),
        ("127.0.0.1:8080", "https://evil.example", 403),
        ("127.0.0.1:8080", "null", 403),
    ],
)
async def test_api_09_on_tcp_only_this_machine_by_name_or_address(
    control: EmittingControl, host: str, origin: str | None, status: int
) -> None:
    app = make_app(control.generator(), structlog.get_logger(), ("kitchen", "kitchen.local"))
    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin is not None else [])
    over_tcp = Exchange(app, "/health", [(0, b"")], "GET", headers, ("127.0.0.1", 8080))
    assert (await over_tcp.run()).status == status
    on_socket = Exchange(app, "/health", [(0, b"")], "GET", headers)
    assert (await on_socket.run()).status == 200
