"""Rows that need no template: texts, prompts with completions, and tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.corpus.rows.kinds import MASKS, check_keys
from longspan.corpus.rows.sample import BadRow, Row, Sample
from longspan.corpus.rows.values import RowError, kind_of_value, needed, shown, string
from longspan.corpus.tokenizer import TextTokenizer
from longspan.data.document import NO_TARGET


def encode_texts(rows: Sequence[Row], tokenizer: TextTokenizer) -> list[Sample | BadRow]:
    """Texts with what the tokenizer puts around them; every token is a target."""
    texts, results = list[str](), list[BadRow | None]()
    for row in rows:
        try:
            check_keys(row.values, "text")
            texts.append(string(needed(row.values, "text"), "text"))
            results.append(None)
        except RowError as error:
            results.append(BadRow(row.where, str(error)))
    encoded = iter(tokenizer.encode(texts))
    return [Sample(next(encoded), row=i) if bad is None else bad for i, bad in enumerate(results)]


def completion_sample(values: Mapping[str, Any], tokenizer: TextTokenizer) -> Sample:
    """Prompt and completion tokenized as one text, with what the tokenizer puts around it.

    Targets are the tokens that have a character of the completion (one across the border too), and the end of text.
    """
    prompt, completion = (string(needed(values, key), key) for key in ("prompt", "completion"))
    encoding = tokenizer.engine.encode(prompt + completion, add_special_tokens=False)
    (opening, closing), end = tokenizer.around, tokenizer.end_of_text
    said = [stop > len(prompt) for _, stop in encoding.offsets]
    ids = np.array([*opening, *encoding.ids, *closing, *end], dtype=np.int64)
    mask = np.array([*([False] * len(opening)), *said, *([True] * len([*closing, *end]))])
    return Sample(ids, np.where(mask, ids, NO_TARGET))


def token_sample(values: Mapping[str, Any], vocabulary: int) -> Sample:
    """Tokens as they are, with the labels or the masks beside them: a token is a target where no mask has a 0."""
    ids = _integers(needed(values, "input_ids"), "input_ids")
    if not len(ids):
        raise RowError("input_ids has no tokens; leave the row out")
    _check_ids(ids, "input_ids", vocabulary)
    labels, masks = values.get("labels"), [name for name in MASKS if values.get(name) is not None]
    if labels is not None and masks:
        raise RowError(f"labels and {masks[0]} both say which tokens are targets; give one of them")
    _check_one_document(values, len(ids))
    padding = values.get("attention_mask")
    if padding is not None and not all(padding):
        raise RowError(f"attention_mask masks {list(padding).count(0)} tokens of padding; leave the padding out")
    if labels is not None:
        targets = _of_length(_integers(labels, "labels"), "labels", len(ids))
        _check_ids(targets[targets != NO_TARGET], "labels", vocabulary)
        return Sample(ids, targets)
    if not masks:
        return Sample(ids)
    learnt = np.logical_and.reduce([_mask(values[name], name, len(ids)) for name in masks])
    return Sample(ids, np.where(learnt, ids, NO_TARGET))


def _check_one_document(values: Mapping[str, Any], length: int) -> None:
    """Raise RowError where keys of packed rows say that a row holds several documents, which would see each other."""
    parts, positions = values.get("seq_lengths"), values.get("position_ids")
    hint = "give each a row of its own, steps pack rows themselves"
    if parts is not None and len(_integers(parts, "seq_lengths")) > 1:
        raise RowError(f"seq_lengths says that the row holds {len(parts)} documents; {hint}")
    if positions is not None and not np.array_equal(_integers(positions, "position_ids"), np.arange(length)):
        raise RowError(
            f"position_ids are not 0 to {length - 1}, as those of one document are; {hint}, or leave them out"
        )


def _mask(values: Any, name: str, length: int) -> npt.NDArray[np.bool_]:
    mask = _of_length(_integers(values, name), name, length)
    if bad := [int(value) for value in mask if value not in (0, 1)]:
        raise RowError(f"{name} holds {bad[0]}; give a 0 or a 1 for each token")
    return mask == 1


def _integers(values: Any, name: str) -> npt.NDArray[np.int64]:
    if not isinstance(values, list | np.ndarray):
        raise RowError(f"{name} is {kind_of_value(values)}; give a list of integers: {shown(values)}")
    array = np.asarray(values) if len(values) and not _ragged(values) else np.asarray(values or [], dtype=object)
    if len(array) and (array.ndim != 1 or array.dtype.kind not in "iub"):
        raise RowError(f"{name} holds something else than integers; give a list of integers: {shown(list(values))}")
    return array.astype(np.int64)


def _ragged(values: Any) -> bool:
    return any(isinstance(value, list | dict | str | type(None)) for value in values)


def _of_length(values: npt.NDArray[np.int64], name: str, length: int) -> npt.NDArray[np.int64]:
    if len(values) != length:
        raise RowError(f"{name} has {len(values)} entries for {length} input_ids; give one each")
    return values


def _check_ids(ids: npt.NDArray[np.int64], name: str, vocabulary: int) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(wrong):
        raise RowError(
            f"{name} holds {ids[wrong[0]]} at {wrong[0]}, and the tokenizer has ids 0 to {vocabulary - 1}; tokenize "
            "with the model's own tokenizer"
        )
