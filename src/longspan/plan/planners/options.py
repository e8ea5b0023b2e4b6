"""The options that all planners share, the arguments of one call, checked (`Request`), and the plan that it returns."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from types import NoneType
from typing import Any, TypedDict, TypeVar

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
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.micro_batch import PARTITIONS, Group, MicroBatch, Mode, PartitionKind, fit_level_sizes
from longspan.plan.plan import Plan
from longspan.plan.step_times import GroupTable, timeline

Planner = TypeVar("Planner", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `plan_fixed`, `plan_padded` and `plan_dynamic`, which take them as keyword arguments or as one value.

    >>> options = PlanOptions(max_tokens_per_slot=512, node_size=4)
    >>> plan = plan_fixed([900, 300, 20], Layout(ranks=8), cp=4, options=options)  # doctest: +SKIP

    A keyword argument given together with `options` wins. The planner checks the values.
    """

    max_tokens_per_slot: int | None = None
    """Rows that a slot holds in one micro-batch, at most, in whole multiples of `row_multiple`; None: no limit."""
    targets: int | None = None
    """Predicted tokens, by whose number the loss is divided; None: length − 1 of every document."""
    cp_comm_type: str | Sequence[str] = "p2p"
    """How the slots of a group share attention: p2p, all_gather, a2a, a2a+p2p or auto; one, or one for each layer."""
    hierarchical_context_parallel_sizes: int | Sequence[int] | None = None
    """Sizes (a2a, p2p) of a group under a2a+p2p, or only the a2a size; other types do not read it."""
    cost: Cost = DEFAULT_COST
    """Constants of the machine and the model, by which plans are compared."""
    node_size: int = 8
    """Slots of one host; groups inside a host use its fast links."""
    micro_batch_multiple: int = 1
    """The number of micro-batches is a multiple of this; dummy micro-batches are added."""
    mode: Mode = "lockstep"
    """Who waits: "lockstep": all slots for the slowest of each micro-batch; "free": only those that share a group."""
    row_multiple: int = 1
    """The rows of a slot are laid out in multiples of this (tp, under sequence parallelism)."""
    partition: PartitionKind = "zigzag"
    """How a group's rows are divided. "zigzag": each document's beginning and end in equal shares, so that every slot
    computes as much causal attention. "contiguous": documents end to end, one run of rows a slot; it saves copies under
    a2a, and under the other types a step takes longer than predicted."""
    heads: int | None = None
    """Query heads of the model, which the home's tp divides; with it, degrees that a2a or a2a+p2p cannot use are
    refused, or left out of dynamic plans. None: unknown, and `attend` raises the error in the step."""
    allow_empty: bool = True
    """No documents give a step of dummy micro-batches; False: they are an error."""
    parents: Sequence[int] | None = None
    """Of each document the one whose rows come before its own, -1 for none (`share_prefixes`); such a family stays in
    one group. None: no documents share a prefix."""

    def __post_init__(self) -> None:
        for name in ("cp_comm_type", "hierarchical_context_parallel_sizes", "parents"):
            if not isinstance(value := getattr(self, name), (str, int, NoneType)):
                object.__setattr__(self, name, tuple(value))

    @property
    def rows(self) -> int | None:
        """Rows that a slot can hold in whole row multiples; None: no limit."""
        cap = self.max_tokens_per_slot
        return None if cap is None else cap // self.row_multiple * self.row_multiple

    @property
    def types(self) -> tuple[str, ...]:
        """The communication types, one for each layer, or one for all."""
        if isinstance(self.cp_comm_type, str):
            return (self.cp_comm_type,)
        return tuple(self.cp_comm_type)

    def allows(self, degree: int, tp: int) -> bool:
        """Return whether a2a, where a layer has it, can deal out the query heads of `tp` ranks to such groups."""
        return heads_allow_degree(degree, self.heads, self.types, tp)


class PlanKeywords(TypedDict, total=False):
    """The fields of `PlanOptions` as keyword arguments, for type checkers and editors, which cannot derive them."""

    max_tokens_per_slot: int | None
    targets: int | None
    cp_comm_type: str | Sequence[str]
    hierarchical_context_parallel_sizes: int | Sequence[int] | None
    cost: Cost
    node_size: int
    micro_batch_multiple: int
    mode: Mode
    row_multiple: int
    partition: PartitionKind
    heads: int | None
    allow_empty: bool
    parents: Sequence[int] | None


