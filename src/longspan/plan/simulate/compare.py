"""Planners on the same documents: padded, fixed at several degrees, and dynamic, each simulated at its fastest type.

Degrees of an evaluation are compared in `evaluation.py`, which also prices documents that are repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from longspan.plan.simulate.row_bytes import RowBytes
from longspan.plan.simulate.sensitivity import Sensitivity, plan_sensitivity
from longspan.plan.simulate.simulate import Simulation, simulate
from longspan.plan.simulate.type_and_partition import list_type_options, plan_with_partition

MOST_DEGREES = 5  # of fixed plans in a comparison
NamedSimulation = tuple[str, Simulation | str]  # a plan's name; its simulation, or why there is no such plan


@dataclass(frozen=True, kw_only=True)
class PlannerComparison:
    """What every planner plans for: documents, a home, options, and how a plan is simulated.

    >>> comparison = PlannerComparison(lengths=lengths, home=Layout(32), options=PlanOptions(cp_comm_type="auto"))
    >>> [name for name, _ in comparison.simulations()]  # doctest: +SKIP
    ['padded, cp 16', 'fixed, cp 16', 'fixed, cp 32', 'dynamic']

    An `evaluation` runs forward passes only. `row_bytes` gives the bytes that a row of a plan takes. `cp` is the only
    degree of padded and fixed plans (0: several, `degrees`); `min_cp` and `max_cp` (0: no limit) are those of dynamic
    plans.
    """

    lengths: Sequence[int]
    home: Layout
    options: PlanOptions
    vpp: int = 1
    evaluation: bool = False
    row_bytes: Callable[[Plan], RowBytes] = lambda plan: RowBytes()
    cp: int = 0
    min_cp: int = 1
    max_cp: int = 0

    def simulations(self) -> Iterator[NamedSimulation]:
        """Yield every plan with its name: the padded one, at the lowest degree only, fixed ones, and the dynamic one.

        The padded batch is a baseline for the others.
        """
        lengths, home = self.lengths, self.home
        degrees = self.degrees()
        padded = partial(plan_padded, lengths, home, degrees[0])
        yield f"padded, cp {degrees[0]}", self._fastest_simulation(padded, degrees[0])
        for cp in degrees:
            yield f"fixed, cp {cp}", self._fastest_simulation(partial(plan_fixed, lengths, home, cp), cp)
        dynamic = partial(plan_dynamic, lengths, home, min_cp=self.min_cp, max_cp=self.max_cp or None)
        yield "dynamic", self._fastest_simulation(dynamic, None)

    def sensitivity(self) -> Iterator[Sensitivity]:
        """Yield how the dynamic plan changes if one constant of the cost is wrong, constant by constant."""

        def make_plan(cost: Cost) -> Plan:
            degrees: dict[str, Any] = {"min_cp": self.min_cp, "max_cp": self.max_cp or None}
            return plan_dynamic(self.lengths, self.home, options=replace(self.options, cost=cost), **degrees)

        def plan_seconds(plan: Plan) -> float:
            return simulate(plan, cost=self.options.cost, pp=self.home.pp, vpp=self.vpp).seconds

        return plan_sensitivity(make_plan, self.options.cost, plan_seconds)

    def degrees(self) -> list[int]:
        """List the degrees to compare: the one that is given, or the lowest powers of two that are possible.

        Possible degrees divide the slots, hold the longest document and suit the query heads. If there is none, the
        only degree is that of all slots.
        """
        if self.cp:
            return [self.cp]
        slots, cap, heads = self.home.slots, self.options.rows, self.options.heads
        types = check_comm_types(self.options.cp_comm_type)
        powers = [1 << i for i in range(slots.bit_length()) if slots % (1 << i) == 0]
        allowed = [cp for cp in powers if heads_allow(cp, heads, types, self.home.tp)]
        return [cp for cp in allowed if not cap or max(self.lengths) <= cap * cp][:MOST_DEGREES] or [slots]

    def _fastest_simulation(self, planner: Callable[..., Plan], cp: int | None) -> Simulation | str:
        """Return the fastest simulation over communication types, at a degree or (None) of dynamic degrees.

        If no type has a plan, the first type's error is returned, as text. A hybrid's types are compared together with
        partitions, by `plan_with_partition` in `_simulate_planner`.
        """
        hybrid = self.options.cost.states is not None
        choices = [self.options] if hybrid else list_type_options(self.options, self.home, cp)
        if cp is None and len(choices) > 1:
            choices.append(self.options)  # "auto": a type for each group
        simulations, refusals = list[Simulation](), list[str]()
        for options in choices:
            try:
                simulations.append(self._simulate_planner(planner, options, cp))
            except LongspanError as error:  # the other rows are worth printing all the same
                refusals.append(str(error))
        return min(simulations, key=lambda simulation: simulation.seconds) if simulations else refusals[0]

    def _simulate_planner(self, planner: Callable[..., Plan], options: PlanOptions, cp: int | None) -> Simulation:
        """Make a plan by a planner under these options, with `plan_evaluation` for an evaluation, and simulate it."""

        def make_plan(options: PlanOptions) -> Plan:
            return planner(options=options)

        def make_evaluation(options: PlanOptions) -> Plan:
            widest = cp or widest_degree(self.home, options, self.max_cp)
            return plan_evaluation(make_plan, self.lengths, self.home, options, widest)

        plan, _ = plan_with_partition(make_evaluation if self.evaluation else make_plan, options)
        return simulate(plan, pp=self.home.pp, vpp=self.vpp, row_bytes=self.row_bytes(plan))
