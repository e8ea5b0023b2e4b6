"""Which kind of rows a file holds, seen from their keys. What the keys hold is checked where rows are encoded."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from longspan.errors import DataError
from longspan.train.data.rows.sample import Row
from longspan.train.data.rows.values import RowError, strings

Kind = Literal["text", "messages", "prompt+completion", "input_ids"]
KEYS: dict[Kind, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt+completion": ("prompt", "completion"),
    "input_ids": ("input_ids",),
}
_SHOWN: dict[Kind, str] = {
    "text": "text",
    "messages": "messages (chat)",
    "prompt+completion": "prompt and completion",
    "input_ids": "input_ids (tokens)",
}
_REJECTED = ("rejected_response", "rejected_messages")  # ms-swift's, as are `objects` and what names them
_OF_OBJECTS = ("<ref-object>", "<bbox>")
_HINTS = {
    "conversations": '; rename it to messages, each turn as {"role": …, "content": …}',
    "chosen": "; pairs of answers are for a loss of one's own (docs/losses.md)",
    "instruction": "; write it as prompt, or as the first of messages",
}


def kind_of(rows: Sequence[Row]) -> Kind:
    """The kind of rows, which all of them must have; keys of no kind are left alone.

    Raises DataError for a row of no kind or of two, and for rows of different kinds, with both places.
    """
    if not rows:
        raise DataError("there are no rows; give rows with one of: " + _kinds())
    kind, first = kind_of_row(rows[0]), rows[0]
    for row in rows[1:]:
        if (other := kind_of_row(row)) != kind:
            raise DataError(
                f"{row.where} holds {_SHOWN[other]}, and {first.where} holds {_SHOWN[kind]}; rows of one source must "
                "be of one kind: give each kind a source of its own"
            )
    return kind


def kind_of_row(row: Row) -> Kind:
    """The kind of one row. Raises DataError where its keys are of no kind, or of two."""
    kinds: list[Kind] = [kind for kind, keys in KEYS.items() if all(row.values.get(key) is not None for key in keys)]
    if len(kinds) > 1:
        raise DataError(
            f"{row.where} holds {' and also '.join(_SHOWN[kind] for kind in kinds)}; a row is of one kind: leave the "
            "others out"
        )
    if not kinds:
        hint = next((hint for key, hint in _HINTS.items() if key in row.values), "")
        raise DataError(f"{row.where}: needs {_kinds()}; found keys {sorted(row.values)}{hint}")
    return kinds[0]


def check_other_keys(values: Mapping[str, Any]) -> None:
    """Raise RowError for keys of other trainers without which the texts of a conversation say something else."""
    if pair := next((key for key in _REJECTED if values.get(key)), None):
        raise RowError(
            f'it has "{pair}", and a pair of answers is for a loss of one\'s own (docs/losses.md); to train on its '
            "messages alone leave the key out"
        )
    keys = ("messages", "prompt", "completion") if values.get("objects") else ()
    for where, text in (place for key in keys for place in strings(values.get(key), key)):
        if name := next((name for name in _OF_OBJECTS if name in text), None):
            raise RowError(
                f'{where} holds {name}, for which "objects" has words or boxes that are not put in here; write them '
                "into the text as the model takes them"
            )


def rows_hold(kind: Kind) -> str:
    """What a user is told of a kind: "rows hold messages (chat)"."""
    return f"rows hold {shown_kind(kind)}"


def shown_kind(kind: str) -> str:
    """What a user is told in place of the name of a kind."""
    return next((shown for name, shown in _SHOWN.items() if name == kind), kind)


def _kinds() -> str:
    return "text, or messages, or prompt and completion, or input_ids"
