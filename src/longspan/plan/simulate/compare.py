"""Planners on the same documents: padded, fixed at several degrees, one's own, and dynamic, under the fastest types.

Degrees of an evaluation are compared in `evaluation.py`, which also prices documents that are repeated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from longspan.errors import LongspanError
from longspan.layout import Layout
from longspan.plan.check import check_comm_types, heads_allow
from longspan.plan.cost.cost import Cost
from longspan.plan.dynamic import plan_dynamic
from longspan.plan.plan import Plan
from longspan.plan.planners.fixed import plan_fixed, plan_padded
from longspan.plan.planners.options import PlanOptions
from longspan.plan.simulate.evaluation import plan_evaluation, widest_degree
from longspan.plan.simulate.sensitivity import Sensitivity, plan_sensitivity
from longspan.plan.simulate.type_and_partition import plan_with_partition

MOST_DEGREES = 5  # of fixed plans in a comparison
NamedPlan = tuple[str, Plan | str]  # its name; the plan, or why there is none


@dataclass(frozen=True, kw_only=True)
class PlannerComparison:
    """What every planner plans for: documents, a home and options.

    >>> comparison = PlannerComparison(lengths=lengths, home=Layout(32), options=PlanOptions(cp_comm_type="auto"))
    >>> [name for name, _ in comparison.plans()]  # doctest: +SKIP
    ['padded, cp 16', 'fixed, cp 16', 'fixed, cp 32', 'dynamic']

    An `evaluation` runs forward passes only. `cp` is the only degree of padded and fixed plans (0: several, `degrees`);
    `min_cp` and `max_cp` (0: no limit) are those of dynamic plans. `own` are planners of one's own, by name.
    """

    lengths: Sequence[int]
    home: Layout
    options: PlanOptions
    evaluation: bool = False
    cp: int = 0
    min_cp: int = 1
    max_cp: int = 0
    own: Mapping[str, Callable[..., Plan]] = field(default_factory=dict[str, Callable[..., Plan]])

    def plans(self) -> Iterator[NamedPlan]:
        """Yield every plan with its name: the padded one, at the lowest degree only, fixed ones, and the dynamic one.

        The padded batch is a baseline for the others.
        """
        degrees = self.degrees()
        planners: list[tuple[str, Callable[..., Plan], int]] = [
            (f"padded, cp {degrees[0]}", partial(plan_padded, cp=degrees[0]), degrees[0]),
            *((f"fixed, cp {cp}", partial(plan_fixed, cp=cp), cp) for cp in degrees),
            *((name, planner, self.home.slots) for name, planner in self.own.items()),
            (
                "dynamic",
                partial(plan_dynamic, min_cp=self.min_cp, max_cp=self.max_cp or None),
                widest_degree(self.home, self.options, self.max_cp),
            ),
        ]
        for name, planner, widest in planners:
            try:
                yield name, self._make_plan(planner, widest)
            except LongspanError as error:  # the other rows are worth printing all the same
                yield name, str(error)

    def sensitivity(self) -> Iterator[Sensitivity]:
        """Yield how the dynamic plan changes if one constant of the cost is wrong, constant by constant."""

        def make_plan(cost: Cost) -> Plan:
            degrees: dict[str, Any] = {"min_cp": self.min_cp, "max_cp": self.max_cp or None}
            return plan_dynamic(self.lengths, self.home, options=replace(self.options, cost=cost), **degrees)

        return plan_sensitivity(make_plan, self.options.cost)

    def degrees(self) -> list[int]:
        """List the degrees to compare: the one that is given, or the lowest powers of two that are possible.

        Possible degrees divide the slots, hold the longest document, suit the query heads and are in the range of the
        dynamic plan. If there is none, the only degree is that of all slots.
        """
        if self.cp:
            return [self.cp]
        slots, cap, heads = self.home.slots, self.options.rows, self.options.heads
        types = check_comm_types(self.options.cp_comm_type)
        powers = [1 << i for i in range(slots.bit_length()) if slots % (1 << i) == 0]
        allowed = [
            cp
            for cp in powers
            if self.min_cp <= cp <= (self.max_cp or slots) and heads_allow(cp, heads, types, self.home.tp)
        ]
        return [cp for cp in allowed if not cap or max(self.lengths) <= cap * cp][:MOST_DEGREES] or [slots]

    def _make_plan(self, planner: Callable[..., Plan], widest: int) -> Plan:
        """Make a plan by a planner, whose groups have up to `widest` slots, at the best partition of a hybrid."""

        def make_plan(options: PlanOptions) -> Plan:
            return planner(self.lengths, self.home, options=options)

        def make_evaluation(options: PlanOptions) -> Plan:
            return plan_evaluation(make_plan, self.lengths, self.home, options, widest)

        return plan_with_partition(make_evaluation if self.evaluation else make_plan, self.options)[0]
