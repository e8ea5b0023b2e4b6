"""Gather the documents that each rank brings: read them here, and learn what all ranks know of those of the others.

`gather_documents` is for a loop whose ranks load their own documents. What becomes of them is in `gathered.py`. Not
covered: documents with items (images and the like), whose encoders read them.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from longspan.comm import World
from longspan.comm.all_ranks import on_all_ranks, result_or_first_error
from longspan.data.document import NO_TARGET, Labelled, Valued
from longspan.errors import DataError, short_text
from longspan.layout import Integers
from longspan.layout.layout import excerpt
from longspan.train.reading.gathered import IDS, LABELS, Facts, GatheredDocuments, Rows, number_column
from longspan.train.reading.local_batch import count_prefix_rows, reading_error
from longspan.train.reading.read_rows import WEIGHTS, NamesOfValues, check_integers


def gather_documents(local: Iterable[Any], world: World) -> "GatheredDocuments":
    """Gather the documents of a step that each rank brings a share of; all ranks call it together, each with its own.

    >>> documents = gather_documents([Document(ids, labels=labels) for ids, labels in next(batches)], world)
    >>> plan = plan_dynamic(documents.lengths, world.home, max_tokens_per_slot=8192, targets=documents.targets)
    >>> run_step(model, plan, documents, world, optimizer=optimizer)

    `local` are documents as `run_step` takes them: Documents, or arrays and lists of token ids. They are read once,
    here. Documents are numbered in the order of the home's ranks. Every rank may bring some, those of one slot too, and
    each document counts once for each rank that brings it: where ranks of a slot load the same share, one of them gives
    it and the others []. A rank that has run out gives [] as well; where all have, there are no documents, and `if not
    documents` ends a loop.

    Raises DataError on every rank for documents that a rank cannot read or that have items, for values that documents
    of one rank have and those of another have not, and where two ranks bring the same documents.
    """
    return _gather_facts(_read_local_documents(local, world), world)


# ---- what a rank reads, and what it tells the others of it


def _read_local_documents(documents: Iterable[Any], world: World) -> "_Local":
    """Read the documents that this rank brings; all raise DataError where one cannot."""

    def read_local() -> "_Local":
        local = _Local()
        for number, document in enumerate(_iterate_documents(documents)):
            local.add_document(number, document)
        return local

    return result_or_first_error(world, read_local, lambda error: reading_error(error, world))


class _Share(NamedTuple):
    """What a rank tells the others of the documents that it brings."""

    facts: Integers  # (D, 5) the first fields of Facts
    names: tuple[str, ...]  # of numbers, without weights
    labelled: bool  # whether a label is another than its token
    digest: bytes  # of all that the documents hold; empty for fewer than two different ones


class _Local:
    """The documents that this rank brings, once it has read them: facts and rows of each."""

    def __init__(self) -> None:
        """Begin without documents: facts and columns of each, and whether any label is another than its token."""
        self._facts, self._documents = list[tuple[int, ...]](), list[dict[str, Integers]]()
        self._names, self._labelled = NamesOfValues(), False

    def add_document(self, number: int, document: Any) -> None:
        """Read a document, check it, and keep its facts and its rows.

        Numbers are kept as the bits of float64, so that all columns are of int64 and travel as one table. Raises
        DataError for a value that is no document, and for values of other names than those of the documents before.
        """
        if isinstance(document, Mapping):
            raise DataError(
                f"document {number} is a {type(document).__name__} of {', '.join(map(str, document))}; give its token "
                "ids, or longspan.Document(ids, labels=…) where not every token is a target"
            )
        try:
            positions = np.arange(len(document))
        except TypeError as error:
            raise DataError(
                f"document {number} is {short_text(document)}, which has no length; give a list of documents, each of "
                "them token ids or a longspan.Document"
            ) from error
        ids = _token_ids(document, positions)
        check_integers(number, ids, positions, "a document gives token ids")
        labels = np.asarray(document.labels(positions)) if isinstance(document, Labelled) else ids
        check_integers(number, labels, positions, "its labels are token ids, or −100")
        values = document.token_values(positions) if isinstance(document, Valued) else {}
        self._names.check_names(number, values)
        if wrong := next((name for name, value in values.items() if np.shape(value) != positions.shape), None):
            raise DataError(
                f"document {number} gave {wrong!r} of shape {np.shape(values[wrong])} for {len(positions)} positions; "
                "give a number for each"
            )
        targets, prefix_rows = int((labels[1:] != NO_TARGET).sum()), count_prefix_rows(document, number, len(ids))
        pieces = len(getattr(document, "pieces", ()))
        self._facts.append((len(ids), targets, prefix_rows, pieces, int(WEIGHTS in values)))  # as in `_Share.facts`
        self._labelled |= not np.array_equal(ids, labels)
        columns = {IDS: ids.astype(np.int64), LABELS: labels.astype(np.int64)}
        bits = {
            number_column(name): np.asarray(value, dtype=np.float64).view(np.int64) for name, value in values.items()
        }
        self._documents.append(columns | bits)

    def describe_share(self) -> _Share:
        """Return what this rank tells the others of its documents.

        The digest, by which copies are refused, is left out unless two documents differ: ranks may well have drawn one
        document each, and the same.
        """
        digests = [_document_digest(document) for document in self._documents]
        digest = hashlib.blake2b(b"".join(digests), digest_size=16).digest() if len(set(digests)) > 1 else b""
        names = {name for document in self._documents for name in document} - {IDS, LABELS, number_column(WEIGHTS)}
        facts = np.array(self._facts, dtype=np.int64).reshape(-1, 5)
        value_names = tuple(sorted(name[1:] for name in names))  # without the dot of `number_column`
        return _Share(facts, value_names, self._labelled, digest)

    def row_table(self, columns: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return all rows (n, columns). Only weights may be missing in a document, whose rows then have weight 1."""
        weight_bits = np.float64(1).view(np.int64)
        rows = [
            np.stack([document.get(name, np.broadcast_to(weight_bits, len(document[IDS]))) for name in columns], axis=1)
            for document in self._documents
        ]
        return np.concatenate([np.empty((0, len(columns)), dtype=np.int64), *rows])


