"""The JSON files of a corpus: the manifest of its documents, the record of its run, and the files that it was made
from.

A folder of documents has a manifest (`corpus.json`) and its source files (`sources.jsonl`, `sources.npy`). A run's
folder has a record (`corpus.json` too), which names the folder of documents. This is version 0.1 of the format, which
later versions read.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, overload

import numpy as np

from longspan.data.arrays import GrowingArray, map_array
from longspan.errors import DataError
from longspan.files import parse_json, read_json

FILE = "corpus.json"
SHORTEST = 2  # tokens of a document: a single token predicts nothing
_TUPLES = ("kinds", "skipped", "opening", "closing", "bad", "encodings")  # keys whose values are lists in JSON


@dataclass(frozen=True)
class LeftOut:
    """Counts of what a build cut or left out."""

    cut_texts: int = 0
    cut_tokens: int = 0  # of these texts
    cut_documents: int = 0  # into which they were cut
    short_texts: int = 0
    lost_tokens: int = 0  # of short texts, and of ends of cut texts
    masked_parts: int = 0  # of cut texts: documents without a target
    masked_rows: int = 0
    bad_rows: int = 0
    unseen_thoughts: int = 0  # of assistant turns, left out by the chat template
    unseen_texts: int = 0  # answers and tool calls, likewise
    blank_turns: int = 0  # of assistants, with neither text nor tool calls


@dataclass(frozen=True)
class Manifest:
    """What a folder of documents contains: kinds of rows of each source, counts, and what was left out.

    `key` is a digest of everything that decides the documents. Every text begins with the tokens `opening` and ends
    with `closing`. `largest_at` is the row with the token `largest_id`. `special` counts the names of special tokens in
    texts, `names_as_text` the texts in which `<image>` and the like are plain text, `unseen` what chat templates leave
    out beside assistant turns. `dtype` is the type of tokens (empty: none are stored, and rows are read again), `codes`
    that of their codes (empty: none).
    """

    tokenizer_digest: str
    tokenizer_size: int
    dtype: str
    max_document_tokens: int
    key: str = ""
    kinds: tuple[str, ...] = ("text",)
    encodings: tuple[str, ...] = ()
    codes: str = ""
    files: int = 0
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    targets: int = 0
    images: int = 0
    largest_id: int = -1
    largest_at: str = ""
    skipped: tuple[str, ...] = ()
    parse_special_tokens: bool = False
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    special: dict[str, int] = field(default_factory=dict[str, int])
    bad: tuple[str, ...] = ()
    names_as_text: dict[str, int] = field(default_factory=dict[str, int])
    unseen: dict[str, int] = field(default_factory=dict[str, int])
    left_out: LeftOut = field(default_factory=LeftOut)

    def to_json(self) -> str:
        """Return the manifest as JSON; `from_json` gives an equal one back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read a manifest from JSON. Raises KeyError, TypeError or ValueError if the text is no manifest."""
        values: dict[str, Any] = parse_json(text)
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        for key in values.keys() & {*_TUPLES}:
            values[key] = tuple(values[key])
        return cls(**{**values, "left_out": LeftOut(**values.pop("left_out", {}))})


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus as it was when it was read."""

    name: str
    bytes: int
    modified_ns: int
    sha256: str
    path: str = ""


class SourceLines(Sequence[SourceFile]):
    """The source files of a corpus; each is read from `sources.jsonl` when it is used.

    The file is mapped, so an open corpus can be read after its folder was removed.
    """

    def __init__(self, folder: Path) -> None:
        self._lines, self._ends = np.memmap(folder / "sources.jsonl", mode="r"), map_array(folder / "sources.npy")

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> SourceFile: ...
    @overload
    def __getitem__(self, index: slice) -> list[SourceFile]: ...
    def __getitem__(self, index: int | slice) -> SourceFile | list[SourceFile]:
        """Read the source file of an index, or those of a slice. Raises DataError for a damaged line."""
        if isinstance(index, slice):
            return [cast(SourceFile, self[i]) for i in range(*index.indices(len(self)))]
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
        """Write a line about each source file into the folder of a corpus, and where each line ends."""
        ends, end = GrowingArray(folder / "sources.npy", "<i8"), 0
        with (folder / "sources.jsonl").open("wb") as file:
            for source in sources:
                end += file.write(json.dumps(asdict(source)).encode() + b"\n")
                ends.append(np.array([end]))
        ends.close()


@dataclass(frozen=True)
class Record:
    """Which documents a run has, and what they were made with.

    `documents` is their folder (a relative one begins at the record's), `key` the key of their manifest, `asked` the
    keys of the configuration that decide them, with their values, and `tokenizer` the folder of the run's tokenizer.
    `row_settings` are the fields of `RowSettings`, `around` the tokens before and after a text, and `generation_ends`
    the ids at which the tokenizer's model stops generating, which end turns of conversations (None: not recorded; those
    of the tokenizer's folder).
    """

    documents: str
    key: str
    asked: dict[str, Any]
    tokenizer_digest: str
    tokenizer_size: int
    around: tuple[str, ...]
    tokenizer: str = ".."
    row_settings: dict[str, Any] = field(default_factory=dict[str, Any])
    generation_ends: tuple[int, ...] | None = None

    def sources(self, folder: Path) -> Sequence[SourceFile] | None:
        """Return the files that the documents were made from; None if the documents are gone or damaged."""
        try:
            return SourceLines(folder / self.documents)
        except (OSError, ValueError):
            return None

    def to_json(self) -> str:
        """Return the record as JSON; `read_record` gives an equal one back."""
        return json.dumps(asdict(self), indent=1)


def read_record(folder: Path) -> Record | None:
    """Read the record of a folder; None if there is none that can be read."""
    try:
        values: dict[str, Any] = read_json(folder / FILE)
        around, ends = tuple(values["around"]), values.get("generation_ends")  # version 0.1 wrote no ends
        return Record(**{**values, "around": around, "generation_ends": None if ends is None else tuple(ends)})
    except (OSError, KeyError, TypeError, ValueError):
        return None
