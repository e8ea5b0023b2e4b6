"""The kind of a file's rows, decided by their keys. Values of keys are checked when rows are encoded."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from longspan.corpus.rows.sample import Row, RowError, strings
from longspan.errors import DataError

Kind = Literal["text", "messages", "prompt+completion", "input_ids", "conversations", "instruction+output"]
CHATS: tuple[Kind, ...] = ("messages", "conversations", "instruction+output")  # the last two are read as messages
KEYS: dict[Kind, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt+completion": ("prompt", "completion"),
    "input_ids": ("input_ids",),
    "conversations": ("conversations",),
    "instruction+output": ("instruction", "output"),
}
# Together with input_ids, also in other formats: 1 for each token that is a target, else 0.
MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "assistant_tokens_mask")
MEDIA_KEYS = {kind: (f"{kind}s", kind) for kind in ("image", "video", "audio")}  # beside those of any kind
COLUMNS = (  # that are read, with any row
    *(key for keys in KEYS.values() for key in keys),
    *("input", "labels", *MASKS, "attention_mask", "tools", "chat_template_kwargs"),
    *(key for keys in MEDIA_KEYS.values() for key in keys),
)
_SHOWN: dict[Kind, str] = {
    "text": "text",
    "messages": "messages (chat)",
    "prompt+completion": "prompt and completion",
    "input_ids": "input_ids (tokens)",
    "conversations": "conversations (chat, as ShareGPT has it)",
    "instruction+output": "instruction and output (chat, as Alpaca has it)",
}
_OF_OBJECTS = ("<ref-object>", "<bbox>")  # which ms-swift replaces by the words and boxes of `objects`
_HINTS = {
    "chosen": "; pairs of answers are for a loss of one's own (docs/losses.md)",
    "instruction": "; its answer is called output",
}
_COLUMNS = '; data.columns gives columns other names, as ["prompt=question", "completion=answer"]'
Place = Literal["text", "tokens", "chat", "message"]  # rows of text, of input_ids, and any others; a message of a chat


class _Unread(NamedTuple):
    """Keys (a pattern) by which other trainers act, where they would stand, and why nothing is done here."""

    places: tuple[Place, ...]
    keys: str
    why: str


# The only table of such keys. Beside text only masks are refused: all of a text is learnt, and a label or a weight may
# be a column for something else.
_UNREAD = (
    _Unread(("text", "tokens", "chat"), r".*masks?", f"masks are read beside input_ids alone, as {', '.join(MASKS)}"),
    _Unread(
        ("tokens", "chat"),
        r"labels?|kto_tag",
        "answers that are liked or not are for a loss of one's own (docs/losses.md), and labels of tokens stand beside "
        "input_ids, as labels",
    ),
    _Unread(
        ("tokens", "chat"),
        r"(chosen|rejected)(_.*)?",
        "pairs of answers are for a loss of one's own (docs/losses.md)",
    ),
    _Unread(
        ("tokens", "chat"),
        r"(loss_|sample_)?weights?|loss_scale",
        "rows have no weights; give a source a weight (data.sources)",
    ),
    _Unread(("chat",), r"system(_prompt|_message)?|history", "write it as the first messages, or into the prompt"),
    _Unread(
        ("chat",), r"functions?|function_calls?|tool", "give schemas as tools, and calls as tool_calls of a message"
    ),
    _Unread(
        ("chat",),
        r"enable_thinking|thinking(_.*)?|reasoning_(effort|budget|mode)|documents|chat_template|response_format",
        "the template of the tokenizer's folder writes conversations, and what it takes stands in chat_template_kwargs",
    ),
    _Unread(
        ("message",),
        r".*masks?|masked|train(ing)?_detail|loss_.*|.*_weight|eo[tm]",
        "say with weight 0 that the whole message is no target, or give input_ids with labels",
    ),
    _Unread(("message",), r"function_call", 'give it as tool_calls: [{"function": …}]'),
    _Unread(("message",), r"reasoning_details|thoughts?|thinking_blocks", "give a thought as reasoning_content"),
)


def common_kind(rows: Sequence[Row]) -> Kind:
    """Return the kind of rows, which must be the same for all; keys of no kind are ignored.

    Raises DataError for a row of no kind or of two, and for rows of different kinds, with both places.
    """
    if not rows:
        raise DataError("there are no rows; give rows with one of: " + _keys_text())
    kind, first = row_kind(rows[0]), rows[0]
    for row in rows[1:]:
        if (other := row_kind(row)) != kind:
            raise DataError(
                f"{row.where} holds {_SHOWN[other]}, and {first.where} holds {_SHOWN[kind]}; rows of one source must "
                "be of one kind: give each kind a source of its own"
            )
    return kind


def row_kind(row: Row) -> Kind:
    """Return the kind of one row. Raises DataError if its keys belong to no kind, or to two."""
    kinds = _kinds_in(row.values)
    if len(kinds) > 1:
        raise DataError(f"{row.where} {_several_kinds(kinds)}")
    if not kinds:
        hint = next((hint for key, hint in _HINTS.items() if key in row.values), _COLUMNS)
        raise DataError(f"{row.where}: needs {_keys_text()}; found keys {sorted(row.values)}{hint}")
    return kinds[0]


def check_objects(values: Mapping[str, Any]) -> None:
    """Raise RowError for texts that name words or boxes (ms-swift's `objects`), which are not inserted."""
    keys = ("messages", "prompt", "completion") if values.get("objects") else ()
    named_texts = (named_text for key in keys for named_text in strings(values.get(key), key))
    for path, text in named_texts:
        if name := next((name for name in _OF_OBJECTS if name in text), None):
            raise RowError(
                f'{path} holds {name}, for which "objects" has words or boxes that are not put in here; write them '
                "into the text as the model takes them"
            )


def check_keys(values: Mapping[str, Any], kind: Kind) -> None:
    """Raise RowError for a row of several kinds, and for a key that has an effect elsewhere and none here."""
    if len(kinds := _kinds_in(values)) > 1:
        raise RowError(_several_kinds(kinds))
    read_keys = ("attention_mask", "labels", *MASKS) if kind == "input_ids" else ()
    places: dict[Kind, Place] = {"text": "text", "input_ids": "tokens"}
    for key, why in _unread_keys(values, places.get(kind, "chat")):
        if key not in read_keys:
            raise RowError(f'"{key}" stands beside {_SHOWN[kind]}, and is not read: {why}; leave the key out')


def check_message_keys(message: Mapping[str, Any], name: str) -> None:
    """Raise RowError for a key of a message, which errors call `name`, that has an effect elsewhere and none here."""
    for key, why in _unread_keys(message, "message"):
        raise RowError(f"{name}.{key} is not read: {why}")


def _unread_keys(values: Mapping[str, Any], place: Place) -> Iterator[tuple[str, str]]:
    """Yield the keys that are not read in such a place, with why; one without a value, as [] or "", has no effect."""
    rules = [rule for rule in _UNREAD if place in rule.places]
    for key, value in values.items():
        if value is not None and not (isinstance(value, str | list | dict) and not value):
            yield from ((key, rule.why) for rule in rules if re.fullmatch(rule.keys, key))


def _kinds_in(values: Mapping[str, Any]) -> list[Kind]:
    return [kind for kind, keys in KEYS.items() if all(values.get(key) is not None for key in keys)]


def _several_kinds(kinds: Sequence[Kind]) -> str:
    kind_texts = " and also ".join(_SHOWN[kind] for kind in kinds)
    return f"holds {kind_texts}; a row is of one kind: leave the others out, as data.columns does"


def rows_hold(kind: Kind) -> str:
    """Return a phrase for messages: "rows hold messages (chat)"."""
    return f"rows hold {display_kind(kind)}"


def display_kind(kind: str) -> str:
    """Return the name of a kind for messages."""
    return next((text for name, text in _SHOWN.items() if name == kind), kind)


def _keys_text() -> str:
    return "text, messages, prompt and completion, input_ids, conversations, or instruction and output"


def has_media_keys(values: Mapping[str, Any]) -> bool:
    """Return whether a row has a key of images, videos or audio, with or without a value."""
    return any(key in values for keys in MEDIA_KEYS.values() for key in keys)


def media_key(values: Mapping[str, Any], *, lists: bool) -> str | None:
    """Return the first of "images", "videos" and "audios" of which a row has a value, under this key or its singular.

    None if there is no such value. With `lists` only values that are lists count.
    """
    entries = ((keys[0], values.get(key)) for keys in MEDIA_KEYS.values() for key in keys)
    return next((list_key for list_key, value in entries if value and (isinstance(value, list) or not lists)), None)
