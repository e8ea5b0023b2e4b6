"""The texts of messages, each with the keys that lead to it, by which it is located in a rendering or replaced."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class Field(NamedTuple):
    """A text of a message, with the keys that lead to it.

    `message` is the number of its message. `added`: the value is an object, into which a mark is put as one more key.
    `blank`: the text is empty, and a mark takes its place.
    """

    message: int
    path: tuple[str | int, ...]
    value: Any
    added: bool = False
    blank: bool = False


def texts_of_messages(messages: Sequence[Mapping[str, Any]]) -> list[Field]:
    """List the texts of messages, one field for each tool call, and blank contents of all but assistants."""
    return [field for i, message in enumerate(messages) for field in _text_fields(i, message)]


def _text_fields(i: int, message: Mapping[str, Any]) -> Iterator[Field]:
    """A blank content counts too, as no span of targets may contain its place; an assistant's does not."""
    thought = next((key for key in THOUGHTS if _is_text(message.get(key))), None)
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
    """Templates write last of a call: its last argument if that is a text, else all, else its name."""
    path: tuple[str | int, ...] = ("tool_calls", number)
    if "function" in call:
        path = (*path, "function")
        call = call["function"]
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return Field(i, (*path, "arguments"), arguments)
    if not isinstance(arguments, dict):
        return Field(i, (*path, "name"), call["name"])
    last = next(reversed(arguments), None)
    if last is not None and _is_text(arguments[last]):
        return Field(i, (*path, "arguments", last), arguments[last])
    return Field(i, (*path, "arguments"), arguments, added=True)


def replace_field(messages: Sequence[Mapping[str, Any]], field: Field, value: Any) -> list[Mapping[str, Any]]:
    """Return messages with another value in place of a field; the given ones stay as they are."""
    copies = list(messages)
    copies[field.message] = _put_value(messages[field.message], field.path, value)
    return copies


def _put_value(container: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    key, *inner_path = path
    inner = _put_value(container[key], tuple(inner_path), value)
    copy: Any = list(container) if isinstance(container, list) else dict(container)
    copy[key] = inner
    return copy


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
