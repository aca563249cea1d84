"""Where the parts of a Node put what is to be done, in order. Pure."""

from __future__ import annotations

from meshllm.mesh.actions import Action, Field, LinkId, Report, Send
from meshllm.mesh.messages import ControlMessage


class Outbox:
    """Actions not yet handed out."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def add(self, action: Action) -> None:
        """Appends an action."""
        self._actions.append(action)

    def send(self, link: LinkId | None, message: ControlMessage) -> None:
        """Appends a Send, or nothing where there is no link any more."""
        if link is not None:
            self._actions.append(Send(link, message))

    def report(self, event: str, **fields: Field) -> None:
        """Appends a Report."""
        self._actions.append(Report(event, tuple(fields.items())))

    def take(self) -> list[Action]:
        """Hands out everything."""
        actions, self._actions = self._actions, []
        return actions
