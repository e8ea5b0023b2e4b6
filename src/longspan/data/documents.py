"""Documents on disk: a rank reads only the rows that it is asked for, and no number of a document is kept in memory.

A folder of documents holds `lengths.npy`, `origins.npy` (which file each was cut from), `corpus.json` and
`sources.jsonl` (those files as they were). `tokens.bin` and `offsets.npy` have their tokens; without them
`positions.npy` says where rows stand in their files, from which the tokens are made again. `targets.npy` is there where
not every token is one, and `codes.bin` says which. A run's folder names the folder. `build.py` makes it; nothing here
writes.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from longspan.corpus.rows.sample import RowSettings
from longspan.corpus.store.document_encoder import labels_of
from longspan.corpus.store.streamed import StreamedTokens
from longspan.data.order.packs import Pack
from longspan.data.store.arrays import mapped
from longspan.data.store.images import ImageTable
from longspan.data.store.manifest import Manifest, SourceLines
from longspan.data.store.record import FILE, Record, read_record
from longspan.data.store.sources import Source
from longspan.errors import DataError

if TYPE_CHECKING:
    from longspan.corpus.rows.encoding import RowEncoding

Rows = npt.NDArray[np.int64]


class Corpus:
    """The documents of a corpus folder; `corpus[d]` is a lazy view of document d.

    >>> corpus = Corpus(Path("runs/first/corpus"))
    >>> corpus[3][np.array([0, 1, 2])]          # reads three rows, and no more
    array([ 12, 907,   4])

    `lengths` are the documents' tokens, `targets` how many of them are predicted (None: all but the first of each), and
    `source_of` says which of the tables [[data.sources]] each comes from: files that are mapped into memory. `sources`
    are the files that they were cut from. `rows_read` counts the rows that were asked for, in this process.
    Raises DataError where the folder is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        record = read_record(folder)
        place = folder if record is None else folder / record.documents
        if record is not None and not place.is_dir():
            raise DataError(
                f"{folder} is not a corpus: its documents are not in {place} any more; start its run again, which "
                "makes them anew, with data.cache as a folder on storage that all its machines share"
            )
        try:
            self._open(place, folder, record)
        except (OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{place} is not a corpus: {error}; remove it and it is built again") from error
        self.rows_read = 0
        self.selects: Callable[[Corpus, tuple[int, ...]], Documents] = Documents  # with images: corpus_images
        self.packs: Callable[[tuple[Pack, ...]], Sequence[Pack]] = tuple  # likewise

    def _open(self, place: Path, folder: Path, record: Record | None) -> None:
        text = (place / FILE).read_text(encoding="utf-8")
        self.manifest = manifest = Manifest.from_json(text)
        older = json.loads(text).get("sources")
        self._origins = mapped(place / "origins.npy")
        self.sources: Sequence[Source] = SourceLines(place) if older is None else [Source(**s) for s in older]
        lengths = place / "lengths.npy"
        self.lengths: npt.NDArray[Any] = mapped(lengths) if older is None else np.diff(mapped(place / "offsets.npy"))
        several, masked = (place / name for name in ("source_of.npy", "targets.npy"))
        zero = np.broadcast_to(np.int16(0), len(self.lengths))
        self.source_of: npt.NDArray[Any] = mapped(several) if several.is_file() else zero
        self.targets: npt.NDArray[Any] | None = mapped(masked) if masked.is_file() else None
        self.images = ImageTable.of(place)
        if manifest.dtype:
            tokens = manifest.tokens if older is None else int(mapped(place / "offsets.npy")[-1])
            self._tokens: StoredTokens | StreamedTokens = StoredTokens(place, manifest, tokens)
        elif record is not None:
            tokenizer = folder / record.tokenizer
            self._tokens = StreamedTokens(place, manifest, partial(_encodings, tokenizer, manifest, record))
        else:
            raise ValueError("it has no tokens, and no run says how rows are read")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> "Document":
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of a corpus of {len(self)}")
        kind = Document if self.targets is None else LabelledDocument
        return kind(self, int(document), int(self.lengths[document]))

    def select(self, documents: Sequence[int]) -> "Documents":
        """These documents, numbered from 0: what a plan of their lengths calls its documents."""
        return self.selects(self, tuple(documents))

    def origin(self, document: int) -> str:
        """Name of the source file that a document was cut from."""
        return self.sources[self.file_of(document)].name

    def file_of(self, document: int) -> int:
        """The number of that file among `sources`."""
        return int(self._origins[document])

    def read(self, document: int, positions: Rows) -> Rows:
        """Token ids of a document at positions that it has."""
        self.rows_read += len(positions)
        return self._tokens.ids(document, positions).astype(np.int64)

    def read_labels(self, document: int, positions: Rows) -> Rows:
        """What is to be predicted at positions of a document: token ids, −100 where none is."""
        ids = self._tokens.ids(document, positions).astype(np.int64)
        codes = self._tokens.codes(document, positions)
        return ids if codes is None else labels_of(ids, codes)


class StoredTokens:
    """The tokens of all documents end to end in one file, and their codes in another, where there are any."""

    def __init__(self, folder: Path, manifest: Manifest, tokens: int) -> None:
        self._offsets = mapped(folder / "offsets.npy")
        self._tokens = np.memmap(folder / "tokens.bin", dtype=manifest.dtype, mode="r")
        self._codes = np.memmap(folder / "codes.bin", dtype=manifest.codes, mode="r") if manifest.codes else None
        for name, array in (("tokens.bin", self._tokens), ("codes.bin", self._codes)):
            if array is not None and len(array) != tokens:
                raise DataError(
                    f"{folder} is damaged: {name} has {len(array)} tokens, corpus.json wants {tokens}; remove the "
                    "folder and it is built again"
                )

    def ids(self, document: int, positions: Rows) -> Any:
        """The tokens of a document at these positions."""
        return self._tokens[positions + int(self._offsets[document])]

    def codes(self, document: int, positions: Rows) -> Any:
        """Their codes; None where there are none."""
        return None if self._codes is None else self._codes[positions + int(self._offsets[document])]


@dataclass(frozen=True)
class Document:
    """A lazy view of one document: indexed by an array of positions, it reads those rows."""

    corpus: Corpus
    number: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: Any) -> Rows:
        return self.corpus.read(self.number, self._checked(positions))

    def _checked(self, positions: Any) -> Rows:
        rows = np.asarray(positions, dtype=np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < self.length):
            raise IndexError(f"positions {rows.min()} to {rows.max()} of a document of {self.length} tokens")
        return rows


