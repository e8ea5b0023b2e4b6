"""Messages of a row: checks of their form before a template renders them, and which of them are learnt."""

from collections.abc import Mapping, Sequence
from typing import Any

from longspan.corpus.rows.kinds import refused_keys
from longspan.corpus.rows.values import RowError, short_repr, type_name
from longspan.files import parse_json

# Keys of a message, in other formats, that decide whether it is learnt.
LEARNT = ("weight", "train", "training", "trainable", "loss")


def checked_messages(value: Any, name: str = "messages", *, images: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a row, each an object with a role; with `images` a part may be an image or a video.

    Raises RowError, with the message's place under the key `name`, for one that has another form.
    """
    if not isinstance(value, list) or not value:
        cell = (
            ", in .jsonl or .json: a cell of a .csv is a text"
            if isinstance(value, str) and value[:1] == "["
            else ""
        )
        raise RowError(
            f'"{name}" is {"empty" if value == [] else type_name(value)}; give a list of objects with role and '
            f"content{cell}"
        )
    return [_checked_message(message, f"{name}[{i}]", images) for i, message in enumerate(value)]


def _checked_message(message: Any, name: str, images: bool) -> dict[str, Any]:
    """Keys with null are left out of parts, as templates ask whether a part has a key."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        is_turn = isinstance(message, dict) and {"from", "value"} <= message.keys()
        hint = '; data.rename_columns = ["conversations=messages"] reads from and value' if is_turn else ""
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
    for key, value in message.items():
        if value is not None and key in LEARNT and value not in (0, 1):
            raise RowError(
                f"{name}.{key} is {short_repr(value)}; give 0 where the message is no target, and 1 where it is"
            )
        # Other roles are never learnt.
        if value and key in LEARNT and message["role"] != "assistant":
            raise RowError(
                f"{name}.{key} is {short_repr(value)}, and only what an assistant says is learnt; its role is "
                f"{message['role']}: leave {key} out, or give 0"
            )
    for key, why in refused_keys(message, "message"):
        raise RowError(f"{name}.{key} is not read: {why}")
    return message


def learnt_messages(messages: Sequence[Mapping[str, Any]], first: int) -> list[int]:
    """List the assistant's messages from number `first` on that are learnt: those without a 0 under a LEARNT key.

    Raises RowError if there are none.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    if not answers:
        raise RowError("no message is of an assistant, so that there is nothing to learn; leave the row out")
    learnt = [i for i in answers if not context_keys(messages[i])]
    if not learnt:
        raise RowError("none of its tokens is a target", masked=True)
    return learnt


def context_keys(message: Mapping[str, Any]) -> list[str]:
    """List the keys of a message by which it is no target: those of LEARNT with a 0."""
    return [key for key in LEARNT if message.get(key) not in (None, 1)]


def context_messages(messages: Sequence[Mapping[str, Any]], first: int) -> list[int]:
    """List the messages from number `first` on that a row keeps out of the targets, where all others are targets.

    Raises RowError for one of another role than the assistant's, whose tokens cannot be told from those around them.
    """
    context = [i for i, message in enumerate(messages) if i >= first and context_keys(message)]
    for message in (messages[i] for i in context if messages[i]["role"] != "assistant"):
        key = context_keys(message)[0]
        raise RowError(
            f"{key} of a message is {short_repr(message[key])}, its role is {message['role']}, and train.loss learns "
            f"all tokens behind a prompt, of other roles too: only what an assistant says is kept out; leave {key} out"
        )
    return context


def _check_tool_calls(calls: Any, name: str) -> None:
    if calls is None or calls == []:
        return
    if not isinstance(calls, list):
        raise RowError(f"{name} is {type_name(calls)}; give a list of calls")
    for k, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{name}[{k}] names no function; give name and arguments: {short_repr(call)}")


def read_tools(value: Any) -> list[Any] | None:
    """Return the tools of a row, given as a list of schemas or as its JSON; None for none.

    Raises RowError for any other value.
    """
    if (value := read_json_value(value, "tools")) is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(f'"tools" is {type_name(value)}; give a list of objects: {short_repr(value)}')
    return value


def read_json_value(value: Any, name: str) -> Any:
    """Return a value that may be given as a string of JSON; None for a blank string. Raises RowError for
    other strings.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        raise RowError(f'"{name}" is a string that is no JSON: {error}') from error
