"""A row of data, the samples that it becomes, the settings for that, and checks of a row's values.

A check raises what is wrong as one line. Files and tokenizers are not used here.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.data.images import SampleImage

DATE = "26 Jul 2024"  # for templates that write one: the default of Llama 3's


class RowError(Exception):
    """What is wrong with a row, in one line without its place. `masked`: only that none of its tokens is a target."""

    def __init__(self, reason: str, *, masked: bool = False) -> None:
        super().__init__(reason)
        self.masked = masked


def require_key(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key. Raises RowError if a row does not have it."""
    if key not in values:
        kind = "an object with a string" if key in ("text", "prompt", "completion") else "an object with"
        raise RowError(f'needs {kind} "{key}"; found keys {sorted(values)}')
    return values[key]


def require_string(value: Any, name: str) -> str:
    """Return a text of a row. Raises RowError for another type, and for a lone surrogate."""
    if not isinstance(value, str):
        raise RowError(f'needs an object with a string "{name}"; "{name}" is {type_name(value)}: {preview(value)}')
    check_characters(value, "its text" if name == "text" else f'its "{name}"')
    return value


def check_characters(text: str, name: str) -> None:
    """Raise RowError for a lone surrogate, which JSON can write and no tokenizer can read; it calls the text `name`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"character {error.start + 1} of {name} is \\u{ord(text[error.start]):04x}, a lone surrogate, which is "
            "half of a character; write both halves, or leave it out"
        ) from error


def check_strings(value: Any, name: str, special: re.Pattern[str] | None) -> None:
    """Raise RowError for a string in a value that has a lone surrogate, or a name of a token that `special` matches.

    None for `special`: names are not looked for. `name` is what messages call the value.
    """
    for path, text in strings(value, name):
        check_characters(text, path)
        if special is not None and (match := special.search(text)):
            raise RowError(
                f"{path} holds {match.group()!r}, which the tokenizer reads as a special token, such as one that ends "
                "a turn; leave it out, or let it be one with data.parse_special_tokens = true"
            )


def strings(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield every string in a JSON value, keys of objects too, with its place: `messages[2].content`."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield f"a key of {name}", str(key)
            yield from strings(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from strings(inner, f"{name}[{i}]")


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every string in it changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(str(key)): map_strings(inner, change) for key, inner in value.items()}
    return [map_strings(inner, change) for inner in value] if isinstance(value, list) else value


def type_name(value: Any) -> str:
    """Return the name of a JSON value's type."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {str: "a string", list: "a list", dict: "an object"}.get(type(value), "a number")


def preview(value: Any) -> str:
    """Return the beginning of a value, for a message."""
    return json.dumps(value, default=str)[:60]


Turns = Literal["together", "split"]


class Row(NamedTuple):
    """One row of data as in its file, with its place: `Row("chat.jsonl, line 7", {"messages": […]})`.

    Relative paths of images begin in `folder`, the folder of its file.
    """

    where: str
    values: Mapping[str, Any]
    folder: str = ""


class Unseen(NamedTuple):
    """Counts of what is no target in a document's assistant turns: thoughts and other texts that the template leaves
    out, wholly or in part, and turns that are blank. `others` names what else it leaves out, as "developer message"."""

    unseen_thoughts: int = 0
    unseen_texts: int = 0
    blank_turns: int = 0
    others: tuple[str, ...] = ()


class Sample(NamedTuple):
    """The tokens of one document (n,), and its labels (n,), −100 for tokens that are no targets.

    Labels are not shifted, as in Hugging Face's. None: every token except the first is a target. `row` is the index of
    its row among those that were encoded together: a conversation that is split gives several samples.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64] | None = None
    row: int = 0
    unseen: Unseen = Unseen()
    images: tuple[SampleImage, ...] = ()


class BadRow(NamedTuple):
    """A row that gives no document, with the reason. `masked`: none of its tokens is a target; it is only counted."""

    where: str
    reason: str
    masked: bool = False


@dataclass(frozen=True)
class RowSettings:
    """What decides the tokens of rows in addition to the tokenizer.

    `parse_special_tokens`: names of special tokens in texts are read as these tokens. `turns`: "together" makes one
    document of a conversation, "split" one of each assistant turn with the messages before it. `end_of_chat`: the
    name of a token behind the answer that ends a conversation, where the template writes none. `columns`: entries
    OURS=THEIRS, by which columns are renamed before rows are encoded (`formats.rename_columns`).
    """

    parse_special_tokens: bool = False
    turns: Turns = "together"
    end_of_chat: str = ""
    columns: tuple[str, ...] = ()

    @property
    def deciding_values(self) -> dict[str, Any]:
        """The values by name; those that came with version 0.4 only where they are set, so that old corpora fit."""
        values = {"parse_special_tokens": self.parse_special_tokens, "turns": self.turns, "date_string": DATE}
        values |= {"end_of_chat": self.end_of_chat} if self.end_of_chat else {}
        return values | ({"columns": [*self.columns]} if self.columns else {})
