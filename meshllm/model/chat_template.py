"""Chat messages -> the prompt that a model was trained on, by the template in its file.

A template is a program from a stranger. It runs in minijinja: of Python objects it sees tuples and dicts that cannot be
changed, texts and numbers; its fuel bounds steps and the size of texts. Jinja2's sandbox bounds neither. What differs
from transformers' rendering is mended here: `tojson` as json.dumps writes it, unescaped and in order;
`raise_exception`; `strftime_now`; a content of null is an empty text; a bos_token of none is empty.

What a user writes stays text: control tokens in contents are marked before rendering, and found unmarked only where the
template itself wrote them (`encode_chat`). Tokenizing template and contents apart would be simpler and wrong, since a
token may span the seam. Pure but for the date, which comes as an argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NoReturn, TypeAlias

import minijinja

from meshllm.errors import InvalidRequestError, ModelFileError
from meshllm.model.tokenizer import Tokenizer, without_surrogates

MAX_TEMPLATE_CHARS: Final = 1_000_000
MAX_DEPTH: Final = 64  # of nested values in messages and tools
MAX_INDENT: Final = 16
MAX_DATE_FORMAT_CHARS: Final = 100
BASE_FUEL: Final = 1_000_000  # a turn takes some 5,000 in the largest template known
FUEL_PER_CHAR: Final = 50  # of the messages: a character printed or copied costs about one
_GENERATION_TAG: Final = re.compile(r"{%(?P<open>[-+]?)\s*(?P<end>end)?generation\s*(?P<close>[-+]?)%}")
# Noncharacters: in no text that means anything. The first that a conversation does not hold becomes the mark.
_MARKS: Final = tuple(chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0x100000, 0x10FFFE)))

# For a file that brings none: ChatML, which most small models know.
CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Message: TypeAlias = Mapping[str, JsonValue]


class ChatTemplate:
    """A template that was found valid. Rendering leaves it as it was; safe to use from several threads."""

    def __init__(self, source: str, bos: str, eos: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        """bos, eos: texts of those tokens, "" for none; now: the date a template may ask for.

        Raises ModelFileError where the source is no template.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelFileError(
                f"tokenizer.chat_template is {len(source)} characters long, at most {MAX_TEMPLATE_CHARS} are allowed:"
                " choose another conversion of the model"
            )
        self._special_texts = {"bos_token": bos, "eos_token": eos}
        self._now = now
        self._source = _GENERATION_TAG.sub(_as_condition, source)
        try:
            self._environment("")
        except minijinja.TemplateError as error:
            raise ModelFileError(
                f"tokenizer.chat_template is no valid template ({_first_line(error)}): choose another conversion"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: JsonValue,
    ) -> str:
        """The prompt as text. Raises InvalidRequestError with the template's own words where it refuses."""
        conversation = _Conversation(messages, tools, add_generation_prompt, kwargs)
        return self._render(conversation, lambda text: text, "")

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[JsonValue] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: JsonValue,
    ) -> list[int]:
        """Ids of the prompt; control tokens written in messages, tools or arguments stay text; at most one BOS.

        Raises InvalidRequestError as `render`.
        """
        return tokenizer.encode_disarmed(
            *self.render_disarmed(tokenizer, messages, tools, add_generation_prompt, **kwargs)
        )

    def render_disarmed(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[JsonValue] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: JsonValue,
    ) -> tuple[str, str]:
        """What `encode_chat` encodes: see Tokenizer.encode_disarmed. Raises InvalidRequestError as `render`."""
        conversation = _Conversation(messages, tools, add_generation_prompt, kwargs)
        mark = _unused_mark(self._source, conversation)
        return self._render(conversation, lambda text: tokenizer.disarm(text, mark), mark), mark

    def _render(self, conversation: _Conversation, disarm: Callable[[str], str], mark: str) -> str:
        n_chars = sum(len(text) for text in conversation.texts())
        variables = {
            key: _freeze(value, disarm)
            for key, value in {
                **conversation.kwargs,
                "messages": [_with_content(message) for message in conversation.messages],
                "tools": conversation.tools,
                "add_generation_prompt": conversation.add_generation_prompt,
            }.items()
        }
        environment = self._environment(mark)
        environment.fuel = BASE_FUEL + FUEL_PER_CHAR * n_chars
        try:
            return environment.render_template("chat", **{**variables, **self._special_texts})
        except _TemplateRefusal as refusal:
            words = str(refusal).replace(mark, "") if mark else str(refusal)
            raise InvalidRequestError(f"the model's chat template refuses the messages: {words}", "messages") from None
        except Exception as error:  # of minijinja, or of Python where the template used a value wrongly
            words = _first_line(error)
            raise InvalidRequestError(
                f"the model's chat template failed on the messages: {words}", "messages"
            ) from None

    def _environment(self, mark: str) -> minijinja.Environment:
        """Compiled for one rendering, which takes 30 to 180 us: nothing is shared between threads."""
        environment = minijinja.Environment(
            pycompat=True, trim_blocks=True, lstrip_blocks=True, auto_escape_callback=lambda _: False
        )
        environment.add_filter("tojson", _JsonFilter(mark))
        environment.add_global("raise_exception", _raise_exception)
        environment.add_global("strftime_now", self._format_date)
        environment.add_template("chat", self._source)
        return environment

    def _format_date(self, form: str) -> str:
        if len(form) > MAX_DATE_FORMAT_CHARS:
            raise ValueError("strftime_now was given a format that is too long")
        return self._now().strftime(form)


