"""Documents that ranks load themselves: what all ranks know of them, and how rows reach the ranks that own them.

All ranks know the length and the number of targets of every document, from which they make one plan. Rows stay where
they were read. Under a plan each goes from there to the ranks of the slot that computes it, and to nobody else
(`GatheredDocuments.rows_under`, which `run_step` and its like call). They travel between hosts, over gloo, and no
communicator of NCCL is made for them. How they are read is in `gather.py`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from longspan.comm import World
from longspan.comm.moves.carry_rows import carry_rows, moves_on_device
from longspan.errors import DataError, PlanError, plural
from longspan.layout import Exchange, Integers, Partition
from longspan.layout.layout import excerpt
from longspan.plan import Plan
from longspan.train.reading.local_batch import read_and_agree
from longspan.train.reading.read_rows import WEIGHTS

IDS, LABELS = "ids", "labels"
_HINT = "Every rank makes the plan from the lengths of the documents that were gathered, with the same settings"


class Facts(NamedTuple):
    """What all ranks know of each document (D,)."""

    lengths: Integers
    targets: Integers
    prefix_rows: Integers  # rows before the first target
    pieces: Integers  # documents in a pack; 0 for a document that is no pack
    weighted: Integers  # 0 or 1
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
    _brought_rows: Rows  # of the documents that this rank read
    _rows_here: Rows  # that can be read on this rank: those it brought, or those that it computes under a plan

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(self._facts.lengths.tolist())

    @cached_property
    def targets(self) -> int:
        """How many tokens all documents predict."""
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
        digest = hashlib.blake2b(f"{plan.digest()} {depths}".encode(), digest_size=32).hexdigest()
        need = read_and_agree(lambda: self._rank_runs(plan, depths), digest, self.world, hint=_HINT)
        channel = self.world.channels.hosts
        have = [_one_run(start, stop) for start, stop in zip(np.append(0, self._ends[:-1]), self._ends, strict=True)]
        exchange = Exchange(Partition.from_runs(have), Partition.from_runs(need))
        moves = moves_on_device(exchange.moves(channel.index), channel.device)
        columns = carry_rows(torch.from_numpy(self._brought_rows.columns), moves, channel, "rows of documents")
        return replace(self, _rows_here=Rows(exchange.need.rows(channel.index), columns.numpy()))

    def _rank_runs(self, plan: Plan, depths: int) -> list[Integers]:
        """Return the runs of rows (n, 2) that each rank of the home needs under a plan.

        Runs of other slots are left out unless this rank brought a document of their group: it works out only the
        messages that it sends or receives. Both ranks of a message have its rows in ascending order, so they match.
        """
        if plan.lengths != self.lengths:
            raise PlanError(
                f"the plan has {plural(len(plan.lengths), 'document')} of {excerpt(plan.lengths)} tokens, {len(self)} "
                f"of {excerpt(self.lengths)} were gathered; plan from their lengths: plan_dynamic(documents.lengths, …)"
            )
        home, local = self.world.home, set(self.local)
        by_slot = [[_one_run(0, 0)] for _ in range(home.slots)]  # empty arrays, for slots that need nothing
        for group in (group for micro_batch in plan.micro_batches for group in micro_batch.groups):
            sends = not local.isdisjoint(group.documents)
            for member, slot in enumerate(group.slots):
                if sends or slot == self.world.slot:
                    numbers = np.asarray(group.documents, dtype=np.int64)
                    segments = group.shares.segments(member)
                    runs = segments.start, segments.stop, numbers[segments.document]
                    by_slot[slot].append(self._rows_to_read(*runs, ahead=depths + 1))
        merged_runs = [_merge_runs(np.concatenate(runs)) for runs in by_slot]
        return [merged_runs[home.coordinates(rank).slot] for rank in home.ranks]

    def _rows_to_read(self, start: Integers, stop: Integers, document: Integers, *, ahead: int) -> Integers:
        """Return the runs of rows (runs, 2) from `start` to `stop` of documents, each with `ahead` rows after it.

        A run ends with its document; the rows after it are the labels of its last ones.
        """
        length = self._facts.lengths[document]
        real = start < length  # a document laid out longer than it is ends in padding
        start, stop = (self._facts.starts[document] + x for x in (start, np.minimum(stop + ahead, length)))
        return np.stack([start, stop], axis=1)[real]

    def read_column(self, column: str, document: int, positions: Any) -> Integers:
        """Return what a column has for these positions of a document, an array or an index such as a slice.

        Raises IndexError for positions outside the document, DataError for rows that are not on this rank.
        """
        length, local_rows = int(self._facts.lengths[document]), self._rows_here
        positions = positions if isinstance(positions, np.ndarray) else np.atleast_1d(np.arange(length)[positions])
        if positions.size and not (positions.min() >= 0 and positions.max() < length):
            raise IndexError(f"positions {positions.min()} to {positions.max()} of a document of {length} tokens")
        rows = positions + int(self._facts.starts[document])
        places = np.searchsorted(local_rows.numbers, rows)
        is_here = places < len(local_rows.numbers)  # and the row at that place is the one that was looked for
        is_here[is_here] = local_rows.numbers[places[is_here]] == rows[is_here]
        if not is_here.all():
            raise DataError(
                f"row {positions[~is_here][0]} of document {document} is not on rank {self.world.rank}, which read "
                f"{plural(len(self.local), 'document')} of {len(self)}; run_step brings rows to the ranks that compute "
                "them, and in a loop of one's own documents.rows_under(plan) does"
            )
        return local_rows.columns[places, self.names.index(column)]

    def facts(self, document: int) -> Mapping[str, int]:
        """Return what all ranks know of a document, by the names of `Facts`."""
        return {name: int(values[document]) for name, values in self._facts._asdict().items()}


class GatheredDocument:
    """One document of several ranks, as `run_step` reads it: a `Labelled` and a `Valued` one (`data/document.py`)."""

    def __init__(self, documents: GatheredDocuments, number: int) -> None:
        self._documents, self._number, self._facts = documents, number, documents.facts(number)

    def __len__(self) -> int:
        return self._facts["lengths"]

    def __getitem__(self, positions: Any) -> Any:
        return self._documents.read_column(IDS, self._number, positions)

    @property
    def targets(self) -> int:
        """How many of its tokens are predicted."""
        return self._facts["targets"]

    @property
    def rows_before_targets(self) -> int:
        """How many rows stand before its first target."""
        return self._facts["prefix_rows"]

    @property
    def pieces(self) -> range:
        """The numbers of the documents in a pack, from 0; empty for a document that is no pack."""
        return range(self._facts["pieces"])

    def labels(self, positions: Any = None) -> Integers:
        """Return the token id to predict at each position (n,), −100 for none.

        There is a column of labels only where some label of the step is another than its token.
        """
        positions = np.arange(len(self)) if positions is None else positions
        return self._documents.read_column(LABELS if LABELS in self._documents.names else IDS, self._number, positions)

    def token_values(self, positions: Integers) -> Mapping[str, npt.NDArray[np.float64]]:
        """Return numbers (n,) of the tokens at these positions, by name."""
        names = [name for name in self._documents.names if name not in (IDS, LABELS)]
        names = [name for name in names if name != number_column(WEIGHTS) or self._facts["weighted"]]
        read_column = self._documents.read_column
        # Names without the dot of `number_column`; numbers travel as the bits of float64.
        return {name[1:]: read_column(name, self._number, positions).view(np.float64) for name in names}


# ---- columns, and runs of rows


def number_column(name: str) -> str:
    """Return the name of a column of numbers: with a dot, so that numbers may be called "ids" or "labels" too."""
    return f".{name}"


def _one_run(start: int, stop: int) -> Integers:
    """Return one run of rows as an array (1, 2), or (0, 2) if the run is empty."""
    return np.array([[start, stop]], dtype=np.int64)[: int(stop > start)]


def _merge_runs(runs: Integers) -> Integers:
    """Merge runs of rows (n, 2), (first row, end), that may overlap, to ascending runs that do not."""
    if not len(runs):
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    firsts = np.append(0, np.flatnonzero(runs[1:, 0] > reach[:-1]) + 1)  # runs that begin after the end of all before
    return np.stack([runs[firsts, 0], reach[np.append(firsts[1:], len(runs)) - 1]], axis=1)
