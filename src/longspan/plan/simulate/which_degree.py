"""Which context-parallel degree should evaluation run at?

Two ways are priced for each degree. *Filled*: one document a group and micro-batch, and as many micro-batches as keep
the pipeline full, repeating documents where there are too few; what evaluation loops do today. *Planned*: `plan_fixed`,
each document once, packed so that the pipeline is used best.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.errors import PlanError
from longspan.layout import Layout, check_lengths
from longspan.plan.cost.cost import Cost
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.planners.fixed import plan_fixed
from longspan.plan.simulate.pipeline_time import run_pipeline
from longspan.plan.simulate.simulate import Simulation, simulate
from longspan.plan.timeline import timeline


@dataclass(frozen=True)
class DegreeChoice:
    """One degree: `groups` of `cp` slots. A document-step is one document through the model once.

    `filled_steps` − documents are wasted. `planned` has each document once, at the cap that was found best.
    """

    cp: int
    groups: int
    passes: int
    filled_steps: int
    filled_seconds: float
    planned: Simulation

    @property
    def wasted_steps(self) -> int:
        """Document-steps whose result is thrown away."""
        return self.filled_steps - len(self.planned.plan.lengths)


def which_degree(
    lengths: Sequence[int],
    home: Layout,
    *,
    max_tokens_per_slot: int | None = None,
    accumulation: int | None = None,
    degrees: Sequence[int] | None = None,
    cost: Cost | None = None,
    node_size: int = 8,
) -> tuple[DegreeChoice, ...]:
    """Price an evaluation of these documents at each degree; degrees at which the longest does not fit are left out.

    >>> best = min(which_degree([8192] * 1024, Layout(8192, tp=2, pp=4)), key=lambda choice: choice.planned.seconds)

    `accumulation` micro-batches keep the pipeline full (default: the stages). `max_tokens_per_slot` None takes the
    longest document. Raises PlanError where no degree fits.
    """
    rows = check_lengths(lengths)
    cap = max_tokens_per_slot or max(rows)
    tried = [d for d in degrees or _powers(home.slots) if max(rows) <= cap * d]
    if not tried:
        raise PlanError(
            f"no degree of {tuple(degrees or _powers(home.slots))} holds the longest document of {max(rows)} rows at "
            f"max_tokens_per_slot {cap}; raise it to {-(-max(rows) // home.slots)} or more"
        )
    price = cost or Cost()
    return tuple(_choice(rows, home, cp, cap, accumulation or home.pp, price, node_size) for cp in tried)


def _choice(
    lengths: tuple[int, ...], home: Layout, cp: int, cap: int, accumulation: int, cost: Cost, node_size: int
) -> DegreeChoice:
    batches = _filled(lengths, home.slots, cp, accumulation)
    seconds = timeline(batches, home.slots, cost, node_size=node_size).busy.max(axis=1).tolist()
    return DegreeChoice(
        cp=cp,
        groups=home.slots // cp,
        passes=len(batches) // accumulation,
        filled_steps=sum(len(batch.groups) for batch in batches),
        filled_seconds=run_pipeline(seconds, home.pp, backward=False).seconds,
        planned=_planned(lengths, home, cp, cap, cost, node_size),
    )


def _filled(lengths: tuple[int, ...], slots: int, cp: int, accumulation: int) -> list[MicroBatch]:
    """Whole passes of `accumulation` micro-batches, a document for every group; after the last, from the first on."""
    groups = slots // cp
    passes = -(-len(lengths) // (groups * accumulation))
    batches: list[MicroBatch] = []
    for start in range(0, passes * accumulation * groups, groups):
        documents = [d % len(lengths) for d in range(start, start + groups)]
        made = (Group(tuple(range(g * cp, (g + 1) * cp)), (d,), (lengths[d],)) for g, d in enumerate(documents))
        batches.append(MicroBatch(tuple(made)))
    return batches


def _planned(lengths: tuple[int, ...], home: Layout, cp: int, cap: int, cost: Cost, node_size: int) -> Simulation:
    """The fastest of plans with smaller and smaller caps: more micro-batches fill the pipeline, fewer launch less."""
    least = -(-max(lengths) // cp)
    caps = sorted({min(cap, least << doubling) for doubling in range(16)})
    plans = (
        plan_fixed(lengths, home, cp, max_tokens_per_slot=smaller_cap, cost=cost, node_size=node_size)
        for smaller_cap in caps
    )
    return min(
        (simulate(plan, pp=home.pp, backward=False) for plan in plans), key=lambda simulation: simulation.seconds
    )


def _powers(slots: int) -> list[int]:
    return [1 << i for i in range(slots.bit_length()) if slots % (1 << i) == 0]
