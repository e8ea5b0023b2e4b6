"""A row of data, the samples that it becomes, and the settings by which it does."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.config.preference_losses import RowForm
from longspan.data.image_table import SampleImage
from longspan.layout import Integers

# Templates that write a date get the default of Llama 3's.
DATE = "26 Jul 2024"


Turns = Literal["together", "split"]


class Row(NamedTuple):
    """One row of data as in its file, with its place: `Row("chat.jsonl, line 7", {"messages": […]})`.

    Relative paths of images begin in `folder`, the folder of its file.
    """

    where: str
    values: Mapping[str, Any]
    folder: str = ""


class UnseenCounts(NamedTuple):
    """Counts of what is no target in a document's assistant turns.

    `unseen_thoughts` and `unseen_texts` are those that the template leaves out, wholly or in part. `others` names what
    it leaves out of other messages, as "developer message". `inside_tokens` counts answers that begin inside a token.
    """

    unseen_thoughts: int = 0
    unseen_texts: int = 0
    blank_turns: int = 0
    others: tuple[str, ...] = ()
    inside_tokens: int = 0


def count_borders_inside_tokens(spans: Integers, borders: Iterable[int]) -> int:
    """Count the borders that lie inside a token, by the characters (n, 2) of each token."""
    return sum(bool(((spans[:, 0] < border) & (border < spans[:, 1])).any()) for border in borders)


class Sample(NamedTuple):
    """The tokens (n,) of one document, or of a pair, and its labels (n,), −100 for none, not shifted.

    Without labels every token but the first is a target.

    `row` is the index of its row among those that were encoded together: a split conversation gives several samples.
    `numbers` are the label of a document that is scored, or of an answer for KTO (1.0: it is wanted); of a pair its
    margin, or for ORPO where the chosen answer begins. `stops` are the ends of documents that are not cut, of a pair
    two; () for documents that may be cut. `ends` are the tokens, ids by name, at which what it teaches to say ends.
    `context` are the places of tokens in answers of a preference that its row keeps out of the targets.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64] | None = None
    row: int = 0
    unseen: UnseenCounts = UnseenCounts()
    images: tuple[SampleImage, ...] = ()
    numbers: tuple[float, ...] = ()
    stops: tuple[int, ...] = ()
    ends: tuple[tuple[str, int], ...] = ()
    context: tuple[int, ...] = ()


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
    OURS=THEIRS, by which columns are renamed before rows are encoded (`kinds.rename_columns`). `num_labels`: how many
    scores a model makes of a row's document, which needs a label or stands in a pair; 0: of a language model.
    `preference`: what rows become for a loss of preferences.
    """

    parse_special_tokens: bool = False
    turns: Turns = "together"
    end_of_chat: str = ""
    columns: tuple[str, ...] = ()
    num_labels: int = 0
    preference: RowForm = ""
