"""A client that calls the application itself, without sockets: for what needs a virtual clock or chosen tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio
from starlette.types import ASGIApp, Message


@dataclass
class Exchange:
    """One request: its body in chunks, each after a pause, then what came back, and when."""

    app: ASGIApp
    path: str
    chunks: Sequence[tuple[float, bytes]] = ()
    method: str = "POST"
    headers: Sequence[tuple[bytes, bytes]] = ()
    server: tuple[str, int | None] = ("socket", None)
    leaves_when: Callable[[Exchange], bool] = lambda _: False  # asked at each event; then the client is gone
    status: int = 0
    body: bytes = b""
    events: list[tuple[float, Any]] = field(default_factory=list)  # when, and the event's JSON or its text
    gone: trio.Event = field(default_factory=trio.Event)

    async def run(self) -> Exchange:
        """Until the application has answered or noticed that the client left."""
        scope = {
            "type": "http", "http_version": "1.1", "method": self.method, "path": self.path, "query_string": b"",
            "raw_path": self.path.encode(), "headers": list(self.headers), "server": self.server, "scheme": "http",
            "client": None, "root_path": "",
        }  # fmt: skip
        pending = list(self.chunks)

        async def receive() -> Message:
            if pending:
                pause_s, chunk = pending.pop(0)
                await trio.sleep(pause_s)
                return {"type": "http.request", "body": chunk, "more_body": bool(pending)}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        await self.app(scope, receive, self._sent)
        return self

    async def _sent(self, message: Message) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        part = message.get("body", b"")
        self.body += part
        if part.startswith(b"data: "):
            assert part.endswith(b"\n\n")
            assert part.count(b"\n") == 2
            text = part[6:-2].decode()
            self.events.append((trio.current_time(), text if text == "[DONE]" else json.loads(text)))
        if self.leaves_when(self):
            self.gone.set()
            await trio.sleep_forever()  # a full socket: the write does not return by itself

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def deltas(self) -> list[str]:
        """Texts of the events of choice 0, empty ones left out."""
        return [text for _, event in self.events if (text := _text(event))]


def _text(event: Any) -> str:
    choices = event.get("choices", []) if isinstance(event, dict) else []
    return "".join(c.get("text", "") or c.get("delta", {}).get("content", "") for c in choices if c["index"] == 0)


async def post(app: ASGIApp, path: str, **fields: Any) -> Exchange:
    """One whole request with a JSON body."""
    return await Exchange(app, path, [(0, json.dumps(fields).encode())]).run()
