"""Documents on disk: token ids in one memory-mapped file, of which a rank reads only the rows it is asked for.

A corpus folder holds `tokens.bin`, `offsets.npy` (where each document begins), `origins.npy` (which source file it
was cut from) and `corpus.json` (the sources, as they were). `build.py` makes it; nothing here writes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longspan.errors import DataError
from longspan.train.data.files import Source
from longspan.train.data.left_out import LeftOut


@dataclass(frozen=True)
class Manifest:
    """The sources and settings of a corpus, from which one sees whether it must be built again.

    Every text begins with the tokens `opening` (None: an older version built it, and did not say) and ends with
    `closing`.
    """

    path: str
    max_document_tokens: int
    tokenizer_digest: str
    tokenizer_size: int
    dtype: str
    sources: tuple[Source, ...]
    skipped: tuple[str, ...]
    parse_special_tokens: bool = False
    opening: tuple[str, ...] | None = None
    closing: tuple[str, ...] = ()
    left_out: LeftOut = field(default_factory=LeftOut)

    def to_json(self) -> str:
        """The manifest as JSON; `from_json` gives an equal one back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read a manifest; KeyError, TypeError or ValueError where it is not one."""
        values: dict[str, Any] = json.loads(text)
        sources = tuple(Source(**source) for source in values.pop("sources"))
        for key in {"skipped", "opening", "closing"} & values.keys():
            values[key] = None if values[key] is None else tuple(values[key])
        left_out = LeftOut(**values.pop("left_out", {}))
        return cls(**{**values, "sources": sources, "left_out": left_out})


class Corpus:
    """The documents of a corpus folder; `corpus[d]` is a lazy view of document d.

    >>> corpus = Corpus(Path("runs/first/corpus"))
    >>> corpus[3][np.array([0, 1, 2])]          # reads three rows, and no more
    array([ 12, 907,   4])

    `lengths` are the documents' tokens; `rows_read` counts the rows that were asked for, in this process.
    Raises DataError where the folder is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.manifest = Manifest.from_json((folder / "corpus.json").read_text(encoding="utf-8"))
            self._offsets: np.ndarray = np.load(folder / "offsets.npy")
            self._source_of: np.ndarray = np.load(folder / "origins.npy")  # of each document, into manifest.sources
            self._tokens = np.memmap(folder / "tokens.bin", dtype=self.manifest.dtype, mode="r")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{folder} is not a corpus: {error}; remove it and it is built again") from error
        if len(self._tokens) != self._offsets[-1]:
            raise DataError(
                f"{folder} is damaged: tokens.bin has {len(self._tokens)} tokens, offsets.npy wants "
                f"{self._offsets[-1]}; remove the folder and it is built again"
            )
        self.lengths: np.ndarray = np.diff(self._offsets)
        self.rows_read = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> "Document":
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of a corpus of {len(self)}")
        return Document(self, int(self._offsets[document]), int(self.lengths[document]))

    def select(self, documents: Sequence[int]) -> "Documents":
        """These documents, numbered from 0: what a plan of their lengths calls its documents."""
        return Documents(self, tuple(documents))

    def origin(self, document: int) -> str:
        """Name of the source file that a document was cut from."""
        return self.manifest.sources[int(self._source_of[document])].name

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Token ids at global rows, as int64."""
        self.rows_read += len(rows)
        return self._tokens[rows].astype(np.int64)


@dataclass(frozen=True)
class Document:
    """A lazy view of one document: indexed by an array of positions, it reads those rows."""

    corpus: Corpus
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        rows = np.asarray(positions, dtype=np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < self.length):
            raise IndexError(f"positions {rows.min()} to {rows.max()} of a document of {self.length} tokens")
        return self.corpus.read(rows + self.start)


@dataclass(frozen=True)
class Documents(Sequence[Document]):
    """Some documents of a corpus, in the order of a plan's lengths."""

    corpus: Corpus
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Document:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.corpus[self.ids[index]]

    def __iter__(self) -> Iterator[Document]:
        return (self.corpus[d] for d in self.ids)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(self.corpus.lengths[list(self.ids)].tolist())

    @property
    def origins(self) -> tuple[str, ...]:
        """The source file of each document."""
        return tuple(self.corpus.origin(document) for document in self.ids)
