"""Answers of both completion endpoints, whole and streamed, in OpenAI's shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.api.conftest import Api


def text_of(events: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def test_whole_chat_answer_has_openais_shape(api: Api) -> None:
    got = api.chat(max_tokens=5).json
    assert (got["object"], got["model"]) == ("chat.completion", api.request("GET", "/v1/models").json["data"][0]["id"])
    assert isinstance(got["created"], int)
    (choice,) = got["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 5
    assert got["usage"]["total_tokens"] == got["usage"]["prompt_tokens"] + 5


def test_streamed_text_is_the_whole_text(api: Api) -> None:
    whole = api.chat(max_tokens=24).json["choices"][0]["message"]["content"]
    answer = api.chat(max_tokens=24, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.events
    assert text_of(events) == whole
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [e["choices"][0]["finish_reason"] for e in events].count(None) == len(events) - 1
    assert len({event["id"] for event in events}) == 1


def test_prompt_as_ids_is_the_prompt_as_text(api: Api) -> None:
    ids = api.post("/tokenize", content="The sky is").json["tokens"]
    by_text, by_ids = api.complete("The sky is").json, api.complete(ids).json
    assert by_text["choices"] == by_ids["choices"]
    assert api.complete(["The sky is"]).json["choices"] == by_ids["choices"]
    assert api.post("/detokenize", tokens=ids).json == {"content": "The sky is"}


def test_token_ids_come_back_when_asked_for(api: Api) -> None:
    got = api.complete("The sky is", return_token_ids=True, ignore_eos=True).json
    assert got["prompt_token_ids"] == api.post("/tokenize", content="The sky is").json["tokens"]
    assert len(got["choices"][0]["token_ids"]) == 8
    events = api.complete("The sky is", return_token_ids=True, ignore_eos=True, stream=True).events
    assert events[0]["prompt_token_ids"] == got["prompt_token_ids"]
    assert [i for e in events for i in e["choices"][0]["token_ids"]] == got["choices"][0]["token_ids"]


def test_api_01_usage_comes_once_and_last_in_a_stream(api: Api) -> None:
    events = api.chat(stream=True, stream_options={"include_usage": True}).events
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert all(event["usage"] is None for event in events[:-1])
    assert usage == api.chat().json["usage"]


@pytest.mark.parametrize("options", [{"include_usage": False}, None])
def test_api_01_no_usage_chunk_unasked(api: Api, options: object) -> None:
    events = api.chat(stream=True, stream_options=options).events
    assert all(event["choices"] and "usage" not in event for event in events)


def test_api_03_role_comes_first_and_nothing_but_data_lines(api: Api) -> None:
    """Case API-03: no comments, no event names; the role is there before the prompt has been read."""
    events = api.chat("word " * 100, stream=True).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_api_05_several_choices_differ_and_count_the_prompt_once(api: Api) -> None:
    got = api.chat(n=3, temperature=0.9, seed=5, max_tokens=12).json
    texts = [choice["message"]["content"] for choice in got["choices"]]
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert got["usage"]["prompt_tokens"] == api.chat().json["usage"]["prompt_tokens"]
    events = api.chat(n=3, temperature=0.9, seed=5, max_tokens=12, stream=True).events
    streamed = ["", "", ""]
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


@pytest.mark.parametrize("n", [0, 1000])
def test_api_05_impossible_number_of_choices_is_refused(api: Api, n: int) -> None:
    answer = api.chat(n=n)
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert len(api.chat(n=None).json["choices"]) == 1


def test_api_07_response_format_is_text_or_refused(api: Api) -> None:
    assert api.chat(response_format={"type": "text"}).status == 200
    for kind in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        {"type": "nope"},
    ):
        answer = api.chat(response_format=kind)
        assert (answer.status, answer.error["param"]) == (400, "response_format")


def test_logprobs_of_chat_are_sorted_and_name_the_drawn_token(api: Api) -> None:
    (choice,) = api.chat(logprobs=True, top_logprobs=3, max_tokens=4).json["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] == tops[0]
        assert entry["token"] == entry["top_logprobs"][0]["token"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"]


def test_logprobs_of_completions_have_their_older_shape(api: Api) -> None:
    (choice,) = api.complete(logprobs=2, max_tokens=3).json["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    assert logprobs["text_offset"][0] == 0
    assert all(value <= 0 for value in logprobs["token_logprobs"])


def test_stop_string_ends_the_text_before_it(api: Api) -> None:
    whole = api.complete(max_tokens=24).json["choices"][0]["text"]
    stop = whole[9:13]
    (choice,) = api.complete(max_tokens=24, stop=stop).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    events = api.complete(max_tokens=24, stop=[stop], stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


def test_stop_03_shapes_of_stop(api: Api) -> None:
    """Case STOP-03."""
    free = api.complete().json["choices"]
    for nothing in (None, [], "", [""]):
        assert api.complete(stop=nothing).json["choices"] == free
    assert api.complete(stop="STOP").json["choices"] == api.complete(stop=["STOP"]).json["choices"]
    assert api.complete(stop=["a1", "b2", "c3", "d4", "e5"]).status == 200
    for wrong in (5, [5]):
        answer = api.complete(stop=wrong)
        assert (answer.status, answer.error["param"]) == (400, "stop")


def test_samp_03_a_seed_repeats_and_its_absence_does_not(api: Api) -> None:
    asked = {"temperature": 0.8, "max_tokens": 24}
    first = api.complete(seed=7, **asked).json["choices"][0]["text"]
    assert [api.complete(seed=7, **asked).json["choices"][0]["text"] for _ in range(2)] == [first, first]
    with ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(api.complete, "Once upon a time", max_tokens=24) for _ in range(3)]
        assert pool.submit(api.complete, seed=7, **asked).result().json["choices"][0]["text"] == first
        assert all(one.result().status == 200 for one in busy)
    assert len({api.complete(**asked).json["choices"][0]["text"] for _ in range(4)}) > 1
    assert api.complete(seed=0, **asked).status == api.complete(seed=2**63, **asked).status == 200
    for wrong in (-1, 2**64):
        answer = api.complete(seed=wrong, **asked)
        assert (answer.status, answer.error["param"]) == (400, "seed")


def test_conc_01_parallel_answers_are_those_given_alone(api: Api) -> None:
    texts = ["Name one red fruit.", "Spell the word tunnel.", "What is 7 plus 5?", "Greet me in Spanish."]
    alone = [api.chat(text, max_tokens=16).json["choices"][0]["message"]["content"] for text in texts]

    def ask(i: int) -> str:
        if i % 2:
            events = api.chat(texts[i % 4], max_tokens=16, stream=True).events
            assert len({event["id"] for event in events}) == 1
            return text_of(events)
        return str(api.chat(texts[i % 4], max_tokens=16).json["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, range(12)))
    assert together == [alone[i % 4] for i in range(12)]


def test_ctx_01_prompt_longer_than_the_context_is_refused_not_cut(api: Api) -> None:
    answer = api.chat("word " * 400)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "256" in answer.error["message"]
    streamed = api.chat("word " * 400, stream=True)
    assert (streamed.status, streamed.error["code"]) == (400, "context_length_exceeded")


def test_ctx_03_last_position_of_the_context(api: Api) -> None:
    one = api.complete([1] * 255, ignore_eos=True, max_tokens=8).json
    assert one["usage"]["completion_tokens"] == 1
    assert one["choices"][0]["finish_reason"] == "length"
    for n in (256, 257):
        assert api.complete([1] * n).error["code"] == "context_length_exceeded"


def test_inj_01_a_role_marker_in_a_message_is_text(api: Api, field_cases: dict[str, Any]) -> None:
    case = field_cases["INJ-01"]
    got = api.post("/v1/chat/completions", **case["input"]["body"], max_tokens=1, return_token_ids=True).json
    assert got["prompt_token_ids"] == case["expected"]["prompt_ids"]


def test_a_dead_byte_in_a_message_still_gives_a_prompt(api: Api) -> None:
    """Case TOK-07: a message of bytes that the vocabulary lacks is an empty message."""
    assert api.chat("\x04").status == 200
