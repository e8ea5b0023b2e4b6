"""What the messages of a row must be before a template sees them."""

import json
from typing import Any

from longspan.train.data.rows.values import RowError, kind_of_value, shown


def messages_of(value: Any, name: str = "messages", *, images: bool = False) -> list[dict[str, Any]]:
    """Messages, each an object with a role. Raises RowError for anything else, and for parts that are no text.

    With `images` a part may be one, or a video.
    """
    if not isinstance(value, list) or not value:
        raise RowError(
            f'"{name}" is {"empty" if value == [] else kind_of_value(value)}; give a list of objects with role and '
            "content"
        )
    return [_message(message, f"{name}[{i}]", images) for i, message in enumerate(value)]


def _message(message: Any, name: str, images: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        hint = "; from and value are called role and content here" if _is_sharegpt(message) else ""
        raise RowError(f"{name} needs an object with a string role; found {shown(message)}{hint}")
    content = message.get("content")
    if isinstance(content, list):
        content = [_without_nulls(part) for part in content]  # templates ask whether a part has a key
        message = {**message, "content": content}
        for k, part in enumerate(content):
            if images and part in ({"type": "image"}, {"type": "video"}):
                continue
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type", "no text") if isinstance(part, dict) else kind_of_value(part)
                read = "text, images and videos" if images else "text"
                raise RowError(f"{name}.content[{k}] is {kind}; only parts of {read} are read")
    elif content is not None and not isinstance(content, str):
        raise RowError(f"{name}.content is {kind_of_value(content)}; give a string: {shown(content)}")
    _check_calls(message.get("tool_calls"), f"{name}.tool_calls")
    return message


def _without_nulls(part: Any) -> Any:
    return {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part


def _check_calls(calls: Any, name: str) -> None:
    if calls is None or calls == []:
        return
    if not isinstance(calls, list):
        raise RowError(f"{name} is {kind_of_value(calls)}; give a list of calls")
    for k, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{name}[{k}] names no function; give name and arguments: {shown(call)}")


def tools_of(value: Any) -> list[Any] | None:
    """The tools of a row: a list of schemas, or its JSON; None where there are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise RowError(f'"tools" is a string that is no JSON: {error}') from error
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(f'"tools" is {kind_of_value(value)}; give a list of objects: {shown(value)}')
    return value


def _is_sharegpt(message: Any) -> bool:
    return isinstance(message, dict) and {"from", "value"} <= message.keys()
