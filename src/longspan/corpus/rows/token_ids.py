"""Rows that hold token ids, with labels or masks: they are taken as they are, once they are checked."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.corpus.rows.kinds import MASKS
from longspan.corpus.rows.sample import Sample
from longspan.corpus.rows.values import RowError, require_key, short_repr, type_name
from longspan.data.document import NO_TARGET


def take_token_ids(values: Mapping[str, Any], vocabulary_size: int) -> Sample:
    """Take tokens as they are, with labels or masks: a token is a target if no mask has a 0 for it.

    Raises RowError for no tokens, padding, several documents, and labels beside masks.
    """
    ids = _read_integers(require_key(values, "input_ids"), "input_ids")
    if not len(ids):
        raise RowError("input_ids has no tokens; leave the row out")
    _check_ids(ids, "input_ids", vocabulary_size)
    labels = values.get("labels")
    masks = [name for name in MASKS if values.get(name) is not None]
    if labels is not None and masks:
        raise RowError(f"labels and {masks[0]} both say which tokens are targets; give one of them")
    _refuse_packing_and_padding(values, len(ids))
    if labels is not None:
        targets = _checked_length(_read_integers(labels, "labels"), "labels", len(ids))
        _check_ids(targets[targets != NO_TARGET], "labels", vocabulary_size)
        return Sample(ids, targets)
    if not masks:
        return Sample(ids)
    is_target = np.ones(len(ids), dtype=bool)
    for name in masks:
        mask = _checked_length(_read_integers(values[name], name), name, len(ids))
        if bad := [int(value) for value in mask if value not in (0, 1)]:
            raise RowError(f"{name} holds {bad[0]}; give a 0 or a 1 for each token")
        is_target &= mask == 1
    return Sample(ids, np.where(is_target, ids, NO_TARGET))


def _refuse_packing_and_padding(values: Mapping[str, Any], tokens: int) -> None:
    lengths = values.get("seq_lengths")
    positions = values.get("position_ids")
    hint = "give each a row of its own, steps pack rows themselves"
    if lengths is not None and len(_read_integers(lengths, "seq_lengths")) > 1:
        raise RowError(f"seq_lengths says that the row holds {len(lengths)} documents; {hint}")
    if positions is not None and not np.array_equal(_read_integers(positions, "position_ids"), np.arange(tokens)):
        raise RowError(
            f"position_ids are not 0 to {tokens - 1}, as those of one document are; {hint}, or leave them out"
        )
    mask = values.get("attention_mask")
    if mask is not None and (padding := int((_read_integers(mask, "attention_mask") == 0).sum())):
        raise RowError(f"attention_mask masks {padding} tokens of padding; leave the padding out")


def _read_integers(values: Any, name: str) -> npt.NDArray[np.int64]:
    """An array of numpy, also of objects, counts as the list of its entries."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list):
        raise RowError(f"{name} is {type_name(values)}; give a list of integers: {short_repr(values)}")
    # numpy may fail to make an array of entries that are no numbers, such as lists of different lengths.
    are_numbers = all(isinstance(value, int | float | np.number | np.bool_) for value in values)
    array = np.asarray(values) if are_numbers else None
    if array is None or (len(array) and array.dtype.kind not in "iub"):  # numpy makes floats of an empty list
        raise RowError(f"{name} holds something else than integers; give a list of integers: {short_repr(values)}")
    return array.astype(np.int64)


def _checked_length(values: npt.NDArray[np.int64], name: str, length: int) -> npt.NDArray[np.int64]:
    if len(values) != length:
        raise RowError(f"{name} has {len(values)} entries for {length} input_ids; give one each")
    return values


def _check_ids(ids: npt.NDArray[np.int64], name: str, vocabulary_size: int) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary_size))
    if len(wrong):
        raise RowError(
            f"{name} holds {ids[wrong[0]]} at {wrong[0]}, and the tokenizer has ids 0 to {vocabulary_size - 1}; "
            "tokenize with the model's own tokenizer"
        )
