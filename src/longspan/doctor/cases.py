"""Ways to run a model that a proof compares with the stock model, and the plan of each; integers and names, no torch.

>>> [case.name for case in list_cases("basic", ranks=3)][:2]
['float64, cp 2, p2p', 'float64, cp 3, p2p']
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from longspan.errors import ConfigError, LayoutError
from longspan.layout import Layout
from longspan.plan import Group, MicroBatch, PartitionKind, Plan, plan_dynamic, plan_fixed
from longspan.plan.planners.options import PlanOptions

LENGTHS = (13, 1, 30, 7, 2, 18, 96, 41)  # ragged, some shorter than twice the degree, one without a target
# The same documents have these numbers of images, whose placeholders come on top.
IMAGES = (0, 0, 2, 1, 0, 0, 3, 1)
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
        """The dtype, degrees, plan, type and features, as in "float64, cp 2, p2p"; no two cases share it."""
        degrees = [f"{key} {getattr(self, key)}" for key in ("tp", "pp", "ep") if getattr(self, key) > 1]
        cp = {
            "one": f"cp {self.cp}",
            "several": f"several micro-batches, cp 1 to {self.cp}",
            "dynamic": "dynamic plan",
        }
        kind = self.cp_comm_type + (f" {self.sizes}" if self.sizes else "")
        features = {
            f"{self.partition} rows": self.partition != "zigzag",
            "sequence parallel": self.sequence_parallel,
            f"{self.recompute} recomputation": self.recompute != "none",
            "router losses": self.router_losses,
            "evaluation": self.evaluation,
        }
        images = [f"images (encoder tp {self.encoder})" if self.encoder > 1 else "images"] if self.encoder else []
        shown = [text for text, is_set in features.items() if is_set]
        return ", ".join([self.dtype, *images, *degrees, cp[self.plan], kind, *shown])

    @property
    def is_basic(self) -> bool:
        """Whether a refusal of this case counts as one of the model: for context parallelism that any model should run.
        Other degrees, an encoder, losses of routers and a2a, which deals out heads, can each be a reason to refuse only
        this case.
        """
        plain = max(self.tp, self.pp, self.ep, self.encoder) <= 1 and not self.router_losses
        return plain and self.cp_comm_type in ("p2p", "all_gather")

    @property
    def answer_key(self) -> tuple[str, bool, bool]:
        """Which answer of the stock model the case is compared with: dtype, with losses of routers, with images."""
        return self.dtype, self.router_losses, self.encoder > 0

    @property
    def rank_multiple(self) -> int:
        """What the ranks of its home are a multiple of."""
        return self.tp * self.pp * self.ep

    def home(self, ranks: int) -> Layout:
        """The home of this case over the largest number of these ranks that tp x pp x ep divides. Raises LayoutError
        where there are too few ranks.
        """
        multiple = self.rank_multiple
        if ranks < multiple:
            raise LayoutError(
                f"tp {self.tp} x pp {self.pp} x ep {self.ep} need {multiple} ranks, and there are {ranks}; "
                f"use --world {multiple}"
            )
        return Layout(ranks // multiple * multiple, tp=self.tp, pp=self.pp, ep=self.ep)


def list_cases(name: CaseSet, ranks: int, dtype: DTypeName = "float64") -> tuple[Case, ...]:
    """List the cases of a set over this number of ranks. "basic": FSDP2 at degrees 2 and 3 under p2p, all_gather and
    full recomputation at 2, and a step of several micro-batches. "whole": every degree and type, tp, pp, ep where they
    divide the ranks, losses of routers, evaluation at another degree and a dynamic plan. Raises ConfigError for another
    set.
    """
    if name not in get_args(CaseSet):
        raise ConfigError(f"there is no set of cases {name!r}; use one of {', '.join(get_args(CaseSet))}")
    degrees = [cp for cp in ((2, 3) if name == "basic" else (1, 2, 3, 4)) if cp <= ranks] or [1]
    widest = degrees[-1]
    second = min(2, ranks)
    if name == "basic":
        cases = [
            *(Case(cp=degree) for degree in degrees),
            Case(cp=second, cp_comm_type="all_gather"),
            Case(cp=widest, plan="several"),
            Case(cp=second, recompute="full"),
        ]
    else:
        cp = 2 if ranks >= 4 else 1
        cases = [
            *(case for degree in degrees for case in list_type_cases(degree)),
            Case(cp=second, plan="several"),
            Case(plan="dynamic"),
            Case(cp=second, router_losses=True),
            Case(cp=widest, evaluation=True),
            Case(cp=second, recompute="full"),
            Case(cp=widest, cp_comm_type="all_gather", recompute="selective"),
            Case(tp=2, cp=cp),
            Case(tp=2, cp=cp, sequence_parallel=True, recompute="full"),
            Case(pp=2, cp=cp, plan="several"),
            Case(tp=2, pp=2),
            Case(ep=2, cp=2),
            Case(ep=2, cp=2, plan="several", router_losses=True),
        ]
        # Under a2a the smaller last group would have to deal out the heads to another number of slots.
        cases = [
            case for case in cases if ranks % (case.cp if "a2a" in case.cp_comm_type else case.rank_multiple) == 0
        ]
    return tuple(replace(case, dtype=dtype) for case in cases)


def list_contiguous_cases(name: CaseSet, ranks: int, dtype: DTypeName = "float64") -> tuple[Case, ...]:
    """List the cases of a set, `name`, in which a slot has consecutive rows, as state-space layers need; a2a only where
    its degree divides the ranks.
    """
    widest = min(4 if name == "whole" else 3, ranks)
    cases = [Case(cp=min(2, widest), cp_comm_type="all_gather"), Case(cp=widest, plan="several")]
    if name == "whole" and ranks % widest == 0:
        cases.append(Case(cp=widest, cp_comm_type="a2a"))
    return tuple(replace(case, dtype=dtype, partition="contiguous") for case in cases)


def list_image_cases(name: CaseSet, ranks: int, dtype: DTypeName = "float64") -> tuple[Case, ...]:
    """List the cases of `list_cases` with images among the text, without those of routers' losses; the whole set on an
    even number of ranks also has an encoder with tp 2.
    """
    cases = [replace(case, encoder=1) for case in list_cases(name, ranks, dtype) if not case.router_losses]
    if name == "whole" and ranks % 2 == 0:
        cases += [
            Case(dtype, encoder=2),
            Case(dtype, cp=2, encoder=2),
            Case(dtype, tp=2, cp=2 if ranks >= 4 else 1, encoder=2),
            Case(dtype, pp=2, encoder=2),
        ]
    return tuple(cases)


def list_type_cases(cp: int) -> list[Case]:
    """List a case for each type at a degree, a2a+p2p with each pair of sizes above 1; one case at degree 1."""
    if cp == 1:
        return [Case()]
    sizes = [(inner, cp // inner) for inner in range(2, cp) if cp % inner == 0]
    hierarchical = [Case(cp=cp, cp_comm_type="a2a+p2p", sizes=levels) for levels in sizes]
    flat = {kind: Case(cp=cp, cp_comm_type=kind) for kind in ("p2p", "all_gather", "a2a", "auto")}
    return [flat["p2p"], flat["all_gather"], flat["a2a"], *hierarchical, flat["auto"]]


def plan_case(
    case: Case,
    home: Layout,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    targets: int = sum(LENGTHS) - len(LENGTHS),
    heads: int | None = None,
    node_size: int = 8,
) -> Plan:
    """Plan a case for documents of these lengths, which predict so many tokens. Raises LayoutError where the home has
    fewer slots than the case's degree, and PlanError where the type cannot deal out this number of query `heads` (None:
    unchecked).
    """
    if case.cp > home.slots:
        raise LayoutError(f"cp {case.cp} needs as many slots, and the home has {home.slots}; use more ranks")
    # sequence parallelism splits a slot's rows over tp ranks
    row_multiple = case.tp if case.sequence_parallel else 1
    slots = tuple(range(home.slots))
    documents = range(len(lengths))
    if case.plan == "several":
        # In the first only slot 0 has documents. In the second the first `cp` slots share two documents, and slot 0
        # and the last slot have one more each. In the third all slots share the rest. The fourth is a dummy: all idle.
        batches = [
            [(slots[:1], documents[:2])],
            [(slots[: case.cp], documents[2:4]), (slots[:1], documents[4:5]), (slots[-1:], documents[5:6])],
            [(slots, documents[6:])],
            [],
        ]
    elif case.plan == "one" and home.slots % case.cp:  # the last group has the slots that remain
        blocks = [slots[first : first + case.cp] for first in range(0, home.slots, case.cp)]
        batches = [[(block, documents[i :: len(blocks)]) for i, block in enumerate(blocks)]]
    else:
        options = PlanOptions(
            cp_comm_type=case.cp_comm_type,
            hierarchical_context_parallel_sizes=case.sizes,
            partition=case.partition,
            node_size=node_size,
            row_multiple=row_multiple,
            heads=heads,
        )
        if case.plan == "one":
            return plan_fixed(lengths, home, case.cp, options=options, targets=targets)
        # So small that the longest document needs most slots: its even share, and 8 tokens more for short documents.
        cap = -(-max(lengths) // home.slots) + 8
        return plan_dynamic(lengths, home, options=options, targets=targets, max_tokens_per_slot=cap)

    def make_group(slots: Sequence[int], documents: Sequence[int]) -> Group:
        lengths_of_group = tuple(lengths[d] for d in documents)
        return Group(tuple(slots), tuple(documents), lengths_of_group, case.cp_comm_type, partition=case.partition)

    micro_batches = tuple(MicroBatch(tuple(make_group(*group) for group in groups)) for groups in batches)
    return Plan(home.slots, lengths, micro_batches, targets=targets, row_multiple=row_multiple).check()
