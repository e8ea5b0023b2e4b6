"""Checks and descriptions of JSON values in a row; what is wrong is raised as a RowError of one line."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class RowError(Exception):
    """What is wrong with a row, in one line without its place. `masked`: only that none of its tokens is a target."""

    def __init__(self, reason: str, *, masked: bool = False) -> None:
        super().__init__(reason)
        self.masked = masked


def require_key(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key. Raises RowError, with the keys that are there, for a row without it."""
    if key not in values:
        kind = "an object with a string" if key in ("text", "prompt", "completion") else "an object with"
        raise RowError(f'needs {kind} "{key}"; found keys {sorted(values)}')
    return values[key]


def require_string(value: Any, name: str) -> str:
    """Return a string that any tokenizer can read. Raises RowError, which calls it `name`, for another value."""
    if not isinstance(value, str):
        raise RowError(
            f'needs an object with a string "{name}"; "{name}" is {type_name(value)}: {short_repr(value)}'
        )
    check_no_surrogates(value, "its text" if name == "text" else f'its "{name}"')
    return value


def check_no_surrogates(text: str, name: str) -> None:
    """Raise RowError for a lone surrogate, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"character {error.start + 1} of {name} is \\u{ord(text[error.start]):04x}, a lone surrogate, which is "
            "half of a character; write both halves, or leave it out"
        ) from error


def check_strings(value: Any, name: str, special: re.Pattern[str] | None) -> None:
    """Raise RowError for a string in a value with a lone surrogate, or a name of a token that `special` matches."""
    for path, text in strings_with_places(value, name):
        check_no_surrogates(text, path)
        if special is not None and (match := special.search(text)):
            raise RowError(
                f"{path} holds {match.group()!r}, which the tokenizer reads as a special token, such as one that ends "
                "a turn; leave it out, or let it be one with data.parse_special_tokens = true"
            )


def strings_with_places(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield every string in a JSON value, keys of objects too, with its place: `messages[2].content`."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield f"a key of {name}", str(key)
            yield from strings_with_places(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from strings_with_places(inner, f"{name}[{i}]")


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every string in it changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(str(key)): map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [map_strings(inner, change) for inner in value]
    return value


def number_in_text(value: Any) -> Any:
    """Return the number, or true or false, that a text writes, as a cell of a .csv does; other values as they are.

    >>> [number_in_text(value) for value in ("0.5", "True", "a", 1)]
    [0.5, True, 'a', 1]
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    try:
        number = json.loads({"True": "true", "False": "false"}.get(text, text))
    except (ValueError, RecursionError):
        return value
    return number if isinstance(number, bool | int | float) else value


def type_name(value: Any) -> str:
    """Name the type of a JSON value; null, true and false are named by themselves."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {str: "a string", list: "a list", dict: "an object"}.get(type(value), "a number")


def short_repr(value: Any) -> str:
    """Write a value as JSON for messages, in at most 60 characters."""
    return json.dumps(value, default=str)[:60]


def has_value(value: Any) -> bool:
    """Return whether a value says something: it is neither null nor an empty string, list or object."""
    return value is not None and not (isinstance(value, str | list | dict) and not value)
