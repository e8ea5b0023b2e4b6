"""A row of data, what it becomes, and how that may be set. Nothing here reads files or knows a tokenizer."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.data.images import SampleImage


class RowError(Exception):
    """What is wrong with a row, in one line without its place. `masked`: only that nothing of it is a target."""

    def __init__(self, reason: str, *, masked: bool = False) -> None:
        super().__init__(reason)
        self.masked = masked


def needed(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key. Raises RowError where a row does not have it."""
    if key not in values:
        what = "an object with a string" if key in ("text", "prompt", "completion") else "an object with"
        raise RowError(f'needs {what} "{key}"; found keys {sorted(values)}')
    return values[key]


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


def check_strings(value: Any, name: str, special: re.Pattern[str] | None) -> None:
    """Raise RowError for a string in a value that is half a character, or names a special token."""
    for path, text in strings(value, name):
        check_characters(text, path)
        if special is not None and (match := special.search(text)):
            raise RowError(
                f"{path} holds {match.group()!r}, which the tokenizer reads as a special token, such as one that ends "
                "a turn; leave it out, or let it be one with data.parse_special_tokens = true"
            )


def strings(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every string in a JSON value, keys of objects too, and where it stands: `messages[2].content`."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield f"a key of {name}", str(key)
            yield from strings(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from strings(inner, f"{name}[{i}]")


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string in it changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(str(key)): with_strings(inner, change) for key, inner in value.items()}
    return [with_strings(inner, change) for inner in value] if isinstance(value, list) else value


def kind_of_value(value: Any) -> str:
    """The name of a JSON value's type."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {str: "a string", list: "a list", dict: "an object"}.get(type(value), "a number")


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    return json.dumps(value, default=str)[:60]


Turns = Literal["together", "split"]


class Row(NamedTuple):
    """One row of data as a file has it, and where it stands: `Row("chat.jsonl, line 7", {"messages": […]})`.

    `folder` is that of its file, where relative paths of images begin.
    """

    where: str
    values: Mapping[str, Any]
    folder: str = ""


class Unseen(NamedTuple):
    """How much of a document's assistant turns is no target: thoughts and other texts that the template leaves out,
    wholly or in part, and turns that are blank."""

    unseen_thoughts: int = 0
    unseen_texts: int = 0
    blank_turns: int = 0


class Sample(NamedTuple):
    """The tokens of one document (n,), and its labels (n,): −100 where a token is no target.

    Labels stand as in Hugging Face's, not shifted. None: every token but the first is a target. `row` is the index of
    its row among those that were encoded with it: a conversation that is split gives several samples.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64] | None = None
    row: int = 0
    unseen: Unseen = Unseen()
    images: tuple[SampleImage, ...] = ()


class BadRow(NamedTuple):
    """A row that gives no document, and why. `masked`: nothing of it is a target, so that it is counted and skipped."""

    where: str
    reason: str
    masked: bool = False


@dataclass(frozen=True)
class RowSettings:
    """What decides the tokens of rows beside the tokenizer.

    `parse_special_tokens`: names of special tokens in texts are read as these tokens. `turns`: "together" makes one
    document of a conversation, "split" one of each assistant turn, with what stood before it. `date_string`: the day
    that templates are told where they ask, so that a conversation has the same tokens on every day.
    """

    parse_special_tokens: bool = False
    turns: Turns = "together"
    date_string: str = "26 Jul 2024"  # what Llama 3's templates write where they are told none
