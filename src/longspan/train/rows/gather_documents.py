"""Gather the documents that each rank brings: read them here, and learn what all ranks know of those of the others.

`gather_documents` is for a loop whose ranks load their own documents. It gives those of all ranks as one list for
`run_step`. Not covered: documents with items (images and the like), whose encoders read them.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from longspan.comm import World
from longspan.comm.all_ranks import on_all_ranks, result_or_first_error
from longspan.data.document import NO_TARGET, Labelled, Valued
from longspan.data.likeliest import Table, table_numbers, table_of_numbers
from longspan.errors import DataError, PlanError, plural
from longspan.layout import Exchange, Integers, Partition
from longspan.plain_text import excerpt, short_text
from longspan.plan import Plan
from longspan.train.rows.agreed_reading import read_and_compare_digest, reading_error, text_digest
from longspan.train.rows.read_rows import WEIGHTS, NamesOfValues, check_integers
from longspan.train.rows.visible_spans import count_prefix_rows
from longspan.train.step_inputs import StepInputs

IDS = "ids"
LABELS = "labels"
_HINT = "Every rank makes the plan from the lengths of the documents that were gathered, with the same settings"


class Facts(NamedTuple):
    """What all ranks know of each document: columns (D,), by the documents' numbers."""

    lengths: Integers
    targets: Integers
    prefix_rows: Integers  # rows before the first target
    scored: Integers  # 0 or 1: whether they are ScoredDocuments
    weighted: Integers  # 0 or 1: whether they bring weights
    starts: Integers  # the number of the first row, among the rows of all documents in the order of ranks


class Rows(NamedTuple):
    """Rows that a rank has: their numbers among the rows of all documents, ascending (n,), and what they hold."""

    numbers: Integers
    columns: npt.NDArray[np.int64]  # (n, columns); numbers of a loss are the bits of float64


