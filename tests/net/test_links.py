"""Links over real sockets on loopback: who gets in, what a stranger costs, how a link ends."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio

from meshllm.errors import ConfigError, LinkLostError
from meshllm.layout.layout import Device, NodeId
from meshllm.mesh.framing import FrameDecoder, encode_frame
from meshllm.mesh.messages import ControlMessage, DataHello, Epoch, Goodbye, Hello
from meshllm.net.dialer import dial, dial_data
from meshllm.net.identity import Identity, MeshSecret
from meshllm.net.link import ControlLink, TlsStream, open_tls, receive_hello
from meshllm.net.listener import Incoming, Strangers, answer_data, bind, serve

SECRET = MeshSecret(bytes(range(32)))
EPOCH = Epoch(3, NodeId("a" * 16))


def hello(name: str = "one") -> Hello:
    node = NodeId("b" * 16)
    device = Device(node=node, read_gbps=10.0, matmul_gops=50.0, usable_bytes=1 << 30)
    return Hello(1, 0, "test", node, 7, name, 4000, device, None, None, 1, "scalar")


@dataclass
class Port:
    """A listener and what came of it."""

    identity: Identity
    number: int
    incoming: list[Incoming] = field(default_factory=list)
    refused: list[tuple[str, str, int]] = field(default_factory=list)
    arrived: trio.Event = field(default_factory=trio.Event)


@asynccontextmanager
async def listening(accepted: Callable[[Incoming], Awaitable[None]] | None = None) -> AsyncIterator[Port]:
    sockets, number = bind(0, 0, 1)
    port = Port(Identity.create(SECRET, "server"), number)

    async def keep(incoming: Incoming) -> None:
        port.incoming.append(incoming)
        port.arrived.set()
        if accepted is not None:
            await accepted(incoming)

    strangers = Strangers(lambda address, reason, untold: port.refused.append((address, reason, untold)))
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, sockets, port.identity.server, strangers, keep)
        with trio.fail_after(10):
            yield port
        nursery.cancel_scope.cancel()
    for incoming in port.incoming:
        await trio.aclose_forcefully(incoming.stream)


async def connect(port: Port, identity: Identity | None = None) -> TlsStream:
    identity = identity or Identity.create(SECRET, "client")
    return await dial([("127.0.0.1", port.number)], identity.client, identity.certificate)


async def test_messages_pass_both_ways_in_order() -> None:
    got: list[ControlMessage] = []
    all_came = trio.Event()

    def receive(message: ControlMessage) -> None:
        got.append(message)
        if len(got) == 100:
            all_came.set()

    async def echo(incoming: Incoming) -> None:
        link = ControlLink(incoming.stream, incoming.decoder)
        await link.run(lambda message: link.send(message) or None)

    async with listening(echo) as port, trio.open_nursery() as nursery:
        link = ControlLink(await connect(port))
        nursery.start_soon(link.run, receive)
        assert link.send(hello())
        for i in range(100):
            assert link.send(Goodbye(str(i)))
        await all_came.wait()
        rtt_us = link.network_rtt_us
        link.close("done")
    assert rtt_us is not None if sys.platform == "linux" else rtt_us is None
    assert rtt_us is None or 0 < rtt_us < 1e6
    assert got == [Goodbye(str(i)) for i in range(100)]
    assert port.incoming[0].hello == hello()


async def test_closing_a_link_sends_what_is_queued_and_says_why() -> None:
    ended = trio.Event()
    got: list[ControlMessage] = []

    async def listen(incoming: Incoming) -> None:
        assert await ControlLink(incoming.stream, incoming.decoder).run(got.append) == "connection closed by the peer"
        ended.set()

    async with listening(listen) as port:
        link = ControlLink(await connect(port))
        link.send(hello())
        link.send(Goodbye("leaving"))
        link.close("stopping")
        assert await link.run(got.append) == "stopping"
        assert not link.send(Goodbye("too late"))
        await ended.wait()
    assert got == [Goodbye("leaving")]


async def test_another_secret_is_refused_on_both_ends() -> None:
    async with listening() as port:
        with pytest.raises(LinkLostError, match="secrets differ"):
            await connect(port, Identity.create(MeshSecret.generate(), "foreign"))
        await wait_until(lambda: bool(port.refused))
        assert port.refused[0][1] == "it refused our certificate (the secrets differ)"  # heard, not guessed
        await connect_and_greet(port)  # the listener lives on
    assert len(port.incoming) == 1


async def leave(stream: trio.SocketStream) -> None:
    await stream.receive_some()


async def say_nothing(stream: trio.SocketStream) -> None:
    async for _ in stream:
        pass


async def speak_http(stream: trio.SocketStream) -> None:
    await stream.receive_some()
    await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")


async def speak_tls_1_2(stream: trio.SocketStream) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with contextlib.suppress(LinkLostError):
        await open_tls(stream, context, server_side=True)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (leave, r"it left during the handshake \(a peer does where it found a faster way\)"),
        (say_nothing, "no answer in 0.5 s"),
        (speak_http, r"it speaks something else: not TLS \(wrong version number\)"),
        (speak_tls_1_2, r"it broke off the handshake \(tlsv1 alert protocol version\)"),
    ],
)
async def test_a_dial_that_fails_says_what_happened_and_blames_no_secret(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[trio.SocketStream], Awaitable[None]], reason: str
) -> None:
    monkeypatch.setattr("meshllm.net.dialer.CONNECT_TIMEOUT_S", 0.5)
    identity = Identity.create(SECRET, "client")

    async def serve_one(stream: trio.SocketStream) -> None:
        async with stream:
            await answer(stream)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        (listener,) = await nursery.start(trio.serve_listeners, serve_one, listeners)
        number = listener.socket.getsockname()[1]
        with pytest.raises(LinkLostError, match=f"^127.0.0.1:{number}: {reason}$"):
            await dial([("127.0.0.1", number)], identity.client, identity.certificate)
        nursery.cancel_scope.cancel()


async def test_a_name_that_is_none_is_said_to_be_unknown() -> None:
    identity = Identity.create(SECRET, "client")
    with pytest.raises(LinkLostError, match=r"its name (is not known|cannot be looked up now)"):
        await dial([("no-such-name.invalid", 1)], identity.client, identity.certificate)


async def test_a_client_that_does_not_check_us_still_gets_nothing() -> None:
    foreign = Identity.create(MeshSecret.generate(), "foreign")
    foreign.client.verify_mode = ssl.CERT_NONE
    async with listening() as port:
        stream = await open_tls(
            await trio.open_tcp_stream("127.0.0.1", port.number), foreign.client, server_side=False
        )  # TLS 1.3: it sees its own handshake succeed
        with pytest.raises(LinkLostError):
            await receive_hello(stream, FrameDecoder())
        await trio.aclose_forcefully(stream)
        await wait_until(lambda: bool(port.refused))
    assert port.incoming == []


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\x16\x03\x01\xff\xff" + bytes(10), b""])
async def test_garbage_on_the_port_is_one_line_and_the_port_lives_on(garbage: bytes) -> None:
    async with listening() as port:
        for _ in range(20):
            stream = await trio.open_tcp_stream("127.0.0.1", port.number)
            async with stream:
                await stream.send_all(garbage)
        await wait_until(lambda: bool(port.refused))
        await connect_and_greet(port)
    assert len(port.refused) == 1
    assert "\n" not in port.refused[0][1]
    assert "secret" not in port.refused[0][1]


async def test_garbage_inside_tls_is_refused() -> None:
    async with listening() as port:
        stream = await connect(port)
        await stream.send_all(b"\xff\xff\xff\x7f" + bytes(100))
        await wait_until(lambda: bool(port.refused))
        await trio.aclose_forcefully(stream)
        await connect_and_greet(port)
    assert "frame of 2147483647 bytes" in port.refused[0][1]


async def test_a_silent_stranger_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshllm.net.listener.OPEN_TIMEOUT_S", 0.2)
    monkeypatch.setattr("meshllm.net.listener.MAX_STRANGERS", 3)
    async with listening() as port:
        streams = [await trio.open_tcp_stream("127.0.0.1", port.number) for _ in range(5)]
        for stream in streams:
            with contextlib.suppress(trio.BrokenResourceError):  # closed or reset, never served
                assert await stream.receive_some() == b""
            await stream.aclose()
        await connect_and_greet(port)
    assert "too many" in port.refused[0][1]


async def test_a_link_that_takes_nothing_is_lost_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshllm.net.link.SEND_TIMEOUT_S", 0.3)

    async def stall(incoming: Incoming) -> None:
        await trio.sleep_forever()

    async with listening(stall) as port:
        link = ControlLink(await connect(port))
        link.send(hello())
        for _ in range(1000):
            link.send(Goodbye("x" * 60000))
        assert await link.run(lambda _: None) == "no answer in 0.3 s"


async def test_a_full_queue_says_so() -> None:
    async with listening() as port:
        link = ControlLink(await connect(port))
        assert [link.send(hello()) for _ in range(1025)].count(False) == 1
        link.close("done")
        await link.run(lambda _: None)


async def test_the_working_address_of_several_wins() -> None:
    identity = Identity.create(SECRET, "client")
    async with listening() as port:
        unused = bind(0, 0, 1)
        for sock in unused[0]:
            sock.close()
        stream = await dial(
            [("127.0.0.1", unused[1]), ("::1", unused[1]), ("127.0.0.1", port.number)],
            identity.client,
            identity.certificate,
        )
        await trio.aclose_forcefully(stream)
        with pytest.raises(LinkLostError, match="connection refused"):
            await dial([("127.0.0.1", unused[1])], identity.client, identity.certificate)


async def test_an_address_that_leads_back_to_us_is_passed_over_disc_01() -> None:
    async with listening() as port:
        with pytest.raises(LinkLostError, match="leads back to this daemon"):
            await dial([("127.0.0.1", port.number)], port.identity.client, port.identity.certificate)


async def test_a_data_link_leaves_tls_with_no_byte_lost() -> None:
    sockets: list[socket.socket] = []

    async def answer(incoming: Incoming) -> None:
        assert isinstance(incoming.hello, DataHello)
        sockets.append(await answer_data(incoming, DataHello(EPOCH, NodeId("c" * 16), bytes(32), True)))
        port.incoming.clear()

    identity = Identity.create(SECRET, "client")
    async with listening(answer) as port:
        mine = DataHello(EPOCH, NodeId("b" * 16), bytes(range(32)), False)
        sock, theirs = await dial_data([("127.0.0.1", port.number)], identity.client, identity.certificate, mine)
        assert theirs.node == "c" * 16
        await wait_until(lambda: bool(sockets))
        sock.send(b"raw bytes")
        await trio.lowlevel.wait_readable(sockets[0])
        assert sockets[0].recv(100) == b"raw bytes"
        assert not sock.getblocking()
        for one in (sock, sockets[0]):
            trio.lowlevel.notify_closing(one)
            one.close()


def test_a_port_in_use_is_one_clear_line() -> None:
    sockets, number = bind(0, 0, 1)
    with pytest.raises(
        ConfigError, match=f"^port {number} is in use by another program; choose another one with --port$"
    ):
        bind(number, 0, 1)
    others, next_free = bind(None, number, 16)  # a port that nobody asked for gives way
    assert number < next_free < number + 16
    for sock in sockets + others:
        sock.close()


def test_no_free_port_is_one_clear_line() -> None:
    sockets, number = bind(0, 0, 1)
    with pytest.raises(ConfigError, match="in use; choose one with --port"):
        bind(None, number, 1)
    for sock in sockets:
        sock.close()


async def connect_and_greet(port: Port) -> None:
    """A good peer gets through."""
    stream = await connect(port)
    await stream.send_all(encode_frame(hello()))
    await port.arrived.wait()
    await trio.aclose_forcefully(stream)


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # the condition is about another program's socket: no event tells of it
        await trio.sleep(0.005)
