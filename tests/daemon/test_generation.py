"""What a request is checked for, what is submitted of it, and what its end says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshllm.daemon.generation import Finish, GenerationRequest, Generator, Piece
from meshllm.errors import ContextLengthError, InvalidRequestError, UnavailableError
from meshllm.model.model_file import ModelFile
from meshllm.model.tokenizer import Tokenizer
from meshllm.parameters import SamplingParameters
from meshllm.status import LayoutStatus, PeerStatus
from tests.emitting_control import STATUS, EmittingControl, fails_with

HELLO = (19556, 28, 905)
LAYOUT = LayoutStatus(
    epoch=1, driver="a", ranks=("b", "a"), exchange="q8_0", context=64, slots=1, predicted_decode_tok_s=1.0
)


@pytest.fixture(scope="module")
def model_file(smollm2_path: Path) -> Iterator[ModelFile]:
    with ModelFile.open(smollm2_path) as file:
        yield file


@pytest.fixture
def control(model_file: ModelFile) -> EmittingControl:
    return EmittingControl(model_file, HELLO)


def request(*prompt: int, **fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt=prompt or (1,), sampling=SamplingParameters(), **fields)


async def answer(generator: Generator, asked: GenerationRequest) -> list[Piece | Finish]:
    async with generator.open(generator.check(asked, "prompt")) as pieces:
        return [piece async for piece in pieces]


async def test_ctx_03_an_answer_gets_what_the_prompt_leaves(control: EmittingControl) -> None:
    generator = control.generator(context=16)
    assert generator.check(request(*[1] * 15), "prompt").submit.max_tokens == 1
    assert generator.check(request(*[1] * 10, max_tokens=100), "prompt").submit.max_tokens == 6
    assert generator.check(request(*[1] * 10, max_tokens=2), "prompt").submit.max_tokens == 2
    for n in (16, 17, 1000):
        with pytest.raises(ContextLengthError, match=f"{n} tokens, the context holds 16") as caught:
            generator.check(request(*[1] * n), "messages")
        assert caught.value.param == "messages"


async def test_a_text_that_no_context_holds_is_refused_before_it_is_encoded(
    control: EmittingControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("encode", "encode_disarmed"):
        monkeypatch.setattr(Tokenizer, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    text, generator = "word " * 3_000_000, control.generator(context=4096)
    with pytest.raises(ContextLengthError, match=r"15000000 characters, so \d+ tokens or more") as caught:
        await generator.encode_prompt(text)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthError, match=r"\d+ tokens or more, the context holds 4096") as caught:
        await generator.encode_chat([{"role": "user", "content": text}], None, {})
    assert caught.value.param == "messages"


async def test_context_is_the_least_of_configuration_model_and_layout(control: EmittingControl) -> None:
    assert control.generator(16).context_length() == 16
    assert control.generator(1 << 20).context_length() == control.model().file.hyperparameters.context_length
    control.status = lambda: msgspec.structs.replace(STATUS, layout=LAYOUT)  # type: ignore[method-assign]
    assert control.generator(1 << 20).context_length() == 64


async def test_prompts_that_no_model_reads_are_refused(control: EmittingControl) -> None:
    generator = control.generator()
    for prompt in ((-1,), (49152,), (1, 2**70)):
        with pytest.raises(InvalidRequestError, match="not in the vocabulary"):
            generator.check(request(*prompt), "prompt")
    with pytest.raises(InvalidRequestError, match="no token"):
        generator.check(GenerationRequest(prompt=(), sampling=SamplingParameters()), "prompt")


async def test_samp_03_seed_is_kept_and_its_absence_draws_one(control: EmittingControl) -> None:
    generator = control.generator()
    assert generator.check(request(seed=0), "prompt").submit.sampling.seed == 0
    assert len({generator.check(request(), "prompt").submit.sampling.seed for _ in range(8)}) == 8


async def test_end_names_the_devices_in_rank_order(control: EmittingControl) -> None:
    peers = tuple(PeerStatus(id=i, name=name, address=None, state="self") for i, name in (("a", "attic"), ("b", "bed")))
    control.status = lambda: msgspec.structs.replace(STATUS, layout=LAYOUT, peers=peers)  # type: ignore[method-assign]
    *_, finish = await answer(control.generator(), request())
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.completion_tokens, finish.ranks) == ("length", 3, ("bed", "attic"))
    assert finish.decode_tok_s is None or finish.decode_tok_s > 0


async def test_answer_that_stops_early_leaves_its_request(control: EmittingControl) -> None:
    pieces = await answer(control.generator(), request(stop=("lo",)))
    assert "".join(piece.text for piece in pieces if isinstance(piece, Piece)) == "Hel"
    assert pieces[-1].reason == "stop"  # type: ignore[union-attr]
    assert len(control.left) == 1


async def test_half_a_stop_string_at_the_end_is_shown(control: EmittingControl) -> None:
    pieces = await answer(control.generator(), request(stop=("world!",)))
    assert "".join(piece.text for piece in pieces if isinstance(piece, Piece)) == "Hello, world"
    assert pieces[-1].reason == "length"  # type: ignore[union-attr]


async def test_failures_keep_their_kind(control: EmittingControl) -> None:
    for code, kind in (
        ("unavailable", UnavailableError),
        ("context_length_exceeded", ContextLengthError),
        ("never heard of", UnavailableError),
    ):
        control.end = fails_with(code, "why")
        with pytest.raises(kind, match="why"):
            await answer(control.generator(), request())


async def test_an_answer_names_the_devices_of_the_layout_that_it_began_on(control: EmittingControl) -> None:
    generator = control.generator()
    control.status = lambda: msgspec.structs.replace(STATUS, layout=LAYOUT)  # type: ignore[method-assign]
    async with generator.open(generator.check(request(max_tokens=3), "prompt")) as pieces:
        first = await anext(pieces)
        assert isinstance(first, Piece)
        later = msgspec.structs.replace(LAYOUT, epoch=2, ranks=("c", "b", "a"))
        control.status = lambda: msgspec.structs.replace(STATUS, layout=later)  # type: ignore[method-assign]
        (*_, finish) = [piece async for piece in pieces]
    assert isinstance(finish, Finish)
    assert finish.ranks == LAYOUT.ranks
