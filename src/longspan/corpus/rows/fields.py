"""Where the texts of a conversation come to stand in its rendering, found by rendering it again with marks in them.

A mark is a word that stands nowhere in the rendering. It is put behind each text of each message, and in place of each
blank one of a message that is no assistant's; if the second rendering without the marks is the first one, the marks say
where the texts end. Otherwise a template changes by what a text is: blank ones are left as they are, and then each text
is marked alone: what follows its mark must end the first rendering.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from longspan.corpus.rows.template import Message
from longspan.corpus.rows.values import RowError

_LONGEST_CLOSING = 32
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
Render = Callable[[Sequence[Message]], str]


class Field(NamedTuple):
    """A text of a message: the keys that lead to it. `added` is a key that marks a value which is no text itself.

    `blank`: there is no text, and what stands around it in the rendering is of its message all the same.
    """

    message: int
    path: tuple[str | int, ...]
    value: Any
    added: bool = False
    blank: bool = False

    @property
    def is_thought(self) -> bool:
        """Whether it stands under a key of its own for thoughts."""
        return self.path[0] in _THOUGHTS


def fields_of(messages: Sequence[Message]) -> list[Field]:
    """The texts of messages, of each tool call its last argument, and blank contents of all but assistants."""
    return [field for i, message in enumerate(messages) for field in _fields(i, message)]


def _fields(i: int, message: Message) -> Iterator[Field]:
    thought = next((key for key in _THOUGHTS if _is_text(message.get(key))), None)
    if thought is not None and message.get("role") == "assistant":
        yield Field(i, (thought,), message[thought])
    content = message.get("content")
    if isinstance(content, list):
        parts = [k for k, part in enumerate(content) if _is_text(part.get("text"))]
        yield from (Field(i, ("content", k, "text"), content[k]["text"]) for k in parts)
    elif _is_text(content):
        yield Field(i, ("content",), content)
    elif "content" in message and message.get("role") != "assistant":
        yield Field(i, ("content",), "", blank=True)
    for k, call in enumerate(message.get("tool_calls") or ()):
        yield _call_field(i, k, call)


def _call_field(i: int, number: int, call: Mapping[str, Any]) -> Field:
    path: tuple[str | int, ...] = ("tool_calls", number)
    if "function" in call:
        path, call = (*path, "function"), call["function"]
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return Field(i, (*path, "arguments"), arguments)
    if not isinstance(arguments, dict):
        return Field(i, (*path, "name"), call["name"])
    last = next(reversed(arguments), None)
    if last is not None and _is_text(arguments[last]):
        return Field(i, (*path, "arguments", last), arguments[last])
    return Field(i, (*path, "arguments"), arguments, added=True)


def ends_of(fields: Sequence[Field], messages: Sequence[Message], text: str, render: Render) -> list[tuple[int, ...]]:
    """Where each text ends in the rendering, in characters and wherever it stands; empty where it is not there."""
    marks = _marks(text, len(fields))
    texts = [k for k, field in enumerate(fields) if not field.added]
    written = [k for k in texts if not fields[k].blank]
    places = _places(messages, {marks[k]: fields[k] for k in texts}, text, render)
    if places is None and len(written) < len(texts):
        places = _places(messages, {marks[k]: fields[k] for k in written}, text, render)
    alone = [k for k, field in enumerate(fields) if field.added or (places is None and not field.blank)]
    places = places or {}
    for k in alone:
        rendered = render(_with_mark(messages, fields[k], marks[k]))
        places[marks[k]] = _end_alone(rendered, marks[k], text, fields[k])
    return [tuple(places.get(mark, ())) for mark in marks]


def _places(
    messages: Sequence[Message], fields: Mapping[str, Field], text: str, render: Render
) -> dict[str, list[int]] | None:
    """Where the marks of fields stand, counted without them; None where the rendering without them is another one."""
    if not fields:
        return {}
    for mark, field in fields.items():
        messages = _with_mark(messages, field, mark)
    try:
        rendered = render(messages)
    except RowError:
        return None
    pattern = re.compile("|".join(map(re.escape, fields)))
    places, removed = {mark: list[int]() for mark in fields}, 0
    for match in pattern.finditer(rendered):
        places[match.group()].append(match.start() - removed)
        removed += len(match.group())
    return places if pattern.sub("", rendered) == text else None


def _end_alone(rendered: str, mark: str, text: str, field: Field) -> list[int]:
    at = rendered.rfind(mark)
    if at < 0:
        return []
    rest = rendered[at + len(mark) :]
    closing = _LONGEST_CLOSING if field.added else 0  # what closes the added value: a quote, say
    rest = next((rest[i:] for i in range(closing + 1) if text.endswith(rest[i:])), None)
    if rest is None:
        raise RowError(
            "its chat template writes what follows a turn differently when the turn has one word more, so that it "
            "cannot be told what the assistant says; mark it in the template with {% generation %}"
        )
    return [len(text) - len(rest)]


def start_of(field: Field, messages: Sequence[Message], text: str, render: Render) -> int | None:
    """Where a text begins in the rendering; None where its beginning is not there."""
    (mark,) = _marks(text, 1)
    if field.added:
        return None
    blank = len(field.value) - len(field.value.lstrip())
    rendered = render(_replaced(messages, field, field.value[:blank] + mark + field.value[blank:]))
    at = rendered.find(mark)
    return at if at >= 0 and text.startswith(rendered[:at]) else None


def _marks(text: str, number: int) -> list[str]:
    """Words that stand nowhere in the text, none in another; of letters and digits, which no template escapes."""
    stem = next(stem for k in count() if (stem := f"Zq{k}w") not in text)
    return [f"{stem}{k}v" for k in range(number)]


def _with_mark(messages: Sequence[Message], field: Field, mark: str) -> Sequence[Message]:
    """The messages with a mark behind a text (before the blanks at its end, which templates may strip)."""
    if field.added:
        return _replaced(messages, field, {**field.value, mark: mark})
    if field.blank:
        return _replaced(messages, field, mark)
    end = len(field.value.rstrip())
    return _replaced(messages, field, field.value[:end] + mark + field.value[end:])


def _replaced(messages: Sequence[Message], field: Field, value: Any) -> Sequence[Message]:
    changed = list(messages)
    changed[field.message] = _put(messages[field.message], field.path, value)
    return changed


def _put(inside: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    copy = list(inside) if isinstance(inside, list) else dict(inside)
    copy[path[0]] = _put(inside[path[0]], path[1:], value)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return copy


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
