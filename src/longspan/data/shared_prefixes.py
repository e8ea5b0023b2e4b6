"""Prefixes that documents share, found on their token ids, and cut so that each is computed once.

Only rows that predict no token are shared. The row that predicts a document's first target, the last of its prompt, is
the first row of its branch: so labels, losses and numbers of tokens are each in one document, as before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy.typing as npt

from longspan.data.corpus_documents import LabelledCorpusDocument, ScoredCorpusDocument
from longspan.data.document import Document, count_targets
from longspan.data.scored_document import ScoredDocument
from longspan.errors import DataError, plural
from longspan.layout.partition import NO_TARGET
from longspan.plan.shape.positions import LengthLimit, length_class

# A prefix has at least this many rows.
LEAST_ROWS = 256
_KINDS = (Document, ScoredDocument, LabelledCorpusDocument, ScoredCorpusDocument)


@dataclass(frozen=True, eq=False, repr=False)
class SharedDocuments(Sequence[Any]):
    """Documents of a step of which some share prefixes, as `share_prefixes` returns them.

    `shared[d]` for a d that `share_prefixes` was given is the rest of document d, after `prefix_lengths[d]` tokens that
    lie in other documents; it has all of d's targets and their numbers. The prefixes stand behind. `parents[d]` is the
    document whose rows come before those of `shared[d]`, −1 for none. `whole` are the documents that were given,
    `left_out` of them longer than `max_rows` allows.
    """

    documents: tuple[Any, ...]
    parents: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    left_out: int = 0
    whole: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, document: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.documents[document]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each, for the planners, whose `parents=` are these parents."""
        return tuple(map(len, self.documents))

    @cached_property
    def targets(self) -> int:
        """How many tokens the documents predict, for the planners' `targets=`."""
        return sum(map(count_targets, self.documents))

    def __repr__(self) -> str:
        count = len(self.prefix_lengths)
        separate = sum(self.lengths[:count]) + sum(self.prefix_lengths)
        text = f"{plural(count, 'document')}, {plural(len(self) - count, 'shared prefix', 'es')}: "
        text += f"{sum(self.lengths):,} rows in place of {separate:,}"
        return text + (
            f"; {self.left_out} in prefix trees above max_rows are left separate" if self.left_out else ""
        )


