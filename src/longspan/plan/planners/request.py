"""The arguments of one call of a planner, checked (`Request`), and the plan that the planner makes of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from longspan.errors import PlanError, plural
from longspan.layout import Integers, Layout, check_lengths
from longspan.plain_text import short_text
from longspan.plan.check import (
    MODES,
    LongDocumentError,
    check_choice,
    check_comm_types,
    check_count,
    check_hierarchical_sizes,
    check_work_fits_int64,
    heads_allow_degree,
)
from longspan.plan.micro_batch import PARTITIONS, Group, MicroBatch, first_size, fit_level_sizes
from longspan.plan.plan import Plan
from longspan.plan.planners.options import PlanKeywords, PlanOptions
from longspan.plan.step_times import GroupTable, timeline

SAME = 1e-9  # relative; of types as fast as each other every host takes the first


@dataclass(frozen=True, kw_only=True)
class Request(PlanOptions):
    """What a planner is called with: documents, slots, and checked options. Make it with `Request.from_arguments`."""

    lengths: tuple[int, ...]
    slots: int
    tp: int
    cp_comm_type: str | tuple[str, ...] = "p2p"
    hierarchical_context_parallel_sizes: int | tuple[int, ...] | None = None

    @classmethod
    def from_arguments(
        cls, lengths: Sequence[int], home: Layout, options: PlanOptions | None, keywords: PlanKeywords | None = None
    ) -> "Request":
        """Make a request of a planner's arguments, checked: of `options` (None: the defaults), whose fields `keywords`
        replace. Its cost is that of these options: of their node size, type and partition, and of the home's stages.
        Raises PlanError, or LayoutError for a bad length.
        """
        documents = check_lengths(lengths)
        options = replace(options or PlanOptions(), **(keywords or {}))
        _check_options(options, documents, home)
        request = cls(lengths=documents, slots=home.slots, tp=home.tp, **vars(options))
        if max(request.parents or (), default=-1) < 0:  # no document continues another
            request = replace(request, parents=None)
        else:
            check_work_fits_int64(len(documents), int(request.tree_sizes[0].max()))
        # One tensor-parallel rank has so many heads; 0: unknown.
        heads = (options.heads or 0) // home.tp
        sizes = options.hierarchical_context_parallel_sizes
        a2a_size = 1
        if "a2a+p2p" in options.types:  # a size below 1 counts as 1 here, and is refused when the degree is known
            a2a_size = 0 if sizes is None else max(1, first_size(sizes))  # 0: each group gets its fastest size
        cost = replace(options.cost, node_size=options.node_size, stages=home.pp)
        cost = cost.under(options.types, a2a_size, heads=heads).for_partition(options.partition)
        return replace(request, cost=cost)

    @cached_property
    def trees(self) -> tuple[tuple[int, ...], ...]:
        """The documents of each prefix tree, each before those that continue it; a document that shares no prefix is a
        tree by itself. Raises PlanError for parents that go in a circle.
        """
        if self.parents is None:
            return tuple((document,) for document in range(len(self.lengths)))
        parents = self.parents
        branches: list[list[int]] = [[] for _ in parents]
        for document, parent in enumerate(parents):
            if parent >= 0:
                branches[parent].append(document)
        trees = list[tuple[int, ...]]()
        for root in (document for document, parent in enumerate(parents) if parent < 0):
            tree = list[int]()
            waiting = [root]  # a stack: a document's branches follow it, the first one at once
            while waiting:
                tree.append(waiting.pop())
                waiting += reversed(branches[tree[-1]])
            trees.append(tuple(tree))
        if in_circle := set(range(len(parents))).difference(*trees):
            raise PlanError(
                f"the parents of document {min(in_circle)} go in a circle; a first one has the parent -1"
            )
        return tuple(trees)

    @cached_property
    def bases(self) -> Integers:
        """How many rows come before each document's own, as in `Group.bases` (documents,)."""
        parents = self.parents or ()
        bases = np.zeros(len(self.lengths), dtype=np.int64)
        for document in chain.from_iterable(tree[1:] for tree in self.trees):
            bases[document] = bases[parents[document]] + self.lengths[parents[document]]
        return bases

    @cached_property
    def tree_sizes(self) -> tuple[Integers, Integers]:
        """Two arrays (trees,): the rows of each tree, and the squares that price its attention, which are twice
        the (row, key) pairs that are seen.
        """
        lengths = np.array(self.lengths, dtype=np.int64)
        if self.parents is None:
            return lengths, lengths * lengths
        order = np.fromiter(chain.from_iterable(self.trees), np.int64, len(lengths))
        first = np.cumsum([0, *map(len, self.trees[:-1])])  # where each tree begins in this order
        squares = lengths * (lengths + 2 * self.bases)
        return np.add.reduceat(lengths[order], first), np.add.reduceat(squares[order], first)

    def check_degree(self, home: Layout, cp: int) -> int:
        """Return the degree `cp` as an int. Raises PlanError if slots, heads or sizes do not allow it, or a document
        does not fit.
        """
        check_count("cp", cp)
        if self.slots % cp:
            fit = [str(d) for d in range(1, self.slots + 1) if self.slots % d == 0]
            fit_text = ", ".join(fit[:-1]) + (" or " if len(fit) > 1 else "") + fit[-1]
            raise PlanError(
                f"cp {cp} does not divide {plural(self.slots, 'slot')} "
                f"({plural(len(home.ranks), 'rank')} / tp {home.tp} / pp {home.pp}); use {fit_text}"
            )
        sizes = self.hierarchical_context_parallel_sizes
        if sizes is not None and "a2a+p2p" in self.types:
            check_hierarchical_sizes((sizes, max(1, cp // sizes)) if isinstance(sizes, int) else sizes, cp)
        check_degree_suits_heads(self, cp)
        self.check_longest(cp)
        return int(cp)

    def check_degrees(self, least: int, most: int | None) -> range | tuple[int, ...]:
        """Return the degrees from `least` to `most` (None: all slots) that a group may have. Raises PlanError if slots
        or heads allow none, or a document does not fit the widest.
        """
        check_count("min_cp", least)
        widest = self.slots if most is None else min(check_count("max_cp", most), self.slots)
        if least > self.slots:
            raise PlanError(f"min_cp {least} is above the {self.slots} slots; use at most {self.slots}")
        if most is not None and least > most:
            raise PlanError(f"min_cp {least} is above max_cp {most}; lower min_cp or raise max_cp")
        check_degree_suits_heads(self, 1)
        degrees = range(int(least), widest + 1)
        if self.heads is not None and "a2a" in self.types:
            degrees = tuple(degree for degree in degrees if self.allows(degree, self.tp))
        if not degrees:  # a2a allows no degree of the range: this raises the error that says why
            check_degree_suits_heads(self, widest)
        wider = "use a home of more slots" if widest == self.slots else "raise max_cp"
        limited = f"use a cp_comm_type other than a2a, which the heads limit to cp {degrees[-1]}"
        self.check_longest(degrees[-1], limited if degrees[-1] < widest else wider)
        return degrees

    def check_longest(self, cp: int, limit: str = "") -> None:
        """Raise LongDocumentError if the longest document, or prefix tree, does not fit cp slots. `limit` is the advice
        that the error gives in place of "raise cp", where a planner's cp cannot be higher; so it is where cp has all
        slots.
        """
        if self.rows is None or not self.lengths:
            return
        longest = int(self.tree_sizes[0].max())
        if longest <= self.rows * cp:
            return
        too_long = sum(length > self.rows * cp for length in self.lengths)
        rows = -(-longest // (cp * self.row_multiple)) * self.row_multiple
        multiple = f" in multiples of {self.row_multiple}" if self.row_multiple > 1 else ""
        limit = limit or ("raise cp" if cp < self.slots else "use a home of more slots")
        if self.parents is not None:
            tree = self.trees[int(self.tree_sizes[0].argmax())]
            raise LongDocumentError(
                f"document {tree[0]} and {plural(len(tree) - 1, 'document')} that continue it have {longest} rows, "
                f"more than the {self.rows * cp} that cp {cp} x max_tokens_per_slot {self.max_tokens_per_slot} "
                f"hold{multiple}; raise max_tokens_per_slot to {rows}, {limit}, or give "
                f"share_prefixes(documents, max_rows={self.rows * cp})"
            )
        raise LongDocumentError(
            f"document {self.lengths.index(longest)} has {longest} rows, more than the {self.rows * cp} that cp {cp} x "
            f"max_tokens_per_slot {self.max_tokens_per_slot} hold{multiple} ({plural(too_long, 'such document')}); "
            f"raise max_tokens_per_slot to {rows}, {limit}, or cut the document"
        )

    def make_group(self, slots: Sequence[int], documents: Sequence[int], pad_to: int | None = None) -> Group:
        """Return a group of these slots and documents; `pad_to` is the rows to which every document is padded (None:
        none is).
        """
        lengths = tuple(self.lengths[d] for d in documents)
        sizes = None  # no layer has a2a+p2p, or the options leave its sizes open
        if "a2a+p2p" in self.types and self.hierarchical_context_parallel_sizes is not None:
            sizes = fit_level_sizes(self.hierarchical_context_parallel_sizes, len(slots))
        partition = self.partition if len(slots) > 1 else "zigzag"  # a single slot has the same rows either way
        parents = None
        if self.parents is not None:
            index = {document: i for i, document in enumerate(documents)} | {-1: -1}
            indices = tuple(index[self.parents[document]] for document in documents)
            parents = indices if max(indices) >= 0 else None
        return Group(tuple(slots), tuple(documents), lengths, self.cp_comm_type, sizes, partition, pad_to, parents)

    def make_plan(self, micro_batches: Sequence[MicroBatch], planner: str, *, max_cp: int | None = None) -> Plan:
        """Make the checked plan of these micro-batches, with its predicted time and lower bound. Types and sizes that
        groups leave open are chosen, and dummy micro-batches added, as `_complete_micro_batches` says. The bound holds
        for plans with degrees up to `max_cp` (None: all slots).
        """
        plan = Plan(
            slots=self.slots,
            lengths=self.lengths,
            micro_batches=self._complete_micro_batches(micro_batches),
            targets=sum(self.lengths) - len(self.lengths) if self.targets is None else self.targets,
            mode=self.mode,
            max_tokens_per_slot=self.max_tokens_per_slot,
            node_size=self.node_size,
            row_multiple=self.row_multiple,
            planner=planner,
            cost=self.cost,
        ).check()
        return plan.reprice(self.cost, max_cp=max_cp)

    def step_seconds(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the predicted seconds of a step of these micro-batches, with what `make_plan` adds to them."""
        batches = self._complete_micro_batches(micro_batches)
        return timeline(batches, self.slots, self.cost, mode=self.mode, node_size=self.node_size).step_seconds

    def _complete_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
        """At least one in all; dummies fill up to the multiple. Groups of type "auto" get the fastest type, groups
        of a2a+p2p without sizes the fastest sizes. Groups keep "auto" if neither the options nor the cost's
        network, which is made for one model, know the query heads: `attend`, which sees the heads, then chooses."""
        count = max(1, len(micro_batches))
        dummies = [MicroBatch()] * (count + -count % self.micro_batch_multiple - len(micro_batches))
        chooses_type = "auto" in self.types and bool(self.heads or self.cost.network)
        chooses_sizes = "a2a+p2p" in self.types and self.hierarchical_context_parallel_sizes is None
        if not chooses_type and not chooses_sizes:
            return (*micro_batches, *dummies)
        table = GroupTable(micro_batches)
        cost = replace(self.cost, cp_comm_type="auto") if chooses_type else self.cost.under("a2a+p2p", 0)
        ways = cost.ways_of(table.degree)
        seconds = np.array([table.group_seconds_with_type(way, self.node_size) for way in ways])
        least_seconds = seconds.min(axis=0)
        # Each group gets the first of `ways` that is as fast as the fastest.
        fastest_ways: Iterator[int] = iter(np.argmax(seconds <= least_seconds * (1 + SAME), axis=0).tolist())
        typed = list[MicroBatch]()
        for batch in micro_batches:
            groups = list[Group]()
            for group in batch.groups:
                way = ways[next(fastest_ways)]
                # One slot sends nothing.
                kind = way.cp_comm_type if group.degree > 1 else "p2p"
                types = kind
                # a type for each layer, of which only "auto" is replaced
                if not isinstance(self.cp_comm_type, str):
                    types = tuple(kind if named == "auto" else named for named in self.types)
                sizes = group.hierarchical_context_parallel_sizes
                if kind == "a2a+p2p" or ("a2a+p2p" in types and sizes is None):
                    sizes = fit_level_sizes(way.a2a_size, group.degree)
                groups.append(replace(group, cp_comm_type=types, hierarchical_context_parallel_sizes=sizes))
            typed.append(MicroBatch(tuple(groups)))
        return (*typed, *dummies)


def _check_options(options: PlanOptions, documents: Sequence[int], home: Layout) -> None:
    """`Request.check_degree` checks what depends on a degree."""
    if not documents and not options.allow_empty:
        raise PlanError(
            "there are no documents to plan and allow_empty is False; give lengths, or leave allow_empty out for a "
            "step of dummy micro-batches"
        )
    check_work_fits_int64(len(documents), max(documents, default=0))
    check_comm_types(options.cp_comm_type)
    for name in ("node_size", "micro_batch_multiple", "row_multiple"):
        check_count(name, getattr(options, name))
    check_choice("mode", options.mode, MODES)
    check_choice("partition", options.partition, PARTITIONS)
    if options.targets is not None:
        check_count("targets", options.targets, least=0)
    if options.heads is not None:
        check_count("heads", options.heads)
    sizes = options.hierarchical_context_parallel_sizes
    if isinstance(sizes, int) and "a2a+p2p" in options.types:
        check_count("hierarchical_context_parallel_sizes", sizes)
    if options.parents is not None:
        _check_parent_numbers(options.parents, len(documents))
    if options.max_tokens_per_slot is not None:
        cap = check_count("max_tokens_per_slot", options.max_tokens_per_slot)
        if cap < options.row_multiple:
            raise PlanError(
                f"max_tokens_per_slot {cap} is below row_multiple {options.row_multiple}: a slot could hold no "
                f"row; use at least {options.row_multiple}"
            )
    for axis, degree in (("ep", home.ep), ("pp", home.pp)):
        if options.mode == "free" and degree > 1:
            raise PlanError(
                f"mode is 'free' and the home has {axis} {degree}: slots that share experts or a pipeline wait for "
                f"each other; use mode='lockstep', or {axis} 1"
            )


def _check_parent_numbers(parents: Sequence[int], count: int) -> None:
    if len(parents) != count or {type(parent) for parent in parents} - {int}:
        raise PlanError(
            f"parents are {short_text(parents)} for {plural(count, 'document')}; give an integer (int) each: the "
            "document whose rows come before its own, or -1"
        )
    outside = [d for d, parent in enumerate(parents) if not -1 <= parent < count]
    if outside:
        raise PlanError(
            f"document {outside[0]} has the parent {parents[outside[0]]}, but there are documents 0 to {count - 1}"
        )


def longest_item(lengths: Sequence[int], home: Layout, options: PlanOptions) -> int:
    """Return the rows of the longest document, or of the largest prefix tree, which one group takes.
    Raises what `Request.from_arguments` raises.
    """
    return int(Request.from_arguments(lengths, home, options).tree_sizes[0].max())


def check_degree_suits_heads(request: Request, degree: int) -> None:
    """Raise PlanError if the query heads of a rank cannot be dealt out: under `a2a` to a group of this degree, under
    `a2a+p2p` to as many slots as the first size says. Key/value heads limit nothing: where there are fewer than slots,
    the same head goes to several.
    """
    sizes = request.hierarchical_context_parallel_sizes
    heads = (request.heads or 0) // request.tp
    a2a_size = first_size(sizes) if sizes else 1
    for kind, members, name in (("a2a", degree, "cp"), ("a2a+p2p", a2a_size, "a first size of")):
        if kind not in request.types or heads_allow_degree(members, request.heads, ("a2a",), request.tp):
            continue
        fit = ", ".join(str(n) for n in range(1, members) if heads % n == 0)
        shared = f" (of each rank, {request.heads} / tp {request.tp})" if request.tp > 1 else ""
        raise PlanError(
            f"cp_comm_type {kind!r} deals {heads} query heads{shared} to the {members} slots of a group, which do not "
            f"divide them; use {name} {fit}, or p2p or all_gather"
        )