@dataclass(frozen=True, eq=False, repr=False)
class GatheredDocuments(Sequence["GatheredDocument"]):
    """All documents of a step, of which this rank read some: the same lengths and targets on every rank.

    >>> documents.lengths, documents.targets, documents.local  # numbers of those that this rank brought
    ((900, 300, 20), 1217, (1,))

    `documents[d]` has a length and a number of targets on every rank. It has token ids, labels and values only of rows
    that are here: before a plan those of `local`, and in `rows_under(plan)` those that this rank computes.
    """

    world: World
    local: tuple[int, ...]
    names: tuple[str, ...]
    _ends: Integers  # where each rank's rows end, among the rows of all documents (ranks,)
    _facts: Facts
    # This rank read the documents of these rows.
    _brought_rows: Rows
    # This rank can read these rows: those that it brought, or those that it computes under a plan.
    _rows_here: Rows

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._facts.lengths.tolist())

    @cached_property
    def targets(self) -> int:
        return int(self._facts.targets.sum())

    def __len__(self) -> int:
        return len(self._facts.lengths)

    def __getitem__(self, document: int) -> "GatheredDocument":  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        return GatheredDocument(self, int(document))

    def __repr__(self) -> str:
        return f"GatheredDocuments({plural(len(self), 'document')}, {len(self.local)} from this rank)"

    def rows_under(self, plan: Plan, depths: int = 0) -> "GatheredDocuments":
        """Return these documents with the rows that this rank computes under a plan; entered by all ranks.

        >>> rows = documents.rows_under(plan)
        >>> ids, labels = read_inputs_and_labels(rows, bind(micro_batch, world).with_padding())

        `run_step`, `evaluate` and `token_log_probs` call it themselves. With a run of rows comes the row after it,
        which its last one predicts; `depths` of multi-token prediction need as many more. Raises CommError where ranks
        hold different plans, and DataError on every rank for a plan of other documents.
        """
        from longspan.bridge.bridge import carry_rows, copy_moves_to_device  # a step without gathered rows has none

        digest = text_digest(f"{plan.digest()} {depths}")
        need = read_and_compare_digest(lambda: self._rank_runs(plan, depths), digest, self.world, hint=_HINT)
        channel = self.world.channels.hosts
        have = [
            _one_run(start, stop) for start, stop in zip(np.append(0, self._ends[:-1]), self._ends, strict=True)
        ]
        exchange = Exchange(Partition.from_runs(have), Partition.from_runs(need))
        moves = copy_moves_to_device(exchange.moves(channel.index), channel.device)
        columns = carry_rows(torch.from_numpy(self._brought_rows.columns), moves, channel, "rows of documents")
        return replace(self, _rows_here=Rows(exchange.need.rows(channel.index), columns.numpy()))

    def _rank_runs(self, plan: Plan, depths: int) -> list[Integers]:
        """Ascending runs of rows (n, 2), in the order of ranks, alike on every rank."""
        if plan.lengths != self.lengths:
            raise PlanError(
                f"the plan has {plural(len(plan.lengths), 'document')} of {excerpt(plan.lengths)} tokens, {len(self)} "
                f"of {excerpt(self.lengths)} were gathered; plan from their lengths: plan_dynamic(documents.lengths, …)"
            )
        home = self.world.home
        by_slot = [[_one_run(0, 0)] for _ in range(home.slots)]  # empty arrays, for slots that need nothing
        for group in plan.groups:
            numbers = np.asarray(group.documents, dtype=np.int64)
            for member, slot in enumerate(group.slots):
                segments = group.shares.segments(member)
                document = numbers[segments.document]
                length = self._facts.lengths[document]
                # Labels of a run's last rows are further on, as far as its document has tokens.
                stop = np.minimum(segments.stop + depths + 1, length)
                is_real = segments.start < length  # a document laid out longer than it is ends in padding
                runs = self._facts.starts[document] + np.stack([segments.start, stop])
                by_slot[slot].append(runs.T[is_real])
        merged_runs = [_merge_runs(np.concatenate(runs)) for runs in by_slot]
        return [merged_runs[home.coordinates(rank).slot] for rank in home.ranks]

    def read_column(self, column: str, document: int, positions: Any) -> Integers:
        """Return a column (n,) at these positions of a document: an array, an index or a slice.

        Raises DataError for rows that are not on this rank, IndexError for positions outside the document.
        """
        return self._rows_here.columns[self._places(document, positions), self.names.index(column)]

    def read_table(self, document: int, positions: Any) -> Table | None:
        """Return the table (n, k + 1) of a teacher's likeliest tokens at these positions, None without one; it raises
        what `read_column` does.
        """
        columns = [i for i, name in enumerate(self.names) if name.startswith(_ENTRY)]
        if not columns:
            return None
        # By their names they are the last columns.
        return table_of_numbers(self._rows_here.columns[self._places(document, positions), columns[0] :])

    def _places(self, document: int, positions: Any) -> Integers:
        length = int(self._facts.lengths[document])
        local_rows = self._rows_here
        positions = positions if isinstance(positions, np.ndarray) else np.atleast_1d(np.arange(length)[positions])
        if positions.size and not (positions.min() >= 0 and positions.max() < length):
            raise IndexError(f"positions {positions.min()} to {positions.max()} of a document of {length} tokens")
        rows = positions + int(self._facts.starts[document])
        places = np.searchsorted(local_rows.numbers, rows)
        # A row is here if there is a number at its place, and it is the row's own.
        is_here = places < len(local_rows.numbers)
        is_here[is_here] = local_rows.numbers[places[is_here]] == rows[is_here]
        if not is_here.all():
            raise DataError(
                f"row {positions[~is_here][0]} of document {document} is not on rank {self.world.rank}, which read "
                f"{plural(len(self.local), 'document')} of {len(self)}; run_step brings rows to the ranks that compute "
                "them, and in a loop of one's own documents.rows_under(plan) does"
            )
        return places