def share_prefixes(
    documents: Sequence[Any],
    *,
    least_rows: int = LEAST_ROWS,
    max_rows: int | None = None,
    depths: int = 0,
    length_limits: Sequence[LengthLimit] = (),
) -> SharedDocuments:
    """Find prefixes that documents of a step share, so that each is computed once.

    >>> prompt = list(range(1000))
    >>> answers = [[7, 8, 9], [7, 5]]
    >>> shared = share_prefixes([Document(prompt + a, labels=[-100] * 1000 + a) for a in answers])
    >>> shared.lengths, shared.parents, shared.targets
    ((4, 3, 999), (2, 2, -1), 5)
    >>> plan = plan_dynamic(shared.lengths, home, parents=shared.parents, targets=shared.targets)  # doctest: +SKIP
    >>> run_step(model, plan, shared, world)  # doctest: +SKIP

    Prefixes may continue each other; each has at least `least_rows` rows beyond those of the prefix that it continues.
    `max_rows` limits the rows of all documents that share some: a group's degree times max_tokens_per_slot. Trees
    with more are divided, and what fits no tree stays separate. Only documents of token ids (`Document`,
    `ScoredDocument`, those of a corpus) share; any other stays as it is. A prefix ends `depths` rows earlier, as its
    rows at a depth of multi-token prediction (`mtp=` of the step) read so many tokens ahead. Only documents share that
    have the same rotary frequencies, where these depend on lengths by `length_limits` (of `model.call_rules`). Raises
    DataError for a document that has a parent already, and numbers below 1.
    """
    for name, value in (("least_rows", least_rows), ("max_rows", max_rows)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise DataError(f"{name} is {value!r}; give an integer of at least 1")
    trees = find_prefix_trees(documents, least_rows, max_rows, depths, length_limits)
    return cut_documents(documents, trees.lengths, trees.parents, trees.left_out, depths=depths)


class PrefixTrees(NamedTuple):
    """Rows and parents of documents once their prefixes, which stand behind them, are apart (`SharedDocuments`)."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    left_out: int = 0
    too_large: "LargeTree | None" = None  # the largest that was divided or left separate for the limit of rows


class LargeTree(NamedTuple):
    """How many documents begin alike, and the rows that they would have as one prefix tree."""

    documents: int
    rows: int


def find_prefix_trees(
    documents: Sequence[Any],
    least_rows: int = LEAST_ROWS,
    max_rows: int | None = None,
    depths: int = 0,
    length_limits: Sequence[LengthLimit] = (),
) -> PrefixTrees:
    """Find what `share_prefixes` cuts; of documents that begin unlike all others only the first ids are read."""
    trees = list[_PrefixTree]()
    left_out = 0
    too_large: LargeTree | None = None
    for numbers, rows in _group_by_common_prefix(documents, least_rows, depths, length_limits):
        # Entry i counts the first rows that document i has in common with the one before.
        common = [0]
        common += (_common_rows(documents, rows, one, other, depths) for one, other in pairwise(numbers))
        whole = _make_tree(documents, numbers, common, least_rows)
        if max_rows is None or whole.rows <= max_rows:
            trees.append(whole)
            continue
        if too_large is None or whole.rows > too_large.rows:
            too_large = LargeTree(len(numbers), whole.rows)
        for tree in _divide_into_trees(documents, numbers, common, least_rows, max_rows):
            if len(tree.documents) > 1 and tree.rows <= max_rows:
                trees.append(tree)
            else:
                left_out += len(tree.documents)
    lengths = [len(document) for document in documents]
    parents = [-1] * len(lengths)
    # documents lose their prefixes, which are appended, tree after tree
    for tree in trees:
        first = len(lengths)
        for number, prefix in zip(tree.documents, tree.prefix, strict=True):
            if prefix >= 0:
                lengths[number] -= tree.prefixes[prefix].end
                parents[number] = first + prefix
        for end, parent in tree.prefixes:
            lengths.append(end - _end(tree.prefixes, parent))
            parents.append(first + parent if parent >= 0 else -1)
    return PrefixTrees(tuple(lengths), tuple(parents), left_out, too_large)


def cut_documents(
    documents: Sequence[Any], lengths: Sequence[int], parents: Sequence[int], left_out: int = 0, *, depths: int = 0
) -> SharedDocuments:
    """Cut documents into rests and prefixes of these `lengths` and `parents`, which `PrefixTrees` or a plan has.

    The rests of the documents come first, in their order, then the prefixes. No token is read.
    """
    count = len(documents)
    starts = [0] * len(parents)
    for part in (*range(count, len(parents)), *range(count)):  # prefixes stand behind those that they continue
        if (parent := parents[part]) >= 0:
            starts[part] = starts[parent] + lengths[parent]
    # Each part has a document that has its tokens.
    source = [*range(count), *[-1] * (len(parents) - count)]
    for document in range(count):
        part = parents[document]
        while part >= 0 and source[part] < 0:
            source[part] = document
            part = parents[part]
    cut = (
        documents[source[part]].part(start, start + length, parent, depths if part >= count else 0)
        if part >= count or start
        else documents[part]
        for part, (start, length, parent) in enumerate(zip(starts, lengths, parents, strict=True))
    )
    return SharedDocuments(tuple(cut), tuple(parents), tuple(starts[:count]), left_out, documents)


class _Prefix(NamedTuple):
    """The first `end` rows of some documents, of which those of prefix `parent` (−1: none) lie in that one."""

    end: int
    parent: int


def _end(prefixes: Sequence[_Prefix], number: int) -> int:
    """0 for −1, which is no prefix"""
    return prefixes[number].end if number >= 0 else 0


class _PrefixTree(NamedTuple):
    """Documents by number, in the order of their ids, and their prefixes.

    `prefix` has for each document the index of the prefix that it continues (−1: none). `rows` are those of all
    prefixes and of the rests of all documents.
    """

    documents: list[int]
    prefix: list[int]
    prefixes: list[_Prefix]
    rows: int


def _shareable_rows(document: Any) -> int:
    """The rows before the one that predicts the first target, or the first that has a score; at least one stays."""
    if isinstance(document, LabelledCorpusDocument):
        return document.shareable_prefix_length
    ahead = 0 if isinstance(document, ScoredDocument) else 1  # a row predicts the next token
    is_target = document.labels()[ahead:] != NO_TARGET
    return int(is_target.argmax()) if is_target.any() else max(len(document) - 1, 0)


def _group_by_common_prefix(
    documents: Sequence[Any], least_rows: int, depths: int, length_limits: Sequence[LengthLimit]
) -> Iterator[tuple[list[int], dict[int, int]]]:
    """Numbers are sorted by the ids that documents may share. `depths` of multi-token prediction read as many tokens
    behind a prefix: these, too, are the same in its documents."""
    same_start = dict[Any, list[int]]()
    for number, document in enumerate(documents):
        if getattr(document, "parent", -1) >= 0:
            raise DataError(
                f"document {number} has the parent {document.parent}, and is cut already; give whole documents"
            )
        if type(document) in _KINDS and len(document) > least_rows + depths:
            key = document.ids[: least_rows + depths].tobytes(), length_class(length_limits, len(document))
            same_start.setdefault(key, []).append(number)
    for numbers in same_start.values():
        if len(numbers) < 2:
            continue
        shareable = {number: _shareable_rows(documents[number]) - depths for number in numbers}
        rows = {number: count for number, count in shareable.items() if count >= least_rows}
        if len(rows) > 1:
            # in this order documents with a common prefix follow each other
            ordered = sorted(rows, key=lambda d: documents[d].ids[: rows[d] + depths].astype(">i8").tobytes())
            yield ordered, rows


def _divide_into_trees(
    documents: Sequence[Any], numbers: list[int], common: list[int], least: int, max_rows: int
) -> Iterator[_PrefixTree]:
    """`common[i]` are the rows that document i has in common with the one before. A tree ends where it would have
    more than `max_rows` rows if each document shared all of those with its neighbour. As prefixes have at least `least`
    rows, it may share less, and its `rows` may be more."""
    start = 0
    total = 0
    for index, number in enumerate(numbers):
        added = len(documents[number]) - (common[index] if index > start else 0)
        if index > start and total + added > max_rows:
            yield _make_tree(documents, numbers[start:index], common[start:index], least)
            start = index
            total = 0
            added = len(documents[number])
        total += added
    yield _make_tree(documents, numbers[start:], common[start:], least)


def _common_rows(documents: Sequence[Any], rows: dict[int, int], one: int, other: int, depths: int) -> int:
    """The ids at `depths` rows behind the common ones are the same, too."""
    count = min(rows[one], rows[other]) + depths
    differs = documents[one].ids[:count] != documents[other].ids[:count]
    return int(differs.argmax() if differs.any() else count) - depths


def group_documents(documents: Sequence[Any], sources: npt.NDArray[Any], most_tokens: int) -> list[list[int]]:
    """List all documents in groups of at most `most_tokens`, each of one source, whose neighbours begin alike.

    Neighbours have at least half of the rows in common that the one which can share fewer could share: that is more
    than a prompt of the system. A document longer than `most_tokens`, or unlike all others, is a group of its own.
    Groups stand in the order of their first documents.
    """
    groups = list[list[int]]()
    for numbers, rows in _group_by_common_prefix(documents, LEAST_ROWS, depths=0, length_limits=()):
        # This counts the tokens of the last group.
        tokens = 0
        for before, number in pairwise([-1, *numbers]):
            goes_on = (
                before >= 0
                and tokens + len(documents[number]) <= most_tokens
                and sources[before] == sources[number]
                and 2 * _common_rows(documents, rows, before, number, depths=0) >= min(rows[before], rows[number])
            )
            if not goes_on:
                groups.append([])
                tokens = 0
            groups[-1].append(number)
            tokens += len(documents[number])
    grouped = {number for group in groups for number in group}
    groups += ([number] for number in range(len(documents)) if number not in grouped)
    return sorted(groups, key=min)


def _make_tree(documents: Sequence[Any], numbers: list[int], common: list[int], least: int) -> _PrefixTree:
    """A prefix is what neighbours have in common, where that is `least` rows or more beyond the prefix that they
    continue."""
    prefixes = list[_Prefix]()
    prefix = [-1] * len(numbers)
    waiting = [(0, len(numbers), -1)]  # documents from first to before stop, and the prefix that all of them have
    while waiting:
        first, stop, outer = waiting.pop()
        if stop - first < 2:
            continue
        end = min(common[first + 1 : stop])
        inner = outer
        if end - _end(prefixes, outer) >= least:
            inner = len(prefixes)
            prefixes.append(_Prefix(end, outer))
            prefix[first:stop] = [inner] * (stop - first)
        # between cuts documents have more in common, perhaps another prefix
        cuts = [first, *(i for i in range(first + 1, stop) if common[i] == end), stop]
        waiting += [(cut, next_cut, inner) for cut, next_cut in pairwise(cuts)]
    rests = (len(documents[n]) - _end(prefixes, p) for n, p in zip(numbers, prefix, strict=True))
    shared = (end - _end(prefixes, parent) for end, parent in prefixes)
    return _PrefixTree(numbers, prefix, prefixes, sum(rests) + sum(shared))