def expand_option_signature(planner: Planner) -> Planner:
    """Give a planner with `**keywords: Unpack[PlanKeywords]` a signature that lists every option and its default."""
    signature = inspect.signature(planner)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(PlanOptions)
    ]
    planner.__signature__ = signature.replace(parameters=[*parameters, *options])  # pyright: ignore[reportFunctionMemberAccess]
    return planner


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
        """Make a request of a planner's arguments, checked: of `options`, or the defaults, with keywords in place of
        fields. Raises PlanError, or LayoutError for a bad length.
        """
        documents = check_lengths(lengths)
        options = replace(options or PlanOptions(), **(keywords or {}))
        if not documents and not options.allow_empty:
            raise PlanError(
                "there are no documents to plan and allow_empty is False; give lengths, or leave allow_empty out for a "
                "step of dummy micro-batches"
            )
        check_work_fits_int64(len(documents), max(documents, default=0))
        check_comm_types(options.cp_comm_type)
        request = cls(lengths=documents, slots=home.slots, tp=home.tp, **vars(options))
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
        if max(request.parents or (), default=-1) < 0:  # no family
            request = replace(request, parents=None)
        else:
            check_work_fits_int64(len(documents), int(request.family_sizes[0].max()))
        heads = (options.heads or 0) // home.tp  # of one tensor-parallel rank; 0: unknown
        a2a_size = 1
        if "a2a+p2p" in options.types:  # a size below 1 counts as 1 here, and is refused when the degree is known
            a2a_size = 0 if sizes is None else max(1, _first_size(sizes))
        cost = replace(options.cost, node_size=options.node_size, stages=home.pp)
        cost = cost.under(options.types, a2a_size, heads=heads).for_partition(options.partition)
        return replace(request, cost=cost)

    @cached_property
    def families(self) -> tuple[tuple[int, ...], ...]:
        """The documents of each family, parents first; one that shares no prefix is alone.

        Raises PlanError for parents that go in a circle.
        """
        if self.parents is None:
            return tuple((document,) for document in range(len(self.lengths)))
        parents = self.parents
        branches: list[list[int]] = [[] for _ in parents]
        for document, parent in enumerate(parents):
            if parent >= 0:
                branches[parent].append(document)
        families = list[tuple[int, ...]]()
        for root in (document for document, parent in enumerate(parents) if parent < 0):
            family = list[int]()
            waiting = [root]
            while waiting:
                family.append(waiting.pop())
                waiting += reversed(branches[family[-1]])
            families.append(tuple(family))
        if in_circle := set(range(len(parents))).difference(*families):
            raise PlanError(
                f"the parents of document {min(in_circle)} go in a circle; a first one has the parent -1"
            )
        return tuple(families)

    @cached_property
    def bases(self) -> Integers:
        """The rows before each document's own, those of all that it continues (documents,)."""
        parents = self.parents or ()
        bases = np.zeros(len(self.lengths), dtype=np.int64)
        for document in chain.from_iterable(family[1:] for family in self.families):
            bases[document] = bases[parents[document]] + self.lengths[parents[document]]
        return bases

    @cached_property
    def family_sizes(self) -> tuple[Integers, Integers]:
        """Rows of each family, and the squares that price its attention: twice the (row, key) pairs that are seen."""
        lengths = np.array(self.lengths, dtype=np.int64)
        if self.parents is None:
            return lengths, lengths * lengths
        order = np.fromiter(chain.from_iterable(self.families), np.int64, len(lengths))
        first = np.cumsum([0, *map(len, self.families[:-1])])
        squares = lengths * (lengths + 2 * self.bases)
        return np.add.reduceat(lengths[order], first), np.add.reduceat(squares[order], first)

    def check_degree(self, home: Layout, cp: int) -> int:
        """Return the degree. Raises PlanError if slots, heads or sizes do not allow it, or a document does not fit."""
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
        """Raise PlanError if the longest document does not fit cp slots; `limit` explains why cp cannot be higher."""
        if self.rows is None or not self.lengths:
            return
        longest = int(self.family_sizes[0].max())
        if longest <= self.rows * cp:
            return
        too_long = sum(length > self.rows * cp for length in self.lengths)
        rows = -(-longest // (cp * self.row_multiple)) * self.row_multiple
        multiple = f" in multiples of {self.row_multiple}" if self.row_multiple > 1 else ""
        if self.parents is not None:
            family = self.families[int(self.family_sizes[0].argmax())]
            raise LongDocumentError(
                f"document {family[0]} and {plural(len(family) - 1, 'document')} that continue it have {longest} rows, "
                f"more than the {self.rows * cp} that cp {cp} x max_tokens_per_slot {self.max_tokens_per_slot} "
                f"hold{multiple}; raise max_tokens_per_slot to {rows}, {limit or 'raise cp'}, or give "
                f"share_prefixes(documents, max_rows={self.rows * cp})"
            )
        raise LongDocumentError(
            f"document {self.lengths.index(longest)} has {longest} rows, more than the {self.rows * cp} that cp {cp} x "
            f"max_tokens_per_slot {self.max_tokens_per_slot} hold{multiple} ({plural(too_long, 'such document')}); "
            f"raise max_tokens_per_slot to {rows}, {limit or 'raise cp'}, or cut the document"
        )

    def make_group(self, slots: Sequence[int], documents: Sequence[int], pad_to: int | None = None) -> Group:
        """Return a group of these slots and documents; `pad_to` is the rows to which every document is padded (None:
        none is).
        """
        lengths = tuple(self.lengths[d] for d in documents)
        sizes = None  # of the levels of a2a+p2p: no layer has that, or the options name none
        if "a2a+p2p" in self.types and self.hierarchical_context_parallel_sizes is not None:
            sizes = fit_level_sizes(self.hierarchical_context_parallel_sizes, len(slots))
        partition = self.partition if len(slots) > 1 else "zigzag"  # a single slot has the same rows either way
        parents = None
        if self.parents is not None:
            index = {document: i for i, document in enumerate(documents)} | {-1: -1}
            parents = tuple(index[self.parents[document]] for document in documents)
            parents = parents if max(parents) >= 0 else None
        return Group(tuple(slots), tuple(documents), lengths, self.cp_comm_type, sizes, partition, pad_to, parents)

    def make_plan(self, micro_batches: Sequence[MicroBatch], planner: str, *, max_cp: int | None = None) -> Plan:
        """Make the checked plan of these micro-batches, with its predicted time and lower bound. Dummy micro-batches
        are added up to the next multiple, at least one where there are no documents. `max_cp` is the highest degree of
        the plans that the bound is of (None: all slots).
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
        """Return the micro-batches with the fastest type or sizes for each group that leaves these open, and dummy ones
        up to the next multiple, at least one. Groups of a2a+p2p without sizes get the fastest ones. Where neither the
        options nor the cost's network, made for one model, know the query heads, the groups keep "auto": `attend`,
        which sees the heads, chooses.
        """
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
        choice: Iterator[int] = iter(np.argmax(seconds <= least_seconds * (1 + SAME), axis=0).tolist())
        typed = list[MicroBatch]()
        for batch in micro_batches:
            groups = list[Group]()
            for group in batch.groups:
                way = ways[next(choice)]
                kind = way.cp_comm_type if group.degree > 1 else "p2p"  # one slot sends nothing
                types = kind
                if not isinstance(self.cp_comm_type, str):  # layers of a list that name a type keep it
                    types = tuple(kind if named == "auto" else named for named in self.types)
                sizes = group.hierarchical_context_parallel_sizes
                if kind == "a2a+p2p" or ("a2a+p2p" in types and sizes is None):
                    sizes = fit_level_sizes(way.a2a_size, group.degree)
                groups.append(replace(group, cp_comm_type=types, hierarchical_context_parallel_sizes=sizes))
            typed.append(MicroBatch(tuple(groups)))
        return (*typed, *dummies)


def _check_parent_numbers(parents: Sequence[int], count: int) -> None:
    """Raise PlanError unless there is an integer for each of `count` documents, −1 or the number of a document."""
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


def _first_size(sizes: int | Sequence[int]) -> int:
    """Return the a2a size of sizes (a2a, p2p), which may be given alone."""
    return sizes if isinstance(sizes, int) else sizes[0]


def longest_item(lengths: Sequence[int], home: Layout, options: PlanOptions) -> int:
    """Return the most rows that stay in one group: of a document, or of all that share prefixes with it."""
    return int(Request.from_arguments(lengths, home, options).family_sizes[0].max())


def check_degree_suits_heads(request: Request, degree: int) -> None:
    """Raise PlanError if `a2a` would deal the query heads of a rank to a group whose degree does not divide them, or
    `a2a+p2p` to a first size. Key/value heads limit nothing: where there are fewer than slots, the same head goes to
    several.
    """
    sizes = request.hierarchical_context_parallel_sizes
    heads = (request.heads or 0) // request.tp
    first = _first_size(sizes) if sizes else 1
    for kind, members, name in (("a2a", degree, "cp"), ("a2a+p2p", first, "a first size of")):
        if kind not in request.types or heads_allow_degree(members, request.heads, ("a2a",), request.tp):
            continue
        fit = ", ".join(str(n) for n in range(1, members) if heads % n == 0)
        shared = f" (of each rank, {request.heads} / tp {request.tp})" if request.tp > 1 else ""
        raise PlanError(
            f"cp_comm_type {kind!r} deals {heads} query heads{shared} to the {members} slots of a group, which do not "
            f"divide them; use {name} {fit}, or p2p or all_gather"
        )