class GatheredDocument:
    """One document of several ranks, as `run_step` reads it: a `Labelled` and a `Valued` one (`data/document.py`).

    Its length and number of targets are known on every rank; ids, labels and values only of rows that are here.
    """

    def __init__(self, documents: GatheredDocuments, number: int) -> None:
        """Take the facts of document `number`; no row is read."""
        facts = {name: int(values[number]) for name, values in documents._facts._asdict().items()}
        self._documents = documents
        self._number = number
        self._facts = facts
        self.targets: int = facts["targets"]
        self.rows_before_targets: int = facts["prefix_rows"]
        self.makes_scores: bool = bool(facts["scored"])

    def __len__(self) -> int:
        return self._facts["lengths"]

    def __getitem__(self, positions: Any) -> Any:
        return self._documents.read_column(IDS, self._number, positions)

    def labels(self, positions: Any = None) -> Integers:
        """Return the token id to predict at each position (n,), −100 for none."""
        positions = np.arange(len(self)) if positions is None else positions
        return self._documents.read_column(
            LABELS if LABELS in self._documents.names else IDS, self._number, positions
        )

    def token_values(self, positions: Integers) -> Mapping[str, npt.NDArray[np.float64]]:
        """Return the numbers (n,) that came with the document, by name; weights only if this document brought some."""
        left_out = set() if self._facts["weighted"] else {number_column(WEIGHTS)}
        read_column = self._documents.read_column
        # Names without the dot of `number_column`; numbers travel as the bits of float64.
        return {
            name[1:]: read_column(name, self._number, positions).view(np.float64)
            for name in self._documents.names
            if name.startswith(".") and name not in left_out
        }

    def likeliest(self, positions: Integers) -> Table | None:
        """Return the rows (n, k + 1) of the table of likeliest tokens that came with the document; None without one."""
        return self._documents.read_table(self._number, positions)


# ---- columns, and runs of rows


def number_column(name: str) -> str:
    """Return the name of a column of numbers: with a dot, so that numbers may be called "ids" or "labels" too."""
    return f".{name}"


_ENTRY = ":"  # begins the names of the columns of a table of likeliest tokens


def _one_run(start: int, stop: int) -> Integers:
    return np.array([[start, stop]], dtype=np.int64)[: int(stop > start)]


def _merge_runs(runs: Integers) -> Integers:
    """Runs (n, 2) are (first row, end) and may overlap; the result is ascending and does not."""
    if not len(runs):
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])  # the furthest end of each run and all before it
    # A merged run begins where a run begins after the end of all before.
    firsts = np.append(0, np.flatnonzero(runs[1:, 0] > reach[:-1]) + 1)
    return np.stack([runs[firsts, 0], reach[np.append(firsts[1:], len(runs)) - 1]], axis=1)


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

    def read_local_documents() -> "_ReadDocuments":
        """Read every document that this rank brings, once.

        Raises DataError for what is no list of documents, and for MediaDocuments: neither their items nor the positions
        that they give to rows of images (M-RoPE) are among the columns that travel.
        """
        for name in ("items", "positions"):  # a callable `items` is a mapping's method, and refused below
            if (value := getattr(local, name, None)) is not None and (name == "positions" or not callable(value)):
                raise DataError(
                    f"the documents ({type(local).__name__}) have {name}, and rows of encoders do not move with those "
                    "of documents; give all ranks the same MediaDocuments instead of gathering them"
                )
        if isinstance(local, Mapping) or not (hasattr(local, "__iter__") or hasattr(local, "__getitem__")):
            raise DataError(
                f"gather_documents got {short_text(local)}; give a list of documents, which is empty on a rank without "
                "any; of a batch of tensors longspan.train.documents_of(batch).documents are some"
            )
        # By number where that is possible, as a data set of torch need not end an iteration.
        source: Any = local
        by_number = hasattr(source, "__len__") and hasattr(source, "__getitem__")
        read_documents = _ReadDocuments()
        for number, document in enumerate((source[i] for i in range(len(source))) if by_number else source):
            read_documents.add_document(number, document)
        return read_documents

    return _join_shares(
        result_or_first_error(world, read_local_documents, lambda error: reading_error(error, world)), world
    )


