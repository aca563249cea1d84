"""`meshllm chat` on a terminal and in a pipe: what ends an answer, what ends the chat, what its commands do."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Terminal:
    """`meshllm chat` on a terminal of its own."""

    def __init__(self, start: Callable[..., subprocess.Popen[bytes]], socket: str) -> None:
        self._end, theirs = pty.openpty()
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = start("chat", "--socket", socket, start_new_session=True, **streams)
        os.close(theirs)
        self.seen = b""

    def read_until(self, text: bytes, count: int = 1) -> None:
        """Until it has been shown `count` times."""
        while self.seen.count(text) < count:
            self.seen += os.read(self._end, 10_000)

    def type(self, text: bytes) -> None:
        os.write(self._end, text)

    def signal(self, number: signal.Signals) -> None:
        """Sends it once the command waits: readline loses one that comes between a key and its next wait."""
        fields = Path(f"/proc/{self.process.pid}/stat")
        while fields.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.005)
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code; what it shows is read, because it waits for that."""
        with contextlib.suppress(OSError):  # how a pty says that the other end has closed
            while part := os.read(self._end, 10_000):
                self.seen += part
        return self.process.wait(20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def chat(stand_in, start_meshllm) -> Iterator[Terminal]:
    terminal = Terminal(start_meshllm, str(stand_in.socket))
    terminal.read_until(b"> ")
    yield terminal
    terminal.close()


def test_end_of_input_ends_the_chat(chat: Terminal) -> None:
    chat.type(b"\x04")
    assert chat.wait() == 0


def test_interrupt_at_the_prompt_ends_the_chat(chat: Terminal) -> None:
    chat.type(b"half a line")
    chat.read_until(b"half a line")
    chat.signal(signal.SIGINT)
    assert chat.wait() == 0


def test_termination_at_the_prompt_is_its_exit_code(chat: Terminal) -> None:
    chat.signal(signal.SIGTERM)
    assert chat.wait() == 143


def test_interrupt_stops_the_answer_and_keeps_the_chat(chat: Terminal, stand_in) -> None:
    chat.type(b"one\n")
    chat.read_until(b"> ", 2)
    stand_in.hold_after = 1
    chat.type(b"two\n")
    assert stand_in.holding.wait(20)
    chat.read_until(b"Hel", 2)
    chat.signal(signal.SIGINT)
    chat.read_until(b"(stopped)")
    assert stand_in.client_left.wait(20)
    stand_in.hold_after = None
    chat.read_until(b"> ", 3)
    chat.type(b"three\n")
    chat.read_until(b"> ", 4)
    said = [message["content"] for message in stand_in.asked[-1][1]["messages"]]
    assert said == ["one", "Hello 🦙", "three"]
    chat.signal(signal.SIGINT)
    assert chat.wait() == 0


def test_commands_are_not_sent_and_unknown_ones_are_said_to_be(meshllm, stand_in) -> None:
    lines = ["one", "/new", "two", "/hlep me", "/etc/passwd is what?", " /new", "/help", "/quit", "three"]
    done = meshllm("chat", "--socket", str(stand_in.socket), input="\n".join(lines).encode())
    asked = [body["messages"] for _, body in stand_in.asked]
    assert [messages[-1]["content"] for messages in asked] == ["one", "two", "/etc/passwd is what?", "/new"]
    assert [len(messages) for messages in asked] == [1, 1, 3, 5]
    said = done.stderr.decode().splitlines()
    assert [line for line in said if "/hlep" in line] == [
        "no command /hlep; there are /new, /help, /quit (a space before it makes it text)"
    ]
    assert any(line.startswith("/new starts over") for line in said)
    assert done.returncode == 0
