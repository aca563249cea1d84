"""Messages of a chat: as clients send them, and as chat templates take them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import msgspec

from meshllm.errors import InvalidRequestError

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class Message(msgspec.Struct, kw_only=True):
    """One turn. Content in parts is joined; only text parts are known."""

    role: str
    content: str | list[dict[str, object]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, object]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def template_message(message: Message, index: int) -> dict[str, object]:
    """Raises InvalidRequestError that names the message's place."""
    place = f"messages[{index}]"
    if message.role not in ROLES:
        raise InvalidRequestError(
            f'{place}.role is "{message.role}", expected one of {", ".join(ROLES)}', f"{place}.role"
        )
    made: dict[str, object] = {"role": "system" if message.role == "developer" else message.role}
    made["content"] = _text_of(message.content, place)
    if message.content is None and message.role != "assistant":
        raise InvalidRequestError(f"{place}.content is missing, expected text", f"{place}.content")
    if message.tool_calls:
        made["tool_calls"] = [_with_arguments(call) for call in message.tool_calls]
    rest = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning_content}
    return {**made, **{name: value for name, value in rest.items() if value is not None}}


def _text_of(content: str | list[dict[str, object]] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise InvalidRequestError(
                f'{place}.content[{i}] is no text part: expected {{"type": "text", "text": "..."}}', f"{place}.content"
            )
        texts.append(text)
    return "".join(texts)


def _with_arguments(call: Mapping[str, object]) -> dict[str, object]:
    """A tool call whose arguments are an object: clients send its text, templates print it as JSON again."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return dict(call)
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else dict(call)
