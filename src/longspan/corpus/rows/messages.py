"""Messages of a row: checks of their form before a template renders them, which of them are learnt, and their texts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from longspan.corpus.rows.sample import Kind, RowError, require_string, short_repr, type_name, unread_keys
from longspan.files import parse_json

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Keys of a message, in other formats, that decide whether it is learnt.
LEARNT = ("weight", "train", "training", "trainable", "loss")


def check_messages(value: Any, name: str = "messages", *, images: bool = False) -> list[dict[str, Any]]:
    """Check messages, each an object with a role; with `images` a part may be an image or a video."""
    if not isinstance(value, list) or not value:
        raise RowError(
            f'"{name}" is {"empty" if value == [] else type_name(value)}; give a list of objects with role and content'
        )
    return [_check_message(message, f"{name}[{i}]", images) for i, message in enumerate(value)]


def _check_message(message: Any, name: str, images: bool) -> dict[str, Any]:
    """Return a message without keys with null in its parts: templates ask whether a part has a key."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        is_turn = isinstance(message, dict) and {"from", "value"} <= message.keys()
        hint = "; from and value are called role and content here" if is_turn else ""
        raise RowError(f"{name} needs an object with a string role; found {short_repr(message)}{hint}")
    content = message.get("content")
    if isinstance(content, list):
        content = [
            {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part
            for part in content
        ]
        message = {**message, "content": content}
        for k, part in enumerate(content):
            if images and part in ({"type": "image"}, {"type": "video"}):
                continue
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type", "no text") if isinstance(part, dict) else type_name(part)
                read = "text, images and videos" if images else "text"
                raise RowError(f"{name}.content[{k}] is {kind}; only parts of {read} are read")
    elif content is not None and not isinstance(content, str):
        raise RowError(f"{name}.content is {type_name(content)}; give a string: {short_repr(content)}")
    _check_tool_calls(message.get("tool_calls"), f"{name}.tool_calls")
    _check_target_keys(message, name)
    return message


def _check_target_keys(message: Mapping[str, Any], name: str) -> None:
    """A message that is not an assistant's is never learnt, so that only 0 is right for it."""
    for key, value in message.items():
        if value is not None and key in LEARNT and value not in (0, 1):
            raise RowError(
                f"{name}.{key} is {short_repr(value)}; give 0 where the message is no target, and 1 where it is"
            )
        if value and key in LEARNT and message["role"] != "assistant":
            raise RowError(
                f"{name}.{key} is {short_repr(value)}, and only what an assistant says is learnt; its role is "
                f"{message['role']}: leave {key} out, or give 0"
            )
    for key, why in unread_keys(message, "message"):
        raise RowError(f"{name}.{key} is not read: {why}")


def learnt_messages(messages: Sequence[Mapping[str, Any]], first: int) -> list[int]:
    """List the assistant's messages from number `first` on that are learnt: those without a 0 under a LEARNT key."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    if not answers:
        raise RowError("no message is of an assistant, so that there is nothing to learn; leave the row out")
    learnt = [i for i in answers if all(messages[i].get(key) in (None, 1) for key in LEARNT)]
    if not learnt:
        raise RowError("none of its tokens is a target", masked=True)
    return learnt


def _check_tool_calls(calls: Any, name: str) -> None:
    """A call has its name and arguments under `function`, or without that key."""
    if calls is None or calls == []:
        return
    if not isinstance(calls, list):
        raise RowError(f"{name} is {type_name(calls)}; give a list of calls")
    for k, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{name}[{k}] names no function; give name and arguments: {short_repr(call)}")


def read_tools(value: Any) -> list[Any] | None:
    if (value := read_json_value(value, "tools")) is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(f'"tools" is {type_name(value)}; give a list of objects: {short_repr(value)}')
    return value


def read_json_value(value: Any, name: str) -> Any:
    try:
        return value if not isinstance(value, str) else parse_json(value) if value.strip() else None
    except ValueError as error:
        raise RowError(f'"{name}" is a string that is no JSON: {error}') from error


class Field(NamedTuple):
    """A text of a message, with the keys that lead to it.

    `added`: it is no text, and its mark is a further key. `blank`: there is no text, but its place is the message's.
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
    """Yield the texts of message `i`: an assistant's thought, its content, and one field for each call.

    A blank content counts too, as no span of targets may contain its place. An assistant's does not.
    """
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
    """Return what templates write last of a call: its last argument if that is a text, else all, else its name."""
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


_ROLES = {  # of ShareGPT's turns
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


def convert_to_messages(values: Mapping[str, Any], kind: Kind) -> Mapping[str, Any]:
    """Return a row of ShareGPT's or Alpaca's kind as one with messages, and any other as it is. Raises RowError for
    turns that are not of their format.
    """
    if kind == "conversations":
        turns = values["conversations"]
        if not isinstance(turns, list) or not turns:
            raise RowError(
                f'"conversations" is {type_name(turns) if turns != [] else "empty"}; give a list of turns'
            )
        messages = [_read_turn(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
    elif kind == "instruction+output":
        texts = [require_string(values.get(key) or "", key) for key in ("instruction", "input", "output")]
        question = "\n".join(filter(None, texts[:2]))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": texts[2]}]
    else:
        return values
    return {**values, "messages": messages}


def _read_turn(turn: Any, name: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or turn.get("from") not in _ROLES:
        roles = ", ".join(_ROLES)
        hint = ' (data.rename_columns = ["messages=conversations"] reads role and content)' * ("role" in str(turn))
        raise RowError(
            f"{name} needs an object with from, one of {roles}, and value; found {short_repr(turn)}{hint}"
        )
    present = {key: value for key, value in turn.items() if value is not None and key not in ("from", "value")}
    if unknown := sorted(present.keys() - {*LEARNT}):
        raise RowError(f"{name}.{unknown[0]} is not read: a turn has from and value, perhaps {', '.join(LEARNT)}")
    message = {"role": _ROLES[turn["from"]], **present}
    if turn["from"] != "function_call":
        return {**message, "content": require_string(turn.get("value"), "value")}
    calls = read_json_value(turn.get("value"), f"{name}.value")
    calls = calls if isinstance(calls, list) else [calls]
    return {**message, "content": None, "tool_calls": [{"type": "function", "function": call} for call in calls]}
