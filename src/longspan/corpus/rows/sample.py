"""A row of data, what it becomes, and how that may be set. Nothing here reads files or knows a tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

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


class SampleImage(NamedTuple):
    """An image of a document: `rows` placeholders, of which the first stands at `start` and the last before `stop`.

    `grid` is that of its patches (0, 0, 0: it has none). It is that `number` of the images of its row, from 0: the file
    `path`, or bytes of the row where that is empty; `bytes` and `modified_ns` are what that was like when it was read.
    The conversation or text that it stands in has images `among` which it is, itself counted.

    A group of frames of a video is one too: that `number` of the videos of its row, from its `frame` on, with the paths
    of its frames in one text (`video_file.py`) and the `seconds` from one group to the next. `frame` −1: an image.
    """

    start: int
    stop: int
    rows: int
    grid: tuple[int, int, int]
    number: int
    path: str
    bytes: int
    modified_ns: int
    among: int = 1
    frame: int = -1
    seconds: float = 0.0


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