def _document_digest(columns: Mapping[str, Integers]) -> bytes:
    """Return the digest of a document: of the names of its columns, then of the columns."""
    digest = hashlib.blake2b(repr(sorted(columns)).encode(), digest_size=16)
    for name in sorted(columns):
        digest.update(columns[name].tobytes())
    return digest.digest()


def _iterate_documents(local: Any) -> Iterable[Any]:
    """Yield the documents of a rank. Raises DataError for what holds no documents, and for documents with items."""
    for name in ("items", "positions"):  # a callable `items` is a mapping's method, and refused below
        if (value := getattr(local, name, None)) is not None and (name == "positions" or not callable(value)):
            raise DataError(
                f"the documents ({type(local).__name__}) have {name}, and rows of encoders do not move with those of "
                "documents; give all ranks the same ItemDocuments instead of gathering them"
            )
    if isinstance(local, Mapping) or not (hasattr(local, "__iter__") or hasattr(local, "__getitem__")):
        raise DataError(
            f"gather_documents got {short_text(local)}; give a list of documents, which is empty on a rank without "
            "any; of a batch of tensors longspan.train.documents_of(batch).documents are some"
        )
    # By number where that is possible: a data set of torch need not end an iteration.
    by_number = hasattr(local, "__len__") and hasattr(local, "__getitem__")
    return (local[number] for number in range(len(local))) if by_number else local


def _token_ids(document: Any, positions: Integers) -> npt.NDArray[Any]:
    """Return the token ids of a whole document as `run_step` would read them; a tensor may be on any device."""
    if isinstance(document, torch.Tensor):
        return document.detach().cpu().numpy()
    return np.asarray(document) if isinstance(document, list | tuple) else np.asarray(document[positions])


# ---- what all ranks make of the shares


def _gather_facts(local: _Local, world: World) -> GatheredDocuments:
    """Gather what all ranks must know of all documents: lengths, targets, and where their rows are.

    Documents are numbered in the order of ranks, and no rank may have a copy of another's. Facts (D, columns) lie by
    document number; the last column is where a document's rows begin, all rows of all ranks counted one after another.
    `ends` are where the rows of each rank end.
    The rows that this rank read itself become a table with only those columns that some rank has.
    """
    shares = world.control.gather_objects(local.describe_share(), "lengths of documents")
    _check_value_names(shares, world.home.ranks)
    _refuse_copies(shares, world.home.ranks)
    facts = np.concatenate([share.facts for share in shares])  # columns: length, 3 more, whether there are weights
    lengths, weighted = facts[:, 0], facts[:, -1]
    facts = np.column_stack([facts, np.cumsum(lengths) - lengths])
    ends = np.cumsum([int(share.facts[:, 0].sum()) for share in shares])
    index = world.home.ranks.index(world.rank)
    first = sum(len(share.facts) for share in shares[:index])
    numbers = tuple(range(first, first + len(shares[index].facts)))
    columns = [IDS, *[LABELS] * any(share.labelled for share in shares)]
    columns += [number_column(WEIGHTS)] * bool(weighted.any())
    columns += sorted({number_column(name) for share in shares for name in share.names})
    table = local.row_table(columns)
    rows = Rows(np.arange(ends[index] - len(table), ends[index]), table)
    return GatheredDocuments(world, numbers, tuple(columns), ends, Facts(*facts.T), rows, rows)


def _check_value_names(shares: Sequence[_Share], ranks: Sequence[int]) -> None:
    """Raise DataError, on every rank, unless the documents of all ranks have values of the same names."""
    having = [(rank, share) for rank, share in zip(ranks, shares, strict=True) if len(share.facts)]
    all_names = sorted({name for _, share in having for name in share.names})
    for name in all_names:
        brings = [rank for rank, share in having if name in share.names]
        if len(brings) < len(having):
            lacking = [rank for rank, share in having if name not in share.names]
            raise on_all_ranks(
                DataError(
                    f"documents of ranks {excerpt(brings)} have {name!r} and those of ranks {excerpt(lacking)} have "
                    "not; give the documents of a step the same values, 0 where they do not matter"
                )
            )


def _refuse_copies(shares: Sequence[_Share], ranks: Sequence[int]) -> None:
    """Raise DataError, on every rank, where two ranks bring the same documents, by digests of shares that have one."""
    first_with = dict[bytes, int]()
    for rank, share in zip(ranks, shares, strict=True):
        if share.digest and (first := first_with.setdefault(share.digest, rank)) != rank:
            raise on_all_ranks(
                DataError(
                    f"ranks {first} and {rank} bring the same {len(share.facts)} documents of "
                    f"{excerpt(share.facts[:, 0].tolist())} tokens, which would count twice; let each rank load "
                    "documents of its own (DistributedSampler), or give [] on ranks that load what another does, as "
                    "ranks of one slot may. Documents that all ranks have go to run_step as they are"
                )
            )
