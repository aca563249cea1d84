"""A second opinion on our HTTP: OpenAI's own Python client, unchanged, over TCP. Skips where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Api

openai = pytest.importorskip("openai", reason="OpenAI's Python client is not installed")

ASK: list[Any] = [{"role": "user", "content": "Name one red fruit."}]


@pytest.fixture
def client(api: Api) -> Any:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{api.tcp_port}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def model(client: Any) -> str:
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id).owned_by == "meshllm"
    return str(card.id)


def test_api_03_chat_is_the_same_whole_and_streamed(client: Any, model: str) -> None:
    """Case API-03: its parser takes every line that we send."""
    asked = {"model": model, "messages": ASK, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason


def test_its_stream_helper_gathers_choices_and_logprobs(client: Any, model: str) -> None:
    asked = {
        "model": model,
        "messages": ASK,
        "max_completion_tokens": 60,
        "temperature": 0.7,
        "seed": 3,
        "n": 2,
        "stop": ",",
    }
    with client.chat.completions.stream(**asked, logprobs=True, top_logprobs=2) as stream:
        for _ in stream:
            continue
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    for ours, gathered in zip(whole.choices, final.choices, strict=True):
        assert gathered.message.content == ours.message.content
        assert [one.token for one in gathered.logprobs.content] == [one.token for one in ours.logprobs.content]
        assert all(len(one.top_logprobs) == 2 for one in ours.logprobs.content)


def test_completions_of_ids_with_logprobs_and_stop(client: Any, model: str) -> None:
    ids = [504, 6125, 314]
    asked = {"model": model, "prompt": ids, "max_tokens": 8, "temperature": 0}
    got = client.completions.create(**asked, logprobs=2, extra_body={"ignore_eos": True})
    (choice,) = got.choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.top_logprobs) == 8
    streamed = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_errors_are_of_its_classes(client: Any, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=[{"role": "robot", "content": "x"}])
    assert caught.value.param == "messages[0].role"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-17", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="word " * 400)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")


def test_leaving_its_stream_ends_the_generation(client: Any, api: Api, model: str) -> None:
    """Case CONC-03, over TCP."""
    stream = client.completions.create(
        model=model, prompt="Once", max_tokens=240, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    api.wait_idle()