def bring_gathered_rows(inputs: StepInputs, depths: int) -> StepInputs:
    """Return what a step runs over, with rows of GatheredDocuments brought to this rank; entered by all ranks. Raises
    DataError for documents that were gathered in another world.
    """
    gathered = inputs.documents.documents
    if not isinstance(gathered, GatheredDocuments):
        return inputs
    if gathered.world is not inputs.world:
        raise DataError(
            "the documents were gathered in another world; call gather_documents(local, world) with this"
        )
    documents = copy(inputs.documents)
    documents.documents = gathered.rows_under(inputs.plan, depths)
    return replace(inputs, documents=documents)


# ---- what a rank reads, and what it tells the others of it


class _Share(NamedTuple):
    """What a rank tells the others of the documents that it read."""

    facts: Integers  # (D, 5) the first fields of Facts
    # The names are those of values of tokens.
    names: tuple[str, ...]
    labelled: bool  # whether a label is another than its token
    # The digest is of all that the documents hold; it is empty for fewer than two different ones.
    digest: bytes


class _ReadDocuments:
    """The documents that this rank brings, read into columns of int64: token ids, labels, and bits of numbers."""

    def __init__(self) -> None:
        self._facts = list[tuple[int, ...]]()
        self._documents = list[dict[str, Integers]]()  # columns by name
        self._names = NamesOfValues()
        self._labelled = False

    def add_document(self, number: int, document: Any) -> None:
        """Read and check one document, and keep its columns and facts; `number` counts this rank's documents, for
        errors.

        Numbers are kept as the bits of float64, so that all columns are of int64 and travel as one table. Raises
        DataError for what is no document.
        """
        if isinstance(document, Mapping):
            raise DataError(
                f"document {number} is a {type(document).__name__} of {', '.join(map(str, document))}; give its token "
                "ids, or longspan.Document(ids, labels=…) where not every token is a target"
            )
        if getattr(document, "parent", -1) >= 0:
            raise DataError(
                f"document {number} continues document {document.parent}, which ranks that gather documents do not "
                "know; gather whole documents"
            )
        try:
            positions = np.arange(len(document))
        except TypeError as error:
            raise DataError(
                f"document {number} is {short_text(document)}, which has no length; give a list of documents, each of "
                "them token ids or a longspan.Document"
            ) from error
        if isinstance(document, torch.Tensor):
            ids = document.detach().cpu().numpy()
        else:
            ids = np.asarray(document if isinstance(document, list | tuple) else document[positions])
        check_integers(number, ids, positions, "a document gives token ids")
        labels = np.asarray(document.labels(positions)) if isinstance(document, Labelled) else ids
        check_integers(number, labels, positions, "its labels are token ids, or −100")
        values = document.token_values(positions) if isinstance(document, Valued) else {}
        self._names.check_values(number, values, positions)
        scored = int(getattr(document, "makes_scores", False))
        # No row predicts the token at position 0; where rows have scores, the first row may have a label.
        targets = int((labels[0 if scored else 1 :] != NO_TARGET).sum())
        prefix_rows = count_prefix_rows(document, number, len(ids))
        # The order is that of `_Share.facts`.
        self._facts.append((len(ids), targets, prefix_rows, scored, int(WEIGHTS in values)))
        self._labelled |= not np.array_equal(ids, labels)
        columns = {IDS: ids.astype(np.int64), LABELS: labels.astype(np.int64)}
        bits = {
            number_column(name): np.asarray(value, dtype=np.float64).view(np.int64)
            for name, value in values.items()
        }
        read_table = getattr(document, "likeliest", None)
        table = None if read_table is None else read_table(positions)
        # Names of as many digits are in the order of the table's columns.
        numbers = [] if table is None else table_numbers(table).T
        entries = {f"{_ENTRY}{i:06d}": column for i, column in enumerate(numbers)}
        if self._documents and len(entries) != (first := sum(name[0] == _ENTRY for name in self._documents[0])):
            raise DataError(
                f"document {number} has {max(0, len(entries) - 1)} likeliest tokens of a teacher and document 0 has "
                f"{max(0, first - 1)}; give all documents of a step tables of as many, or none"
            )
        self._documents.append(columns | bits | entries)

    def make_share(self) -> _Share:
        """Return what the others learn of these documents.

        There is no digest unless two documents differ: ranks may well have drawn one document each, and the same.
        """
        digests = list[bytes]()
        for columns in self._documents:
            document_hash = hashlib.blake2b(repr(sorted(columns)).encode(), digest_size=16)
            for name in sorted(columns):
                document_hash.update(columns[name].tobytes())
            digests.append(document_hash.digest())
        digest = hashlib.blake2b(b"".join(digests), digest_size=16).digest() if len(set(digests)) > 1 else b""
        names = {name for document in self._documents for name in document} - {IDS, LABELS}
        facts = np.array(self._facts, dtype=np.int64).reshape(-1, 5)
        return _Share(facts, tuple(sorted(names)), self._labelled, digest)

    def row_table(self, columns: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return all rows (n, columns). Only weights may be missing in a document, whose rows then have weight 1."""
        weight_bits = np.float64(1).view(np.int64)
        rows = [
            np.stack(
                [document.get(name, np.broadcast_to(weight_bits, len(document[IDS]))) for name in columns], axis=1
            )
            for document in self._documents
        ]
        return np.concatenate([np.empty((0, len(columns)), dtype=np.int64), *rows])


# ---- what all ranks make of the shares


def _join_shares(local: _ReadDocuments, world: World) -> GatheredDocuments:
    """All ranks enter; documents are numbered in the order of ranks."""
    shares = world.control.gather_objects(local.make_share(), "lengths of documents")
    _check_shares(dict(zip(world.home.ranks, shares, strict=True)))
    shared_facts = np.concatenate([share.facts for share in shares])  # columns: length, 4 more
    lengths = shared_facts[:, 0]
    # The last column says where a document starts.
    facts = np.column_stack([shared_facts, np.cumsum(lengths) - lengths])
    ends = np.cumsum([int(share.facts[:, 0].sum()) for share in shares])
    index = world.home.ranks.index(world.rank)
    first = sum(len(share.facts) for share in shares[:index])
    numbers = tuple(range(first, first + len(shares[index].facts)))
    columns = [IDS]
    if any(share.labelled for share in shares):
        columns.append(LABELS)
    columns += sorted({name for share in shares for name in share.names})
    table = local.row_table(columns)
    rows = Rows(np.arange(ends[index] - len(table), ends[index]), table)
    return GatheredDocuments(world, numbers, tuple(columns), ends, Facts(*facts.T), rows, rows)


def _check_shares(shares: Mapping[int, _Share]) -> None:
    """Raises on every rank. Ranks without documents have no names."""
    having = [(rank, share) for rank, share in shares.items() if len(share.facts)]
    all_names = {name for _, share in having for name in share.names} - {number_column(WEIGHTS)}
    for name in sorted(all_names):
        lacking = [rank for rank, share in having if name not in share.names]
        if lacking:
            bringing = [rank for rank, share in having if name in share.names]
            noun = "more of a teacher's likeliest tokens" if name.startswith(_ENTRY) else repr(name[1:])
            raise on_all_ranks(
                DataError(
                    f"documents of ranks {excerpt(bringing)} have {noun} and those of ranks {excerpt(lacking)} "
                    "have not; give the documents of a step the same values, 0 where they do not matter"
                )
            )
    first_with = dict[bytes, int]()
    for rank, share in having:
        if share.digest and (first := first_with.setdefault(share.digest, rank)) != rank:
            raise on_all_ranks(
                DataError(
                    f"ranks {first} and {rank} bring the same {len(share.facts)} documents of "
                    f"{excerpt(share.facts[:, 0].tolist())} tokens, which would count twice; let each rank load "
                    "documents of its own (DistributedSampler), or give [] on ranks that load what another does, as "
                    "ranks of one slot may. Documents that all ranks have go to run_step as they are"
                )
            )