@dataclass(frozen=True, slots=True)
class _Conversation:
    """What a request asks to render."""

    messages: Sequence[Message]
    tools: Sequence[JsonValue] | None
    add_generation_prompt: bool
    kwargs: Mapping[str, JsonValue]

    def texts(self) -> Iterator[str]:
        """Every text in it, keys too. Raises InvalidRequestError where it is nested too deep."""
        yield from _texts([self.messages, self.tools, self.kwargs])


class _FrozenDict(dict[str, "_Frozen"]):
    """A dict whose methods, all that a template can call, change nothing."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a chat template may not change messages")

    clear = pop = popitem = setdefault = update = _refuse


_Frozen: TypeAlias = "str | int | float | bool | tuple[_Frozen, ...] | _FrozenDict | None"


def _freeze(value: JsonValue, disarm: Callable[[str], str]) -> _Frozen:
    if isinstance(value, str):
        return disarm(without_surrogates(value))
    if isinstance(value, Mapping):
        return _FrozenDict({disarm(without_surrogates(key)): _freeze(entry, disarm) for key, entry in value.items()})
    if isinstance(value, Sequence):
        return tuple(_freeze(entry, disarm) for entry in value)
    return value


def _texts(value: JsonValue, depth: int = 0) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"messages or tools are nested deeper than {MAX_DEPTH} levels", "messages")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield key
            yield from _texts(entry, depth + 1)
    elif isinstance(value, Sequence):
        for entry in value:
            yield from _texts(entry, depth + 1)


def _with_content(message: Message) -> Message:
    """Templates join content to texts: null, or none at all beside tool calls, must not print None or fail."""
    return message if message.get("content") is not None else {**message, "content": ""}


def _unused_mark(source: str, conversation: _Conversation) -> str:
    used = set(source).union(*conversation.texts())
    return next(mark for mark in _MARKS if mark not in used)


class _JsonFilter:
    """json.dumps with transformers' arguments; the mark stays itself where all else beyond ASCII is escaped."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __call__(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if indent is not None and indent > MAX_INDENT:
            raise ValueError(f"tojson was given an indent over {MAX_INDENT}")
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        escaped = json.dumps(self._mark)[1:-1]
        return text.replace(escaped, self._mark) if self._mark and ensure_ascii else text


class _TemplateRefusal(Exception):
    """The template called raise_exception."""


def _raise_exception(message: object) -> NoReturn:
    raise _TemplateRefusal(str(message))


def _as_condition(tag: re.Match[str]) -> str:
    """{% generation %} marks an answer for training; for rendering it is a block that is always taken."""
    word = "endif" if tag["end"] else "if true"
    return f"{{%{tag['open']} {word} {tag['close']}%}}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
