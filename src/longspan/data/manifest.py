"""The JSON files of a corpus.

A folder of documents has a manifest (`corpus.json`) and its source files (`sources.jsonl`, `sources.npy`). A run's
folder has a record (`corpus.json` too), which names the folder of documents.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from longspan.data.array_files import GrowingArray, map_array
from longspan.errors import DataError
from longspan.files import parse_json, read_json

FILE = "corpus.json"
PAIRS = "chosen+rejected"  # the kind of rows that become two documents each, one after the other
SHORTEST = 2  # tokens of a document: a single token predicts nothing
# sources.npy has this type.
_ENDS_TYPE = "<i8"
# Keys whose values are lists in JSON.
_TUPLES = ("kinds", "skipped", "bad", "columns")


@dataclass(frozen=True)
class LeftOut:
    """Counts of what a build cut or left out."""

    cut_texts: int = 0
    # These are the tokens of the texts that were cut.
    cut_tokens: int = 0
    # These are the documents into which those texts were cut.
    cut_documents: int = 0
    short_texts: int = 0
    # These are the tokens of short texts, and of ends of cut texts.
    lost_tokens: int = 0
    # These parts of cut texts are documents without a target.
    masked_parts: int = 0
    masked_rows: int = 0
    bad_rows: int = 0
    # The chat template left out these thoughts of assistant turns.
    unseen_thoughts: int = 0
    unseen_texts: int = 0  # answers and tool calls, likewise
    # These turns of assistants have neither text nor tool calls.
    blank_turns: int = 0
    inside_tokens: int = 0  # answers that begin inside a token of the prompt


@dataclass(frozen=True)
class Manifest:
    """What a folder of documents contains: kinds of rows of each source, counts, and what was left out.

    `labels` is how many numbers each document has: for a model that scores, those of its label or the margin of its
    pair, for a loss of preferences (`preference`) what that reads; 0 for a language model. `pad_id` is the tokenizer's
    token for padding, else for the end of a text (-1: none).

    `largest_id` is the largest token id, `largest_at` a row with it. `ends` are special tokens that end answers, and
    their ids. `unseen` counts what chat templates leave out beside assistant turns, `unread` rows with a key that
    nothing reads. `codes` is the type of the tokens' codes (empty: none).
    """

    tokenizer_size: int
    dtype: str
    kinds: tuple[str, ...] = ("text",)
    codes: str = ""
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    images: int = 0
    labels: int = 0
    preference: str = ""
    pad_id: int = -1
    largest_id: int = -1
    largest_at: str = ""
    skipped: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    ends: dict[str, int] = field(default_factory=dict[str, int])
    unseen: dict[str, int] = field(default_factory=dict[str, int])
    unread: dict[str, int] = field(default_factory=dict[str, int])
    left_out: LeftOut = field(default_factory=LeftOut)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read what `to_json` wrote; keys of an earlier version are left out.

        Raises KeyError, TypeError or ValueError for a text that is no manifest.
        """
        values: dict[str, Any] = parse_json(text)
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        present = {key.name: values[key.name] for key in fields(cls) if key.name in values}
        present |= {key: tuple(present[key]) for key in present.keys() & {*_TUPLES}}
        return cls(**{**present, "left_out": LeftOut(**present.pop("left_out", {}))})


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder of documents. Raises DataError where it is damaged, OSError where it is missing."""
    file = folder / FILE
    try:
        return Manifest.from_json(file.read_text(encoding="utf-8"))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{file} is damaged: {error}; restore it, or remove {folder}, which a new run builds again"
        ) from error


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus as it was when it was read."""

    name: str
    bytes: int
    modified_ns: int
    sha256: str
    path: str = ""


class SourceFiles:
    """The source files of a corpus; each is read from `sources.jsonl` when it is used.

    The file is mapped, so an open corpus can be read after its folder was removed.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = np.memmap(folder / "sources.jsonl", mode="r")
        self._ends = map_array(folder / "sources.npy", _ENDS_TYPE)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> SourceFile:
        """Read one file's line. Raises DataError if it is damaged."""
        if not 0 <= index < len(self):
            raise IndexError(f"file {index} of {len(self)}")
        start = int(self._ends[index - 1]) if index else 0
        try:
            return SourceFile(**parse_json(self._lines[start : int(self._ends[index])].tobytes()))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"sources.jsonl of the corpus is damaged in its line {index + 1}: {error}; remove its folder, and it "
                "is built again"
            ) from error

    def __iter__(self) -> Iterator[SourceFile]:
        return (self[i] for i in range(len(self)))

    @staticmethod
    def write(folder: Path, sources: Iterable[SourceFile]) -> None:
        """Write `sources.jsonl`, and where each of its lines ends (`sources.npy`)."""
        ends = GrowingArray(folder / "sources.npy", _ENDS_TYPE)
        end = 0
        with (folder / "sources.jsonl").open("wb") as file:
            for source in sources:
                end += file.write(json.dumps(asdict(source)).encode() + b"\n")
                ends.append(np.array([end]))
        ends.close()


@dataclass(frozen=True)
class Record:
    """Which documents a run has, and what they were made with.

    `documents` is their folder (a relative one begins at the record's), `key` the key of their manifest, `asked` the
    keys of the configuration that decide them, with their values, and `around` the tokens before and after a text.
    """

    documents: str
    key: str
    asked: dict[str, Any]
    tokenizer_digest: str
    tokenizer_size: int
    around: tuple[str, ...]

    def sources(self, folder: Path) -> SourceFiles | None:
        """Return the files that the documents were made from; None if the documents are gone or damaged."""
        try:
            return SourceFiles(folder / self.documents)
        except (OSError, ValueError):
            return None


def read_record(folder: Path) -> Record | None:
    """Read the record in a run's folder of a corpus; None if there is none, or it is damaged."""
    try:
        values: dict[str, Any] = read_json(folder / FILE)
        kinds = {"documents": str, "asked": dict, "around": tuple}
        return Record(**{**values, **{name: kind(values[name]) for name, kind in kinds.items()}})
    except (OSError, KeyError, TypeError, ValueError):
        return None
