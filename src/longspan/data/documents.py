"""Documents in files: a rank reads only the rows that it uses, and no array of the corpus's size is in memory.

A folder of documents has `lengths.npy`, `origins.npy` (the file of each document), `corpus.json` and `sources.jsonl`
(those files as they were). `tokens.bin` and `offsets.npy` have the tokens. `targets.npy` and `codes.bin` exist only if
some tokens are no targets, `texts.npy` (the number of each document's row) only if a row gave several documents. A
run's folder names the folder of its documents.

Nothing here writes: `longspan.corpus` builds a corpus.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.data.document import NO_TARGET, Pack
from longspan.data.images import ImageTable
from longspan.data.manifest import FILE, Manifest, SourceFile, SourceLines, map_array, read_record
from longspan.errors import DataError
from longspan.layout import Integers

# The code of a token decides its label: its own id, none, or the id code − 2.
OWN_TOKEN, NOTHING, OTHER_TOKEN = 0, 1, 2


class Corpus:
    """The documents of a corpus folder; `corpus[d]` is a lazy view of document d.

    >>> corpus = Corpus(Path("runs/first/corpus"))
    >>> corpus[3][np.array([0, 1, 2])]          # reads three rows, and no more
    array([ 12, 907,   4])

    `lengths` are the documents' tokens, `targets` how many of them are predicted (None: all but the first of each),
    `texts` the number of the text (the row) that each is a part of (None: each is one), and `source_of` is the number
    of each document's table [[data.sources]]: arrays that are mapped into memory. `sources` are the files of the
    documents. `rows_read` counts the rows that were read in this process. Raises DataError if the folder is missing or
    damaged.
    """

    def __init__(self, folder: Path) -> None:
        """Open the arrays of a corpus. Raises DataError for a folder without a corpus, or with a part of one.

        A folder without a record holds the arrays itself; the record of a run names the folder that does.
        """
        record = read_record(folder)
        documents_folder = folder if record is None else folder / record.documents
        if record is not None and not documents_folder.is_dir():
            raise DataError(
                f"{folder} is not a corpus: its documents are not in {documents_folder} any more; start its run again, "
                "which makes them anew, with data.cache as a folder on storage that all its machines share"
            )
        try:
            self._open_columns(documents_folder)
            self._tokens = StoredTokens(documents_folder, self.manifest)
        except (OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):  # which is a ValueError too
                raise
            raise DataError(f"{documents_folder} is not a corpus: {error}; remove it and it is built again") from error
        self.rows_read = 0
        # These make the documents and the packs of a step; `show_images` (corpus/image_documents.py) replaces both.
        self.selects: Callable[[Corpus, tuple[int, ...]], CorpusDocuments] = (
            CorpusDocuments  # with images: ImageDocuments
        )
        self.packs: Callable[[tuple[Pack, ...]], Sequence[Pack]] = tuple  # with images: ImagePacks

    def _open_columns(self, documents_folder: Path) -> None:
        """Without `source_of.npy` all documents are of source 0; without `targets.npy` every token but a document's
        first is a target.
        """
        self.manifest: Manifest = Manifest.from_json((documents_folder / FILE).read_text(encoding="utf-8"))
        self.sources: Sequence[SourceFile] = SourceLines(documents_folder)
        self._origins = map_array(documents_folder / "origins.npy")
        self.lengths: npt.NDArray[Any] = map_array(documents_folder / "lengths.npy")
        names = ("source_of.npy", "targets.npy", "texts.npy")
        source_of, self.targets, self.texts = (
            map_array(documents_folder / name) if (documents_folder / name).is_file() else None for name in names
        )
        zero = np.broadcast_to(np.int16(0), len(self.lengths))  # takes no memory
        self.source_of: npt.NDArray[Any] = zero if source_of is None else source_of
        self.images: ImageTable | None = ImageTable.of(documents_folder)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> "CorpusDocument":
        """Return document `document` without reading it; one with labels where the corpus has targets."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of a corpus of {len(self)}")
        kind = CorpusDocument if self.targets is None else LabelledCorpusDocument
        return kind(self, int(document), int(self.lengths[document]))

    def select(self, documents: Sequence[int]) -> "CorpusDocuments":
        """Return these documents, numbered from 0 as in a plan of their lengths."""
        return self.selects(self, tuple(documents))

    def origin(self, document: int) -> str:
        """Return the name of a document's source file."""
        return self.sources[self.file_of(document)].name

    def file_of(self, document: int) -> int:
        """Return the number of a document's file among `sources`."""
        return int(self._origins[document])

    def read(self, document: int, positions: Integers) -> Integers:
        """Read the token ids of a document at these positions."""
        self.rows_read += len(positions)
        return self._tokens.ids(document, positions).astype(np.int64)

    def read_labels(self, document: int, positions: Integers) -> Integers:
        """Read the labels of a document at these positions: token ids, −100 for none."""
        ids = self._tokens.ids(document, positions).astype(np.int64)
        codes = self._tokens.codes(document, positions)
        return ids if codes is None else decode_labels(ids, codes)


