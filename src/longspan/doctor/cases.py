"""Ways to run a model that a proof compares with the stock model, and the plan of each; integers and names, no torch.

>>> [case.name for case in list_cases("basic", ranks=3)][:2]
['float64, cp 2, p2p', 'float64, cp 3, p2p']
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from longspan.errors import ConfigError, LayoutError
from longspan.layout import Layout
from longspan.plan import Group, MicroBatch, PartitionKind, Plan, plan_dynamic, plan_fixed
from longspan.plan.planners.options import PlanOptions

LENGTHS = (13, 1, 30, 7, 2, 18, 96, 41)  # ragged, some shorter than twice the degree, one without a target
IMAGES = (0, 0, 2, 1, 0, 0, 3, 1)  # of the same documents, whose placeholders come on top
DTypeName = Literal["float64", "float32", "bfloat16"]
CaseSet = Literal["basic", "whole"]


@dataclass(frozen=True)
class Case:
    """One way to run a model: a step under this plan, or with `evaluation` a loss of this plan after training's.

    `plan`: "one" micro-batch whose groups have `cp` slots (the last has what remains); "several", with groups of
    different degrees, a slot in two groups, idle slots and a dummy; "dynamic", as `plan_dynamic` makes it.
    `partition`: how rows of a group are dealt out. `sizes` are those of the two levels of a2a+p2p. `router_losses` adds
    the balance and z losses of routers. `encoder` is the tp of a home of all ranks for tower and projector, and
    documents then have images; 0: only text.
    """

    dtype: DTypeName = "float64"
    cp: int = 1
    cp_comm_type: str = "p2p"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    recompute: Literal["none", "full", "selective"] = "none"
    partition: PartitionKind = "zigzag"
    plan: Literal["one", "several", "dynamic"] = "one"
    sizes: tuple[int, int] | None = None
    sequence_parallel: bool = False
    router_losses: bool = False
    evaluation: bool = False
    encoder: int = 0

    @property
    def name(self) -> str:
        """Return the case as tables and messages write it, without the features that it does not have."""
        degrees = [f"{key} {getattr(self, key)}" for key in ("tp", "pp", "ep") if getattr(self, key) > 1]
        cp = {"one": f"cp {self.cp}", "several": f"several micro-batches, cp 1 to {self.cp}", "dynamic": "dynamic plan"}
        kind = self.cp_comm_type + (f" {self.sizes}" if self.sizes else "")
        features = {
            f"{self.partition} rows": self.partition != "zigzag",
            "sequence parallel": self.sequence_parallel,
            f"{self.recompute} recomputation": self.recompute != "none",
            "router losses": self.router_losses,
            "evaluation": self.evaluation,
        }
        images = [f"images (encoder tp {self.encoder})" if self.encoder > 1 else "images"] if self.encoder else []
        return ", ".join(
            [self.dtype, *images, *degrees, cp[self.plan], kind, *(text for text, is_set in features.items() if is_set)]
        )

    @property
    def is_basic(self) -> bool:
        """Return whether a refusal of this case counts as a refusal of the model itself.

        It does for context parallelism that any model should run. Other degrees than cp, an encoder, losses of routers
        and a2a, which deals out heads, can each be a reason to refuse only this case.
        """
        plain = max(self.tp, self.pp, self.ep, self.encoder) <= 1 and not self.router_losses
        return plain and self.cp_comm_type in ("p2p", "all_gather")

    @property
    def answer(self) -> tuple[str, bool, bool]:
        """Which answer of the stock model the case is compared with: dtype, with losses of routers, with images."""
        return self.dtype, self.router_losses, self.encoder > 0

    def home(self, ranks: int) -> Layout:
        """Return the home of this case over the largest number of these ranks that tp x pp x ep divides.

        Raises LayoutError where they are too few.
        """
        unit = self.tp * self.pp * self.ep
        if ranks < unit:
            raise LayoutError(
                f"tp {self.tp} x pp {self.pp} x ep {self.ep} need {unit} ranks, and there are {ranks}; "
                f"use --world {unit}"
            )
        return Layout(ranks // unit * unit, tp=self.tp, pp=self.pp, ep=self.ep)


def list_cases(name: CaseSet, ranks: int, dtypes: tuple[DTypeName, ...] = ("float64",)) -> tuple[Case, ...]:
    """List the cases of a set over this number of ranks, once for each dtype, in the order of `dtypes`.

    "basic": FSDP2 at degrees 2 and 3 under p2p, all_gather and full recomputation at 2, and a step of several
    micro-batches. "whole": every degree and type, tp, pp, ep, losses of routers, evaluation at another degree and a
    dynamic plan. Raises ConfigError for another name.
    """
    if name not in get_args(CaseSet):
        raise ConfigError(f"there is no set of cases {name!r}; use one of {', '.join(get_args(CaseSet))}")
    cases = _list_basic_cases(ranks) if name == "basic" else _list_all_cases(ranks)
    return tuple(replace(case, dtype=dtype) for dtype in dtypes for case in cases)


def list_contiguous_cases(name: CaseSet, ranks: int, dtypes: tuple[DTypeName, ...] = ("float64",)) -> tuple[Case, ...]:
    """List cases in which a slot has consecutive rows, as state-space layers need: all_gather, several degrees, a2a.

    a2a is tried only where its degree divides the ranks, as in `_list_all_cases`.
    """
    widest = min(4 if name == "whole" else 3, ranks)
    cases = [Case(cp=min(2, widest), cp_comm_type="all_gather"), Case(cp=widest, plan="several")]
    if name == "whole" and ranks % widest == 0:
        cases.append(Case(cp=widest, cp_comm_type="a2a"))
    return tuple(replace(case, dtype=dtype, partition="contiguous") for dtype in dtypes for case in cases)


def list_image_cases(name: CaseSet, ranks: int, dtypes: tuple[DTypeName, ...] = ("float64",)) -> tuple[Case, ...]:
    """List the cases of `list_cases` with images among the text, without those of routers' losses.

    The whole set on an even number of ranks also has an encoder with tp 2: by itself, and with cp, tp and pp of the
    model.
    """
    cases = [replace(case, encoder=1) for case in list_cases(name, ranks, dtypes) if not case.router_losses]
    if name == "whole" and ranks % 2 == 0:
        cp = 2 if ranks >= 4 else 1
        encoder_cases = [Case(encoder=2), Case(cp=2, encoder=2), Case(tp=2, cp=cp, encoder=2), Case(pp=2, encoder=2)]
        cases += [replace(case, dtype=dtype) for dtype in dtypes for case in encoder_cases]
    return tuple(cases)


def _list_basic_cases(ranks: int) -> list[Case]:
    """List few cases: p2p at two degrees, all_gather, a plan of several micro-batches, and full recomputation."""
    degrees = [cp for cp in (2, 3) if cp <= ranks] or [1]
    first = degrees[0]
    return [
        *(Case(cp=cp) for cp in degrees),
        Case(cp=first, cp_comm_type="all_gather"),
        Case(cp=degrees[-1], plan="several"),
        Case(cp=first, recompute="full"),
    ]


def _list_all_cases(ranks: int) -> list[Case]:
    """List cases for every type at each degree, and for plans, losses, recomputation and homes.

    Left out are homes that do not divide the ranks, and a2a at degrees that do not divide them: the smaller last group
    would have to deal out the heads to another number of slots. What does not depend on the degree is tried at 2,
    other cases at the widest degree.
    """
    degrees = [cp for cp in (1, 2, 3, 4) if cp <= ranks]
    widest = degrees[-1]
    cases = [
        case for cp in degrees for case in list_type_cases(cp) if ranks % cp == 0 or "a2a" not in case.cp_comm_type
    ]
    cases += [
        Case(cp=min(2, widest), plan="several"),
        Case(plan="dynamic"),
        Case(cp=min(2, widest), router_losses=True),
        Case(cp=widest, evaluation=True),
        Case(cp=min(2, widest), recompute="full"),
        Case(cp=widest, cp_comm_type="all_gather", recompute="selective"),
    ]
    return [*cases, *(case for case in _list_home_cases(ranks) if ranks % (case.tp * case.pp * case.ep) == 0)]


def _list_home_cases(ranks: int) -> list[Case]:
    """List cases of homes with tensor, pipeline and expert parallelism."""
    cp = 2 if ranks >= 4 else 1
    return [
        Case(tp=2, cp=cp),
        Case(tp=2, cp=cp, sequence_parallel=True, recompute="full"),
        Case(pp=2, cp=cp, plan="several"),
        Case(tp=2, pp=2),
        Case(ep=2, cp=2),
        Case(ep=2, cp=2, plan="several", router_losses=True),
    ]


def list_type_cases(cp: int) -> list[Case]:
    """List a case for each type at a degree, a2a+p2p with each pair of sizes above 1; one case at degree 1."""
    if cp == 1:
        return [Case()]
    sizes = [(a, cp // a) for a in range(2, cp) if cp % a == 0]
    hierarchical = [Case(cp=cp, cp_comm_type="a2a+p2p", sizes=levels) for levels in sizes]
    flat = {kind: Case(cp=cp, cp_comm_type=kind) for kind in ("p2p", "all_gather", "a2a", "auto")}
    return [flat["p2p"], flat["all_gather"], flat["a2a"], *hierarchical, flat["auto"]]


@dataclass(frozen=True)
class PackedDocuments:
    """What plans need of documents: their lengths, and how many tokens they predict."""

    lengths: tuple[int, ...]
    targets: int


TEXTS = PackedDocuments(LENGTHS, sum(LENGTHS) - len(LENGTHS))


def plan_case(
    case: Case, home: Layout, *, documents: PackedDocuments = TEXTS, heads: int | None = None, node_size: int = 8
) -> Plan:
    """Plan a case. Raises LayoutError where the home has fewer slots than the case's degree.

    Raises PlanError where the type cannot deal out this number of query `heads`; None: that is not checked.
    """
    if case.cp > home.slots:
        raise LayoutError(f"cp {case.cp} needs as many slots, and the home has {home.slots}; use more ranks")
    if case.plan == "several":
        return _plan_several(case, home, documents)
    lengths, targets = documents.lengths, documents.targets
    options = PlanOptions(
        cp_comm_type=case.cp_comm_type,
        hierarchical_context_parallel_sizes=case.sizes,
        partition=case.partition,
        node_size=node_size,
        row_multiple=_row_multiple(case),
        heads=heads,
    )
    if case.plan == "dynamic":
        # So small that the longest document needs most slots: its even share, and 8 tokens more for short documents.
        cap = -(-max(lengths) // home.slots) + 8
        return plan_dynamic(lengths, home, options=options, targets=targets, max_tokens_per_slot=cap)
    if home.slots % case.cp:
        return _plan_uneven_groups(case, home, documents)
    return plan_fixed(lengths, home, case.cp, options=options, targets=targets)


def _plan_uneven_groups(case: Case, home: Layout, packed: PackedDocuments) -> Plan:
    """Plan one micro-batch of a degree that does not divide the slots: the last group has those that remain.

    Documents go to the groups in turn.
    """
    slots_of_groups = [tuple(range(first, min(first + case.cp, home.slots))) for first in range(0, home.slots, case.cp)]
    documents_of_groups: list[list[int]] = [[] for _ in slots_of_groups]
    for document in range(len(packed.lengths)):
        documents_of_groups[document % len(slots_of_groups)].append(document)
    groups = [
        _make_group(case, slots, documents, packed)
        for slots, documents in zip(slots_of_groups, documents_of_groups, strict=True)
    ]
    return _make_plan(case, home, packed, MicroBatch(tuple(groups)))


def _plan_several(case: Case, home: Layout, packed: PackedDocuments) -> Plan:
    """Plan micro-batches in which slots idle, have documents of their own, and share documents.

    In the first only slot 0 has documents. In the second the first `cp` slots share two documents, and slot 0 and the
    last slot have one more each, which they do not share. In the third all slots share the remaining documents. The
    fourth is empty: a dummy, in which every slot idles.
    """
    all_slots, remaining = tuple(range(home.slots)), list(range(6, len(packed.lengths)))
    first = MicroBatch((_make_group(case, (0,), [0, 1], packed),))
    shared_group = _make_group(case, all_slots[: case.cp], [2, 3], packed)
    group_of_first_slot = _make_group(case, (0,), [4], packed)
    group_of_last_slot = _make_group(case, (home.slots - 1,), [5], packed)
    second = MicroBatch((shared_group, group_of_first_slot, group_of_last_slot))
    third = MicroBatch((_make_group(case, all_slots, remaining, packed),))
    return _make_plan(case, home, packed, first, second, third, MicroBatch())


def _make_group(case: Case, slots: tuple[int, ...], documents: list[int], packed: PackedDocuments) -> Group:
    """Make a group of these slots and documents with the case's communication type and partition."""
    lengths = tuple(packed.lengths[d] for d in documents)
    return Group(slots, tuple(documents), lengths, case.cp_comm_type, partition=case.partition)


def _make_plan(case: Case, home: Layout, packed: PackedDocuments, *batches: MicroBatch) -> Plan:
    """Make a plan of these micro-batches, and check it."""
    return Plan(home.slots, packed.lengths, batches, targets=packed.targets, row_multiple=_row_multiple(case)).check()


def _row_multiple(case: Case) -> int:
    """Return what a slot's rows must be a multiple of: sequence parallelism splits them over tp ranks."""
    return case.tp if case.sequence_parallel else 1
