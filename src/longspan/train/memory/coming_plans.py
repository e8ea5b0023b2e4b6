"""The plans of coming steps by which a run's memory is planned, before its model is made.

Plans of one degree are made for thousands of steps, and those whose slots are fullest count. Dynamic plans take longer:
those of two steps are made, and where rows have a limit, one that fills every slot to it, as later plans may.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

from longspan.config.sections import RunConfig
from longspan.layout import Layout
from longspan.plan import Cost, Plan
from longspan.train.plans import PlanChoice

MOST_STEPS = 1024  # whose documents are looked at
FEW_STEPS = 4  # for which plans are made that are priced as those of the run


@dataclass(frozen=True)
class ComingSteps:
    """The documents of coming steps, from `first` to before `last`, for a home.

    `lengths_of_step(step)` are the lengths of a step's documents.

    >>> ahead = ComingSteps(order.lengths_of_step, world.home, heads=32, first=0, last=config.train.steps)

    `heads` are the model's query heads, where they are known; `planners` take the place of the configuration's. `few`:
    only a few plans are made, whatever the planner. `longest` is the longest document of the whole run, if it is known.
    """

    lengths_of_step: Callable[[int], Sequence[int]]
    home: Layout
    heads: int | None
    first: int
    last: int
    planners: tuple[str, ...] = ()
    few: bool = False
    longest: int = 1

    @property
    def steps(self) -> range:
        """The steps that are looked at."""
        return range(self.first, min(self.last, self.first + MOST_STEPS))

    def fullest_plans(self, config: RunConfig, cost: Cost) -> list[Plan]:
        """Return the plans, by each planner, of the coming steps that need most memory.

        Those are the steps with the fullest slots, under the first planner, if all steps are looked at; otherwise the
        step with the longest document and the one with most tokens. Raises PlanError for documents that fit no group.
        """
        choices = [
            PlanChoice.training(planner_config, cost=cost, heads=self.heads)
            for planner_config in self._with_planners(config)
        ]
        steps = self.fullest_steps(choices[0]) if self._sees_all_steps(config) else self.heaviest_steps()
        return [choice.plan(self.lengths_of_step(step), self.home) for choice in choices for step in steps]

    def fullest_steps(self, choice: PlanChoice) -> Sequence[int]:
        """Return the FEW_STEPS steps with most rows in a slot, by plans at a simple cost: a millisecond each."""
        if len(self.steps) <= FEW_STEPS:
            return self.steps
        simple = replace(choice, options=replace(choice.options, cost=Cost(), cp_comm_type="p2p"))
        plans = ((simple.plan(self.lengths_of_step(step), self.home).most_rows, step) for step in self.steps)
        return [step for _, step in nlargest(FEW_STEPS, plans)]

    def _with_planners(self, config: RunConfig) -> list[RunConfig]:
        """Return the configuration with each of `planners`, or as it is."""
        planners = self.planners or (config.context.planner,)
        return [replace(config, context=replace(config.context, planner=planner)) for planner in planners]

    def limit_plans(self, config: RunConfig, plans: Sequence[Plan]) -> list[Plan]:
        """Return, as a list of one, a plan that fills every slot to its limit of rows, as a later step may.

        A slot gets no more rows than the largest of `plans` has tokens. The list is empty where all steps were looked
        at, or rows have no limit.
        """
        cap = PlanChoice.training(config, heads=self.heads).options.max_tokens_per_slot
        if not cap or self._sees_all_steps(config):
            return []
        multiple = max(plan.row_multiple for plan in plans)
        rows = min(cap, max(plan.tokens for plan in plans)) // multiple * multiple
        return [full_plan(config, self.home, max(rows, multiple), self.heads)]

    def _sees_all_steps(self, config: RunConfig) -> bool:
        """Return whether every coming step is looked at.

        That is so where steps are few, or are MOST_STEPS at most and have plans of one degree, which are made quickly.
        """
        if self.last - self.first <= FEW_STEPS:
            return True
        one_degree = PlanChoice.training(config, heads=self.heads).has_one_degree
        return one_degree and not self.few and self.steps.stop == self.last

    def heaviest_steps(self) -> Sequence[int]:
        """Return the step with the longest document and the step with most tokens, which may be one step."""
        lengths = {step: self.lengths_of_step(step) for step in self.steps}
        if not lengths:
            return []
        longest_step = max(lengths, key=lambda step: max(lengths[step], default=0))
        return sorted({longest_step, max(lengths, key=lambda step: sum(lengths[step]))})

    def rows_to_try(self, config: RunConfig) -> list[int]:
        """List the rows of a slot that `max_tokens_per_slot = "auto"` may become, the fewest first.

        The first number holds the longest document in the widest group that the heads allow. The numbers double until
        the step with most tokens is one micro-batch. There are `multiple` rows to spare, and numbers are rounded up to
        multiples of it, since a slot has two parts of a document, each padded to a whole `row_multiple`.
        """
        choice = PlanChoice.training(config, heads=self.heads)
        lengths = [self.lengths_of_step(step) for step in self.heaviest_steps()]
        longest_document = max(self.longest, *(max(step, default=1) for step in lengths), 1)
        most_tokens = max((sum(step) for step in lengths), default=1)
        multiple = 2 * choice.options.row_multiple
        rows = [-(-longest_document // choice.widest_even_degree(self.home)) + multiple]
        while rows[-1] < most_tokens / self.home.slots + multiple:
            rows.append(2 * rows[-1])
        return [-(-count // multiple) * multiple for count in rows]


def full_plan(config: RunConfig, home: Layout, rows: int, heads: int | None = None) -> Plan:
    """Make a plan with `rows` rows on every slot in each micro-batch: a document in each of the widest groups.

    A pipeline gets as many micro-batches as it holds at once. Under sequence parallelism `rows` is a multiple of tp.
    """
    choice = PlanChoice.training(config, heads=heads)
    degree = choice.widest_even_degree(home)
    in_flight = max(1, home.pp * config.parallel.vpp)
    lengths = [rows * degree] * (home.slots // degree * in_flight)
    # without a pipeline's bubble in the price, for which more and smaller micro-batches would be made
    options = replace(choice.options, max_tokens_per_slot=rows, cost=replace(choice.options.cost, chunks=1 << 20))
    return replace(choice, options=options).at_degree(degree, longest=lengths[0]).plan(lengths, home)
