"""Kinds of rows: which keys each has, and checks that a row is of one kind without keys that nothing reads."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from longspan.corpus.rows.sample import Row
from longspan.corpus.rows.values import RowError, has_value, strings_with_places
from longspan.data.manifest import PAIRS
from longspan.errors import DataError

Kind = Literal[
    "text", "messages", "prompt+completion", "input_ids", "conversations", "instruction+output", "chosen+rejected"
]
CHATS: tuple[Kind, ...] = ("messages", "conversations", "instruction+output")  # the last two are read as messages
KEYS: dict[Kind, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt+completion": ("prompt", "completion"),
    "input_ids": ("input_ids",),
    "conversations": ("conversations",),
    "instruction+output": ("instruction", "output"),
    PAIRS: ("chosen", "rejected"),
}
# Together with input_ids, also in other formats: 1 for each token that is a target, else 0.
MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "assistant_tokens_mask")
_BESIDE: dict[Kind, tuple[str, ...]] = {
    "messages": ("system",),
    "conversations": ("system",),
    "prompt+completion": ("system",),
    "instruction+output": ("input", "history", "system"),
    "input_ids": ("attention_mask", "seq_lengths", "position_ids"),
    PAIRS: ("margin",),
}
# Keys that hold the prompt of a pair, of which the first that a row has is read, and what is read beside it.
_PAIR_PROMPTS: dict[str, tuple[str, ...]] = {
    "prompt": ("system",),
    "conversations": ("system",),
    "messages": ("system",),
    "question": ("system",),
    "instruction": ("input", "history", "system"),
}
# Rows may have these keys beside those of any kind.
MEDIA_KEYS = {kind: (f"{kind}s", kind) for kind in ("image", "video", "audio")}
# These columns are read, with any row.
COLUMNS = (
    *(key for keys in KEYS.values() for key in keys),
    *("input", "history", "system", "question", "label", "kto_tag", "margin", "labels", *MASKS, "attention_mask"),
    *("tools", "chat_template_kwargs"),
    *(key for keys in MEDIA_KEYS.values() for key in keys),
)
KIND_TEXTS: dict[str, str] = {
    "text": "text",
    "messages": "messages (chat)",
    "prompt+completion": "prompt and completion",
    "input_ids": "input_ids (tokens)",
    "conversations": "conversations (chat, as ShareGPT has it)",
    "instruction+output": "instruction and output (chat, as Alpaca has it)",
    PAIRS: "chosen and rejected (pairs)",
}
# ms-swift replaces them by the words and boxes of `objects`.
_OBJECT_MARKS = ("<ref-object>", "<bbox>")
_HINTS = {
    "chosen": "; the other answer of a pair is called rejected",
    "rejected": "; the other answer of a pair is called chosen",
    "instruction": "; its answer is called output",
}
_KEYS_TEXT = "text, messages, prompt and completion, input_ids, conversations, instruction and output, "
_KEYS_TEXT += "or chosen and rejected"
_COLUMNS = '; data.rename_columns gives columns other names, as ["prompt=question", "completion=answer"]'
# Keys of a row that may hold tools, and what the JSON of their schemas has, perhaps inside of strings.
_TOOL_KEYS = re.compile(r"(?i).*(tool|func|plugin).*|(.*_)?apis?(_.*)?")
_SCHEMA = re.compile(r'\\*"(name|function|description|parameters|input_?schema)\\*"\s*:', re.IGNORECASE)
# rows of text, of input_ids, and any others; a message of a chat
Place = Literal["text", "tokens", "chat", "message"]

# Keys (a pattern) by which other trainers act: where they would stand, and why nothing is done here; the only table of
# them. Beside text only masks are refused: all of a text is learnt, and a label or a weight may be a column for
# something else.
_REFUSED_KEYS: tuple[tuple[tuple[Place, ...], str, str], ...] = (
    (("text", "tokens", "chat"), r".*masks?", f"masks are read beside input_ids alone, as {', '.join(MASKS)}"),
    (
        ("tokens", "chat"),
        r"labels?|kto_tag",
        "a label of a document, label, is learnt by a model that scores (model.num_labels), or judges an answer "
        '(train.loss = "kto"), and stands in no pair; labels of tokens stand beside input_ids, as labels',
    ),
    (
        ("tokens", "chat"),
        r"(chosen|rejected)(_.*)?",
        "pairs are rows with both chosen and rejected (docs/preferences.md)",
    ),
    (
        ("tokens", "chat"),
        r"(loss_|sample_)?weights?|loss_scale",
        "rows have no weights; give a source a weight (data.sources)",
    ),
    (
        ("chat",),
        r"system(_prompt|_message)?|history",
        "a chat has it as system, and one with instruction also history; write it as the first messages, or into the "
        "prompt",
    ),
    (("chat",), r"functions?|function_calls?|tool", "give schemas as tools, and calls as tool_calls of a message"),
    (
        ("chat",),
        r"enable_thinking|thinking(_.*)?|reasoning_(effort|budget|mode)|documents|chat_template|response_format",
        "the template of the tokenizer's folder writes conversations, and what it takes stands in chat_template_kwargs",
    ),
    (
        ("message",),
        r".*masks?|masked|train(ing)?_detail|loss_.*|.*_weight|eo[tm]",
        "say with weight 0 that the whole message is no target, or give input_ids with labels",
    ),
    (("message",), r"function_call", 'give it as tool_calls: [{"function": …}]'),
    (("message",), r"reasoning_details|thoughts?|thinking_blocks", "give a thought as reasoning_content"),
)


def row_kind(row: Row) -> Kind:
    """Return the kind of a row by its keys. Raises DataError for one of no kind, or of several."""
    kinds = _kinds_of_row(row.values)
    if len(kinds) > 1:
        raise DataError(f"{row.where} {_several_kinds_text(kinds)}")
    if not kinds:
        hint = next((hint for key, hint in _HINTS.items() if key in row.values), _COLUMNS)
        raise DataError(f"{row.where}: needs {_KEYS_TEXT}; found keys {sorted(row.values)}{hint}")
    return kinds[0]


def check_objects(values: Mapping[str, Any]) -> None:
    """Raise RowError for texts that name words or boxes (ms-swift's `objects`), which are not inserted."""
    keys = ("messages", "prompt", "completion") if values.get("objects") else ()
    named_texts = (named_text for key in keys for named_text in strings_with_places(values.get(key), key))
    for path, text in named_texts:
        if name := next((name for name in _OBJECT_MARKS if name in text), None):
            raise RowError(
                f'{path} holds {name}, for which "objects" has words or boxes that are not put in here; write them '
                "into the text as the model takes them"
            )


def check_keys(values: Mapping[str, Any], kind: Kind, *, scored: bool = False) -> None:
    """Raise RowError for a row of several kinds, and for a key that has an effect elsewhere and none here.

    `scored`: its label is read.
    """
    if len(kinds := _kinds_of_row(values)) > 1:
        raise RowError(_several_kinds_text(kinds))
    chat = is_chat(values, kind)
    readable = readable_keys(values, kind, scored=scored, media=True)
    places: dict[Kind, Place] = {"text": "text", "input_ids": "tokens"}
    for key, why in refused_keys(values, places.get(kind, "chat")):
        if key not in readable:
            raise RowError(f'"{key}" stands beside {KIND_TEXTS[kind]}, and is not read: {why}; leave the key out')
    if not chat or values.get("tools"):
        return
    for key in values:  # tools under another name
        if (
            key not in readable
            and _TOOL_KEYS.fullmatch(key)
            and _SCHEMA.search(json.dumps(values[key], default=str))
        ):
            raise RowError(
                f'"{key}" stands beside {KIND_TEXTS[kind]}, and holds tools, which are read as tools: '
                f'data.rename_columns = ["tools={key}"] renames it, and ["{key}="] leaves it out'
            )


def readable_keys(values: Mapping[str, Any], kind: Kind, *, scored: bool, media: bool) -> frozenset[str]:
    """Return the keys that are read of a row of a kind: with `scored` its label too, with `media` images and videos."""
    prompt_key = pair_prompt_key(values) if kind == PAIRS else None
    return _readable_keys(kind, prompt_key, scored, is_chat(values, kind), media)


@cache
def _readable_keys(kind: Kind, prompt_key: str | None, scored: bool, chat: bool, media: bool) -> frozenset[str]:
    keys = [*KEYS[kind], *_BESIDE.get(kind, ())]
    keys += [prompt_key, *_PAIR_PROMPTS[prompt_key]] if prompt_key is not None else []
    keys += ["tools", "chat_template_kwargs"] if chat else []
    keys += ["labels", *MASKS] if kind == "input_ids" and not scored else []
    keys += ["label", "kto_tag"] if scored and kind != PAIRS else []
    keys += [key for names in MEDIA_KEYS.values() for key in names] if media else []
    return frozenset(keys)


def is_chat(values: Mapping[str, Any], kind: Kind) -> bool:
    """Return whether a row is a conversation: by its kind or, of a prompt with a completion and of a pair, if one of
    its texts is a list of messages or a message, and of a pair also by where its prompt is.
    """
    if kind not in ("prompt+completion", PAIRS):
        return kind in CHATS
    if kind == PAIRS and pair_prompt_key(values) not in (None, "prompt"):
        return True
    return any(isinstance(values.get(key), list | dict) for key in ("prompt", *KEYS[kind]))


def pair_prompt_key(values: Mapping[str, Any]) -> str | None:
    """Return the key that holds the prompt of a pair; None where its answers begin with it.

    In ultrafeedback_binarized messages are a copy of what is chosen.
    """
    for key in _PAIR_PROMPTS:
        is_copy = key == "messages" and values.get(key) == values.get("chosen")
        if has_value(values.get(key)) and not is_copy:
            return key
    return None


def refused_keys(values: Mapping[str, Any], place: Place) -> Iterator[tuple[str, str]]:
    """Yield the keys of a row or message that are refused in such a place, with why; a key without a value, such as
    [], is none of them.
    """
    rules = [(pattern, why) for places, pattern, why in _REFUSED_KEYS if place in places]
    for key, value in values.items():
        if has_value(value):
            yield from ((key, why) for pattern, why in rules if re.fullmatch(pattern, key))


def _kinds_of_row(values: Mapping[str, Any]) -> list[Kind]:
    """A chat beside a pair is its prompt, and no kind."""
    kinds: list[Kind] = [kind for kind, keys in KEYS.items() if all(values.get(key) is not None for key in keys)]
    return [kind for kind in kinds if PAIRS not in kinds or kind not in ("messages", "conversations")]


def _several_kinds_text(kinds: Sequence[Kind]) -> str:
    kind_texts = " and also ".join(KIND_TEXTS[kind] for kind in kinds)
    ways = list[str]()
    for kind in kinds:
        read = {*KEYS[kind], *(_PAIR_PROMPTS if kind == PAIRS else ())}  # a pair keeps its prompt
        others = [key for other in kinds for key in KEYS[other] if key not in read]
        ways.append(f"{json.dumps([f'{key}=' for key in others])} reads {KIND_TEXTS[kind]}")
    return f"holds {kind_texts}; a row is of one kind: data.rename_columns = {', and '.join(ways)}"


def has_media_keys(values: Mapping[str, Any]) -> bool:
    """Return whether a row has a key of images, videos or audio, with or without a value."""
    return any(key in values for keys in MEDIA_KEYS.values() for key in keys)


def media_key(values: Mapping[str, Any], *, lists: bool) -> str | None:
    """Return the first of "images", "videos" and "audios" of which a row has a value, under this key or its singular.

    None if there is no such value. With `lists` only values that are lists count.
    """
    entries = ((keys[0], values.get(key)) for keys in MEDIA_KEYS.values() for key in keys)
    return next((list_key for list_key, value in entries if value and (isinstance(value, list) or not lists)), None)


def rename_columns(row: Row, columns: Sequence[str]) -> Row:
    """Give columns of a row the names that are read here, by entries OURS=THEIRS; with OURS= the column is left out.

    A column that had one of our names before is left out too.
    """
    if not columns:
        return row
    pairs = [(ours, theirs) for ours, _, theirs in (column.partition("=") for column in columns)]
    gone = {name for pair in pairs for name in pair}
    values = {key: value for key, value in row.values.items() if key not in gone}
    return row._replace(
        values=values | {ours: row.values[theirs] for ours, theirs in pairs if theirs in row.values}
    )