class StoredTokens:
    """The tokens of all documents end to end in one file, and their codes in another, if there are any."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Map the files of a folder. Raises DataError for one that has not as many tokens as its manifest says."""
        if not manifest.dtype:  # as data.cache = "none" wrote it
            raise DataError(f"{folder} has no tokens; remove it, and it is built again")
        self._offsets = map_array(folder / "offsets.npy")
        self._tokens = np.memmap(folder / "tokens.bin", dtype=manifest.dtype, mode="r")
        self._codes = np.memmap(folder / "codes.bin", dtype=manifest.codes, mode="r") if manifest.codes else None
        for name, array in (("tokens.bin", self._tokens), ("codes.bin", self._codes)):
            if array is not None and len(array) != manifest.tokens:
                raise DataError(
                    f"{folder} is damaged: {name} has {len(array)} tokens, corpus.json wants {manifest.tokens}; remove "
                    "the folder and it is built again"
                )

    def ids(self, document: int, positions: Integers) -> Any:
        """Return the tokens of a document at these positions."""
        return self._read_array(self._tokens, document, positions)

    def codes(self, document: int, positions: Integers) -> Any:
        """Return the codes of a document's tokens at these positions; None if there are none."""
        return None if self._codes is None else self._read_array(self._codes, document, positions)

    def _read_array(self, values: Any, document: int, positions: Integers) -> Any:
        start = int(self._offsets[document])
        if len(positions) and not 0 <= start <= start + int(positions.max()) < len(values):
            raise DataError(
                f"the corpus is damaged: document {document} begins at token {start} and has {int(positions.max()) + 1}"
                f" tokens or more, and {len(values)} are stored; remove its folder, and it is built again"
            )
        return values[positions + start]


def encode_labels(ids: Integers, labels: Integers | None) -> Integers | None:
    """Return the codes of tokens with these labels (n,); None without labels: each token is its own label.

    A code is 0 if the label is the token's own id, 1 if there is none, and the label + 2 if it is another id.
    """
    if labels is None:
        return None
    codes = np.where(labels == NO_TARGET, NOTHING, labels + OTHER_TOKEN)
    return np.where(labels == ids, OWN_TOKEN, codes)


def decode_labels(ids: Integers, codes: npt.NDArray[Any]) -> Integers:
    """Return the labels of tokens with these codes."""
    codes = codes.astype(np.int64)
    return np.where(codes == OWN_TOKEN, ids, np.where(codes == NOTHING, NO_TARGET, codes - OTHER_TOKEN))


@dataclass(frozen=True)
class CorpusDocument:
    """A lazy view of one document: indexed by an array of positions, it reads the tokens there."""

    corpus: Corpus
    number: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: Any) -> Integers:
        return self.corpus.read(self.number, self._check_positions(positions))

    def _check_positions(self, positions: Any) -> Integers:
        rows = np.asarray(positions, dtype=np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < self.length):
            raise IndexError(f"positions {rows.min()} to {rows.max()} of a document of {self.length} tokens")
        return rows


@dataclass(frozen=True)
class LabelledCorpusDocument(CorpusDocument):
    """A document of a corpus in which not every token is a target (`Labelled` in `document.py`)."""

    @property
    def targets(self) -> int:
        """How many of its tokens are predicted."""
        assert self.corpus.targets is not None
        return int(self.corpus.targets[self.number])

    def labels(self, positions: Integers) -> Integers:
        """Read the token id to predict at each position (n,), −100 for none."""
        return self.corpus.read_labels(self.number, self._check_positions(positions))


@dataclass(frozen=True)
class CorpusDocuments(Sequence[CorpusDocument]):
    """Some documents of a corpus, in the order of a plan's lengths."""

    corpus: Corpus
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> CorpusDocument:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.corpus[self.ids[index]]

    def __iter__(self) -> Iterator[CorpusDocument]:
        return (self.corpus[d] for d in self.ids)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(self.corpus.lengths[list(self.ids)].tolist())

    @property
    def targets(self) -> int | None:
        """How many tokens of these documents are predicted; None if all but the first of each are."""
        targets = self.corpus.targets
        return None if targets is None else int(targets[list(self.ids)].sum())

    def origin(self, document: int) -> str:
        """Return the name of the source file of document number `document` of this selection."""
        return self.corpus.origin(self.ids[document])

    @property
    def origins(self) -> tuple[str, ...]:
        """The source file of each document."""
        return tuple(self.corpus.origin(document) for document in self.ids)
