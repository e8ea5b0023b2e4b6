"""What a folder of documents says of itself, in `corpus.json`; and which files they came from, in `sources.jsonl`."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, overload

import numpy as np

from longspan.data.left_out import LeftOut
from longspan.data.store.arrays import GrowingArray, mapped
from longspan.data.store.sources import Source

_TUPLES = ("kinds", "skipped", "opening", "closing", "bad", "encodings")


@dataclass(frozen=True)
class Manifest:
    """What was made: kinds of rows of each source, counts, and what was left out.

    `key` names everything that decided it. Every text begins with the tokens `opening` (None: an older version built
    it, and did not say) and ends with `closing`; `special` says how often the names of special tokens stand in texts,
    `names_as_text` in how many texts `<image>` and the like stand for nothing that is shown.
    `dtype` is of tokens (empty: none are stored, and rows are read again), `codes` of their codes (empty: none).
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
    skipped: tuple[str, ...] = ()
    parse_special_tokens: bool = False
    opening: tuple[str, ...] | None = None
    closing: tuple[str, ...] = ()
    special: dict[str, int] = field(default_factory=dict[str, int])
    bad: tuple[str, ...] = ()
    names_as_text: dict[str, int] = field(default_factory=dict[str, int])
    left_out: LeftOut = field(default_factory=LeftOut)

    def to_json(self) -> str:
        """The manifest as JSON; `from_json` gives an equal one back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read a manifest; KeyError, TypeError or ValueError where it is not one."""
        values: dict[str, Any] = json.loads(text)
        for old in ("path", "sources"):  # of older versions, whose folders lie in runs
            values.pop(old, None)
        for key in values.keys() & {*_TUPLES}:
            values[key] = None if values[key] is None else tuple(values[key])
        return cls(**{**values, "left_out": LeftOut(**values.pop("left_out", {}))})


class SourceLines(Sequence[Source]):
    """The files of a corpus, of which each is read from `sources.jsonl` when it is asked for.

    The file is mapped: what is open can be read where its folder has gone since.
    """

    def __init__(self, folder: Path) -> None:
        self._lines, self._ends = np.memmap(folder / "sources.jsonl", mode="r"), mapped(folder / "sources.npy")

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Source: ...
    @overload
    def __getitem__(self, index: slice) -> list[Source]: ...
    def __getitem__(self, index: int | slice) -> Source | list[Source]:
        if isinstance(index, slice):
            return [cast(Source, self[i]) for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"file {index} of {len(self)}")
        start = int(self._ends[index - 1]) if index else 0
        return Source(**json.loads(self._lines[start : int(self._ends[index])].tobytes()))

    def __iter__(self) -> Iterator[Source]:
        return (self[i] for i in range(len(self)))

    @staticmethod
    def write(folder: Path, sources: Iterable[Source]) -> None:
        """Write the files of a corpus down."""
        ends, end = GrowingArray(folder / "sources.npy", "<i8"), 0
        with (folder / "sources.jsonl").open("wb") as file:
            for source in sources:
                end += file.write(json.dumps(asdict(source)).encode() + b"\n")
                ends.append(np.array([end]))
        ends.close()
