"""Readers of answers that devices are lost in."""

from __future__ import annotations

import threading

from meshllm.errors import MeshLLMError
from tests.system.mesh import Daemon

LONG = 300  # tokens
COUNTING = ", ".join(map(str, range(1, 26))) + ","  # each next token is sure by a nat or more


class Reader(threading.Thread):
    """Reads an answer long enough to lose a device in."""

    def __init__(self, root: Daemon, prompt: str = COUNTING, n: int = LONG) -> None:
        super().__init__()
        self.root, self.prompt, self.n = root, prompt, n
        self.error: MeshLLMError | None = None
        self.tokens: list[int] = []
        self.began = threading.Event()
        self._enough = threading.Event()
        self.start()

    def run(self) -> None:
        body = {"prompt": self.prompt, "max_tokens": self.n, "temperature": 0, "ignore_eos": True, "stream": True}
        try:
            for event in self.root.client.stream("/v1/completions", {**body, "return_token_ids": True}):
                self.tokens += event["choices"][0]["token_ids"] if event["choices"] else []
                if len(self.tokens) > 10:
                    self.began.set()
                if self._enough.is_set():
                    break
        except MeshLLMError as error:
            self.error = error
        self.began.set()

    def leave(self) -> None:
        """Reads no more."""
        self._enough.set()
        self.join(60)
        assert not self.is_alive(), "the answer hangs"

    def whole(self) -> list[int]:
        """Its tokens, once all are there."""
        self.join(60)
        assert not self.is_alive(), "the answer hangs"
        assert self.error is None, self.error
        assert len(self.tokens) == self.n
        return self.tokens
