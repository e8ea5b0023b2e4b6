"""Checks of the values of a row, which raise what is wrong with them as one line."""

import json
from typing import Any


class RowError(Exception):
    """What is wrong with a row, in one line without its place. `masked`: only that nothing of it is a target."""

    def __init__(self, reason: str, *, masked: bool = False) -> None:
        super().__init__(reason)
        self.masked = masked


def string(value: Any, name: str) -> str:
    """A text of a row. Raises RowError for another type, and for half of a surrogate pair."""
    if not isinstance(value, str):
        raise RowError(f'needs an object with a string "{name}"; "{name}" is {kind_of_value(value)}: {shown(value)}')
    check_characters(value, "its text" if name == "text" else f'its "{name}"')
    return value


def check_characters(text: str, of: str) -> None:
    """Raise RowError for half of a surrogate pair, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"character {error.start + 1} of {of} is \\u{ord(text[error.start]):04x}, a lone surrogate, which is half "
            "of a character; write both halves, or leave it out"
        ) from error


def kind_of_value(value: Any) -> str:
    """The name of a JSON value's type."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {str: "a string", list: "a list", dict: "an object"}.get(type(value), "a number")


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    return json.dumps(value, default=str)[:60]
