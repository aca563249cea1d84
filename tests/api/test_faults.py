"""Bad requests: one clear line in OpenAI's error shape, with the field and the right status; the daemon lives on."""

from __future__ import annotations

import itertools
import json
import os
import resource
import select
import socket
import struct
import time

import pytest

from tests.api.conftest import Api

CHAT = "/v1/chat/completions"


def body(fields: str) -> bytes:
    return ('{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, ' + fields + "}").encode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"temperature": NaN', "temperature"),
        ('"temperature": Infinity', "temperature"),
        ('"top_p": NaN', "top_p"),
        ('"temperature": 1e400', "temperature"),
        ('"temperature": -0.5', "temperature"),
        ('"temperature": "0.7"', "temperature"),
        ('"temperature": true', "temperature"),
        ('"top_p": 1.5', "top_p"),
        ('"presence_penalty": -Infinity', "presence_penalty"),
        ('"min_p": 2', "min_p"),
        ('"top_k": -5', "top_k"),
        ('"top_k": 2147483648', "top_k"),  # more than a message between devices holds
        ('"max_tokens": 0', "max_tokens"),
        ('"max_tokens": 1.5', "max_tokens"),
        ('"stream": "yes"', "stream"),
        ('"temperature": 1' + "0" * 400, "temperature"),
        ('"n": 1' + "0" * 30, "n"),
        ('"stop": ["a", 5]', "stop"),
        ('"stop": 5', "stop"),
        ('"logit_bias": {"5": 1}', "logit_bias"),
        ('"tool_choice": "required"', "tool_choice"),
        ('"top_logprobs": 2', "top_logprobs"),
    ],
)
def test_samp_05_numbers_that_cannot_be_are_refused_by_name(api: Api, fields: str, param: str) -> None:
    answer = api.request("POST", CHAT, body(fields))
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "expected an object"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"a":' * 5000, "nested too deep"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"messages": ' + b"9" * 6000 + b"}", "not valid JSON: a number has more than 4300 digits"),
        (b"{}", "messages"),
    ],
)
def test_a_body_that_is_no_request_is_refused(api: Api, text: bytes, words: str) -> None:
    answer = api.request("POST", CHAT, text)
    assert answer.status == 400
    assert words in answer.error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([], "messages"),
        ("Hi", "messages"),
    ],
)
def test_messages_are_refused_by_place(api: Api, messages: object, param: str) -> None:
    answer = api.post(CHAT, messages=messages)
    assert answer.status == 400
    assert str(answer.error["param"]).startswith(param)


def test_content_in_parts_and_null_beside_tool_calls_are_taken(api: Api) -> None:
    """Case TPL-03, as far as the daemon's own model goes: never 500, never the word None."""
    assert (
        api.post(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], max_tokens=1).status
        == 200
    )
    call = {"id": "t7", "type": "function", "function": {"name": "read_temp", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Read the sensor"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t7", "content": "21.5"},
    ]
    assert api.post(CHAT, messages=messages, max_tokens=1).status in (200, 400)


def test_unknown_model_is_not_found(api: Api) -> None:
    answer = api.chat(model="gpt-17")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert "gpt-17" in answer.error["message"]
    assert api.request("GET", "/v1/models/gpt-17").status == 404
    (card,) = api.request("GET", "/v1/models").json["data"]
    assert api.request("GET", f"/v1/models/{card['id']}").json == card
    assert api.chat(model=card["id"]).status == api.chat(model=card["sha256"]).status == 200


def test_a_long_value_is_not_sent_back_whole(api: Api) -> None:
    answers = [api.chat(model="x" * 100_000), api.post(CHAT, messages=[{"role": "r" * 100_000, "content": "x"}])]
    assert [answer.status for answer in answers] == [404, 400]
    assert max(len(answer.body) for answer in answers) < 2000


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"hello\r\n\r\n", 400, "bad_request"),
        ("GET /\xfc HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin1"), 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: x\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nLong: " + b"x" * 200_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (PREFACE, 505, "http_version_not_supported"),
    ],
    ids=["garbage", "path", "header", "long", "HTTP/2"],
)
def test_a_head_that_cannot_be_is_told_in_the_same_shape(api: Api, sent: bytes, status: int, code: str) -> None:
    head, _, content = api.raw(sent, timeout_s=5).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    error = json.loads(content)["error"]
    assert error["code"] == code
    assert error["message"]


def test_an_upgrade_to_http_2_is_not_made(api: Api) -> None:
    got = api.raw(
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    )
    assert got.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("prompt", [[], [-1], [49152], [2**40], ["a", "b"], "", 5, [1, "a"], None, [[1], [2]], [[]]])
