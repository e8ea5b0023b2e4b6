"""Documents in files: a rank reads only the rows that it uses, and no array of the corpus's size is in memory.

A folder of documents has `lengths.npy`, `origins.npy` (the file of each), `corpus.json`, `sources.jsonl`, and
`tokens.bin` with `offsets.npy`. `targets.npy` and `codes.bin` exist only if some tokens are no targets, `texts.npy`
(the number of each document's row) only if a row gave several documents, `labels.npy` only if a model scores them,
and `hashes.npy` (of the row's tokens) if this version of longspan made it.
`longspan.corpus` builds it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from longspan.data.array_files import (
    CODE_TYPES,
    COLUMN_TYPES,
    NOTHING,
    TOKEN_TYPES,
    decode_labels,
    map_array,
    map_token_values,
)
from longspan.data.document import NO_TARGET
from longspan.data.image_table import ImageTable
from longspan.data.likeliest import Table, TableFile
from longspan.data.manifest import PAIRS, Manifest, SourceFile, SourceFiles, read_manifest, read_record
from longspan.data.scored_document import label_columns
from longspan.errors import DataError
from longspan.layout import Integers

_TAIL = 64  # tokens that are read at a time, until one is not padding


class Corpus:
    """The documents of a corpus folder; `corpus[d]` is a lazy view of document d.

    >>> corpus = Corpus(Path("runs/first/corpus"))  # doctest: +SKIP
    >>> corpus[3][np.array([0, 1, 2])]  # reads three rows, and no more  # doctest: +SKIP
    array([ 12, 907,   4])

    Mapped arrays have, for each document, its tokens (`lengths`), its `targets` (None: all but the first of each), the
    row that it is a part of (`texts`; None: each is one), a hash of that row's tokens (`hashes`; None: an earlier
    version made the folder) and the number of its table [[data.sources]] (`source_of`). For a model that scores
    documents there are `labels` (D, L), or margins of pairs (D, 1); the score is that of the last token that is not
    `pad`. For losses of preferences `numbers` (D,) are labels (kto), or where the answer of a pair's first document
    begins (orpo), and `reference` (D,) are the log-probabilities of answers by the reference model, NaN where they are
    not known. `likeliest` is the file of a teacher's likeliest tokens, if a loss reads them. `unit` is how many
    documents stay in one step: 2 of pairs, and for losses of preferences. `rows_read` counts the rows that were read in
    this process. Raises DataError if the folder is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder of documents, or the one that the record in a run's folder names.

        Raises DataError for documents that are missing or damaged.
        """
        record = read_record(folder)
        documents_folder = folder if record is None else folder / record.documents
        if record is not None and not documents_folder.is_dir():
            raise DataError(
                f"{folder} is not a corpus: its documents are not in {documents_folder} any more; start its run again, "
                "which makes them anew, with XDG_CACHE_HOME on storage that all its machines share"
            )
        try:
            self.documents_folder: Path = documents_folder  # shared by runs
            self.manifest: Manifest = read_manifest(documents_folder)
            self.sources: SourceFiles = SourceFiles(documents_folder)
            self._origins = self._map_column("origins")
            self.lengths: npt.NDArray[Any] = self._map_column("lengths")
            names = ("source_of", "targets", "texts", "hashes")
            is_there = {name: (documents_folder / f"{name}.npy").is_file() for name in names}
            arrays = (self._map_column(name) if is_there[name] else None for name in names)
            source_of, targets, texts, hashes = arrays
            self.targets: npt.NDArray[Any] | None = targets
            self.texts: npt.NDArray[Any] | None = texts
            self.hashes: npt.NDArray[Any] | None = hashes
            # A model that scores, or a loss of preferences, reads these of each document.
            columns = self.manifest.labels
            table = self._map_column("labels", columns).reshape(-1, columns) if columns else None
            preference = self.manifest.preference
            self.labels: npt.NDArray[Any] | None = None if preference else table
            self.numbers: npt.NDArray[Any] | None = table[:, 0] if table is not None and preference else None
            self.unit = 2 if preference or PAIRS in self.manifest.kinds else 1
            self.lengths.reshape(-1, self.unit)  # raises ValueError for half of a pair
            # All documents are of source 0; the array takes no memory.
            zero = np.broadcast_to(np.int16(0), len(self.lengths))
            self.source_of: npt.NDArray[Any] = zero if source_of is None else source_of
            self.images: ImageTable | None = ImageTable.open_in_folder(documents_folder)
            self._offsets = self._map_column("offsets")
            tokens = self.manifest.tokens
            self._tokens = map_token_values(
                documents_folder / "tokens.bin", self.manifest.dtype, TOKEN_TYPES, tokens
            )
            codes = self.manifest.codes
            self._codes = None
            if codes:
                self._codes = map_token_values(documents_folder / "codes.bin", codes, CODE_TYPES, tokens)
        except (OSError, KeyError, TypeError, ValueError) as error:
            # A DataError is a ValueError too.
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{documents_folder} is not a corpus: {error}; remove it and it is built again"
            ) from error
        self.folder: Path = folder
        self.rows_read: int = 0
        self.pad = -1  # no token: the last has the score
        self.reference: npt.NDArray[np.float64] | None = None
        self.likeliest: TableFile | None = None
        # This makes the documents of a step; `attach_images` (corpus/image_documents.py) replaces it.
        self.selects: Callable[[Corpus, tuple[int, ...]], CorpusDocuments] = CorpusDocuments

    def _map_column(self, name: str, values: int = 1) -> npt.NDArray[Any]:
        file = self.documents_folder / f"{name}.npy"
        return map_array(file, COLUMN_TYPES[name], self.manifest.documents * values)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the folder again."""
        # The row of a score is found by `pad`.
        return Corpus, (self.folder,), {"pad": self.pad}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> "CorpusDocument":
        """Return document `document`, of the class that says what of it is predicted; nothing is read."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of a corpus of {len(self)}")
        if self.manifest.preference == "orpo":
            kind = WholeCorpusDocument
        elif self.labels is not None:
            kind = ScoredCorpusDocument
        elif self.targets is not None:
            kind = LabelledCorpusDocument
        else:
            kind = CorpusDocument
        return kind(self, int(document), int(self.lengths[document]))

    @property
    def target_share(self) -> float:
        """The share of tokens that are predicted."""
        tokens = max(1, int(self.lengths.sum()))
        return 1.0 if self.targets is None else min(1.0, float(self.targets.sum()) / tokens)

    @property
    def image_share(self) -> float:
        """The share of tokens that are rows of images."""
        if self.images:
            return float(self.images.column("rows").sum()) / float(self.lengths.sum())
        return 0.0

    def select(self, documents: Sequence[int]) -> "CorpusDocuments":
        """Return these documents, numbered from 0 as in a plan of their lengths."""
        return self.selects(self, tuple(documents))

    def count_contained(self, documents: "CorpusDocuments", leave_out: Sequence[int]) -> int | None:
        """Count those of `documents` whose rows (of files) are rows of this corpus too, token for token, by hashes.

        `leave_out` are documents of this corpus that are not compared. None where a corpus has no hashes.
        """
        if self.hashes is None or documents.corpus.hashes is None:
            return None
        hashes = documents.corpus.hashes[[*documents.ids]]
        return int(np.isin(hashes, np.delete(self.hashes, [*leave_out])).sum())

    def source_file(self, document: int) -> SourceFile:
        """Return the source file of a document."""
        return self.sources[int(self._origins[document])]

    def origin(self, document: int) -> str:
        """Return the name of the source file of a document."""
        return self.source_file(document).name

    def tokens_of(self, document: int) -> npt.NDArray[Any]:
        """Return the token ids of a document, as they are stored: none is read until it is looked at."""
        return self._tokens[self._places_of(document)]

    def count_targets(self, document: int, start: int = 0) -> int:
        """Count the tokens from number `start` of a document on that are predicted, which its first one never is."""
        first = max(start, 1)
        if self._codes is None:
            return int(self.lengths[document]) - first
        return int((self._codes[self._places_of(document)][first:] != NOTHING).sum())

    def count_rows_before_targets(self, document: int) -> int:
        """Count the rows of a document before the one that predicts its first target; without a target, all but one."""
        if self._codes is None:
            return 0
        is_target = self._codes[self._places_of(document)][1:] != NOTHING
        return int(is_target.argmax()) if is_target.any() else len(is_target)

    @property
    def target_counts(self) -> npt.NDArray[Any]:
        """How many tokens of each document (D,) are predicted."""
        return self.lengths - 1 if self.targets is None else self.targets

    def target_numbers(self, document: int, positions: Integers) -> Integers:
        """Number the tokens at these positions among the targets of a document, from 0; −1 is no target."""
        if self._codes is None:
            return positions - 1
        is_target = self._codes[self._places_of(document)] != NOTHING
        is_target[:1] = False
        return np.where(is_target, np.cumsum(is_target) - 1, -1)[positions]

    def _places_of(self, document: int) -> slice:
        start = int(self._offsets[document])
        return slice(start, start + int(self.lengths[document]))

    def read(self, document: int, positions: Integers) -> Integers:
        """Read the token ids of a document at these positions."""
        self.rows_read += len(positions)
        return self._read_stored(self._tokens, document, positions)

    def read_labels(self, document: int, positions: Integers) -> Integers:
        """Read the labels of a document at these positions: token ids, −100 for none."""
        ids = self._read_stored(self._tokens, document, positions)
        if self._codes is None:
            return ids
        return decode_labels(ids, self._read_stored(self._codes, document, positions))

    def _read_stored(self, values: Any, document: int, positions: Integers) -> Integers:
        start = int(self._offsets[document])
        if len(positions) and not 0 <= start <= start + int(positions.max()) < len(values):
            raise DataError(
                f"the corpus is damaged: document {document} begins at token {start} and has {int(positions.max()) + 1}"
                f" tokens or more, and {len(values)} are stored; remove its folder, and it is built again"
            )
        return values[positions + start].astype(np.int64)


@dataclass(frozen=True)
class CorpusDocument:
    """A lazy view of one document: indexed by an array of positions, it reads the tokens there.

    A `part` begins at token `start` of the document, and continues the `parent` of its step; it may read tokens `ahead`
    of its own.
    """

    corpus: Corpus
    number: int
    length: int
    start: int = 0
    parent: int = -1
    ahead: int = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: Any) -> Integers:
        """Read the token ids at these positions of the part."""
        return self.corpus.read(self.number, self._positions_in_whole(positions))

    @property
    def ids(self) -> npt.NDArray[Any]:
        """The token ids (length,), read as far as they are looked at."""
        return self.corpus.tokens_of(self.number)[self.start : self.start + self.length]

    def part(self, start: int, stop: int, parent: int = -1, ahead: int = 0) -> Self:
        """Return tokens `start` to `stop` as a document that continues `parent`, as `Document.part` does."""
        return replace(self, start=self.start + start, length=stop - start, parent=parent, ahead=ahead)

    def likeliest(self, positions: Integers) -> Table | None:
        """Read the rows (n, k + 1) of a teacher's likeliest tokens at these positions; None where no file has them."""
        if self.corpus.likeliest is None:
            return None
        targets = self.corpus.target_numbers(self.number, self._positions_in_whole(positions))
        return self.corpus.likeliest.read(self.number, targets)

    def _positions_in_whole(self, positions: Any) -> Integers:
        rows = np.asarray(positions, dtype=np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < self.length + self.ahead):
            raise IndexError(f"positions {rows.min()} to {rows.max()} of a document of {self.length} tokens")
        return rows + self.start