@dataclass(frozen=True)
class LabelledDocument(Document):
    """A document of a corpus in which not every token is a target (`Labelled` in `document.py`)."""

    @property
    def targets(self) -> int:
        """How many of its tokens are predicted."""
        assert self.corpus.targets is not None
        return int(self.corpus.targets[self.number])

    def labels(self, positions: Rows) -> Rows:
        """The token id to predict at each position (n,), −100 where none is."""
        return self.corpus.read_labels(self.number, self._checked(positions))


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
    def targets(self) -> int | None:
        """How many of their tokens are predicted; None where that is all but the first of each."""
        targets = self.corpus.targets
        return None if targets is None else int(targets[list(self.ids)].sum())

    def origin(self, document: int) -> str:
        """The source file of one of them."""
        return self.corpus.origin(self.ids[document])

    @property
    def origins(self) -> tuple[str, ...]:
        """The source file of each document."""
        return tuple(self.corpus.origin(document) for document in self.ids)


def _encodings(tokenizer_folder: Path, manifest: Manifest, record: Record) -> "tuple[RowEncoding, ...]":
    """How rows of each source are encoded, as the run did it whose documents lie here."""
    from longspan.corpus.rows.encoding import RowEncoding  # it imports transformers
    from longspan.corpus.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder)
    settings = RowSettings(**record.row_settings)
    return tuple(RowEncoding(kind, tokenizer, settings) for kind in manifest.kinds)  # type: ignore[arg-type]