def test_prompts_that_cannot_be_are_refused(api: Api, prompt: object) -> None:
    answer = api.complete(prompt)
    assert answer.status == 400
    assert str(answer.error["param"]).startswith("prompt")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", CHAT, 405),
        ("PUT", "/status", 405),
        ("POST", "/health", 405),
        ("OPTIONS", CHAT, 405),
    ],
)
def test_api_09_unknown_paths_and_methods_are_json_errors(api: Api, method: str, path: str, status: int) -> None:
    answer = api.request(method, path)
    assert (answer.status, bool(answer.error["message"])) == (status, True)
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_api_09_expect_100_continue_is_answered_at_once(api: Api) -> None:
    content = json.dumps(
        {"messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 1, "pad": "y" * 2000}
    ).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(api.daemon.socket))
        sock.sendall(head.encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(content)
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


def test_api_09_chunked_bodies_are_read(api: Api) -> None:
    content = body('"temperature": 0')
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (content[:10], content[10:])) + b"0\r\n\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert api.raw(head + chunks).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "framing",
    ["Content-Length: -5", "Content-Length: five", "Content-Length: 3\r\nContent-Length: 5", "Bad Header: x"],
)
def test_api_09_bad_framing_is_refused(api: Api, framing: str) -> None:
    got = api.raw(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\nabc".encode(), timeout_s=5)
    assert got == b"" or got.split(b" ")[1] == b"400"


def test_api_09_a_body_over_the_limit_is_refused_unread(api: Api) -> None:
    """Far over it, or where the client waits for leave to send."""
    for framing in (f"Content-Length: {65 << 20}", f"Expect: 100-continue\r\nContent-Length: {17 << 20}"):
        got = api.raw(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{framing}\r\n\r\n".encode())
        assert b"HTTP/1.1 413" in got


def test_api_09_a_body_over_the_limit_is_refused_after_it_was_sent(api: Api) -> None:
    """A client that sends first and reads then is told too, not cut off."""
    answer = api.request("POST", CHAT, b" " * (17 << 20))
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("header", "content", "status"),
    [
        ("Content-Encoding: gzip", b"{}", 415),
        ("Transfer-Encoding: chunked", b"2\r\n{}\r\n0\r\n\r\n", 400),
    ],
)
def test_api_09_packed_and_doubly_framed_bodies_are_refused(api: Api, header: str, content: bytes, status: int) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n{header}\r\n\r\n"
    got = api.raw(head.encode() + content)
    assert got.startswith(f"HTTP/1.1 {status}".encode()), got[:200]


def test_api_09_what_follows_a_doubly_framed_body_is_no_request(api: Api) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
    got = api.raw(head.encode() + b"2\r\n{}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert got.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in got.lower()


def test_api_09_all_bodies_together_have_a_limit(api: Api) -> None:
    """Clients that keep most of a body back do not take the memory of the device."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {16 << 20}\r\n\r\n".encode()
    clients = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    try:
        for client in clients:
            client.settimeout(20)
            client.connect(str(api.daemon.socket))
            client.sendall(head + b" " * (15 << 20))
        answered, _, _ = select.select(clients, [], [], 20)
        assert b"503" in answered[0].recv(100)
        assert len(answered) < 5
    finally:
        for client in clients:
            client.close()
    assert api.request("POST", CHAT, b" " * (15 << 20)).status == 400  # there is room again


def test_api_09_target_may_be_absolute(api: Api) -> None:
    got = api.raw(b"GET http://x/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200")


def test_api_09_head_is_answered_without_a_body(api: Api) -> None:
    assert api.raw(b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").endswith(b"\r\n\r\n")


def test_api_09_pipelined_requests_and_http_1_0(api: Api) -> None:
    two = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert api.raw(two).count(b"HTTP/1.1 200") == 2
    assert b" 200" in api.raw(b"GET /health HTTP/1.0\r\n\r\n").split(b"\r\n")[0]


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01", b"\x00" * 4096, b"GET /" + b"a" * 200_000, b"hello\r\n\r\n"]
)
def test_garbage_on_the_socket_ends_only_its_connection(api: Api, garbage: bytes) -> None:
    api.raw(garbage, timeout_s=3)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("way", ["close", "half-close", "tcp close", "tcp reset"])
def test_conc_03_a_reader_that_leaves_frees_its_slot(api: Api, way: str, stream: bool) -> None:
    content = json.dumps({"prompt": "Once", "max_tokens": 240, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with socket.socket(socket.AF_INET if way.startswith("tcp") else socket.AF_UNIX) as sock:
        sock.connect(("127.0.0.1", api.tcp_port) if way.startswith("tcp") else str(api.daemon.socket))
        sock.sendall(head + content)
        if stream:
            sock.recv(300)
        else:
            time.sleep(0.2)  # it has begun: nothing else tells
        if way == "half-close":
            sock.shutdown(socket.SHUT_WR)
            api.wait_idle()
        elif way == "tcp reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    api.wait_idle()


def test_tokenize_reports_bad_fields(api: Api) -> None:
    assert api.post("/tokenize", content=5).error["param"] == "content"
    assert api.post("/detokenize", tokens=[10**9]).error["param"] == "tokens"
    assert api.post("/tokenize", content="<|im_end|>", parse_special=False).json["tokens"] != [2]
    assert api.post("/tokenize", content="<|im_end|>").json["tokens"] == [2]


def test_clients_that_leave_within_a_body_harm_nobody(api: Api) -> None:
    whole = body('"stream": true')
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(whole)
    for length in range(0, len(whole), 2):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(api.daemon.socket))
            client.sendall(head + whole[:length])
    assert api.request("GET", "/health").status == 200


def test_a_daemon_without_descriptors_says_so_once(api: Api) -> None:
    pid = api.daemon.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.settimeout(20)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(n for n in itertools.count() if n not in taken), limits[1]))
        try:
            waiting.connect(str(api.daemon.socket))
            deadline = time.monotonic() + 20
            while "connections_not_accepted" not in api.daemon.log:
                assert time.monotonic() < deadline, "the daemon says nothing of it"
                time.sleep(0.05)
            time.sleep(6)  # whatever else the daemon does now and then has been tried meanwhile
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        waiting.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert waiting.recv(100).startswith(b"HTTP/1.1 200")
    assert api.daemon.log.count("too many open files") == api.daemon.log.count("connections_not_accepted") == 1
    assert "Traceback" not in api.daemon.log