@dataclass(frozen=True)
class LabelledCorpusDocument(CorpusDocument):
    """A document of a corpus in which not every token is a target (`Labelled` in `document.py`)."""

    @property
    def targets(self) -> int:
        """How many tokens are predicted: all of the document's in the part that ends it; prefixes have none."""
        assert self.corpus.targets is not None
        ends = self.start + self.length == self.corpus.lengths[self.number]
        return int(self.corpus.targets[self.number]) if ends else 0

    @property
    def shareable_prefix_length(self) -> int:
        """How many first rows of the whole document other documents may have too: they predict nothing."""
        return self.corpus.count_rows_before_targets(self.number)

    def labels(self, positions: Integers) -> Integers:
        """Read the token id to predict at each of these positions, −100 for none."""
        return self.corpus.read_labels(self.number, self._positions_in_whole(positions))


@dataclass(frozen=True)
class ScoredCorpusDocument(LabelledCorpusDocument):
    """A document of which a model scores the last token that is not padding, by its label or in a pair."""

    makes_scores = True

    def labels(self, positions: Integers) -> Integers:
        """Return 0 at the position that has the score, −100 elsewhere."""
        return np.where(self._positions_in_whole(positions) == self.shareable_prefix_length, 0, NO_TARGET)

    def token_values(self, positions: Integers) -> dict[str, npt.NDArray[np.float64]]:
        """Return the document's label, the same at each of these positions; of pairs nothing."""
        assert self.corpus.labels is not None
        table = np.repeat(self.corpus.labels[[self.number]], len(positions), axis=0)
        return label_columns(table) if self.corpus.unit == 1 else {}

    @property
    def shareable_prefix_length(self) -> int:
        """How many rows come before the one that has the score, which is that of the last token but padding."""
        ids = self.corpus.tokens_of(self.number)
        # The rule of `ScoredDocument` counts from the end.
        for stop in range(len(ids), 0, -_TAIL):
            first = max(stop - _TAIL, 0)
            if len(others := np.flatnonzero(ids[first:stop] != self.corpus.pad)):
                return first + int(others[-1])
        return 0


@dataclass(frozen=True)
class WholeCorpusDocument(LabelledCorpusDocument):
    """A document of a pair (orpo), of which the prompt may be predicted too; `answer` marks the tokens behind it."""

    def token_values(self, positions: Integers) -> dict[str, npt.NDArray[np.float64]]:
        """Return `answer`, which is 1 at positions of the answer and 0 at those of the prompt.

        Of a rejected document, the second of a pair, no prompt is predicted: it is 1 at all positions.
        """
        assert self.corpus.numbers is not None
        is_rejected = self.number % 2
        answer_start = 0 if is_rejected else self.corpus.numbers[self.number]
        return {"answer": (positions >= answer_start).astype(np.float64)}


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
        # The iterator of Sequence would end at a document that is not there.
        return (self.corpus[d] for d in self.ids)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each of these documents."""
        return tuple(self.corpus.lengths[list(self.ids)].tolist())

    @property
    def targets(self) -> int | None:
        """How many tokens of these documents are predicted; None if all but the first of each are."""
        targets = self.corpus.targets
        return None if targets is None else int(targets[list(self.ids)].sum())

    @property
    def margins(self) -> tuple[float, ...] | None:
        """The margins of these documents if they are pairs (chosen, rejected, chosen, …), one a pair; else None."""
        labels = self.corpus.labels
        if labels is None or self.corpus.unit == 1:
            return None
        return tuple(labels[list(self.ids[::2]), 0].tolist())

    def origin(self, document: int) -> str:
        """Return the name of the source file of number `document` of these."""
        return self.corpus.origin(self.ids[document])

    @property
    def origins(self) -> tuple[str, ...]:
        """The name of each document's source file."""
        return tuple(self.corpus.origin(document) for document in self.ids)
