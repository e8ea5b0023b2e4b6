"""A planner and a cost of one's own, by the dotted names in `context.planner` and `context.cost_model`. No torch.

A planner is called as `plan_dynamic` is, and decides the groups and micro-batches of its plan; all else follows from
the options. A cost is a `longspan.Cost`, or an object of a class that inherits from it. docs/planning.md shows both.
"""

from collections.abc import Callable, Sequence
from typing import Any

from longspan.config.file import nearest_hint
from longspan.config.plan_section import PLANNERS
from longspan.errors import ConfigError, LongspanError, PlanError, import_object, plural
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions
from longspan.plan.planners.request import Request

COST_KEY = "context.cost_model"


def check_planner(name: str, key: str) -> None:
    """Raise ConfigError, with the key that names it, for a planner that does not exist."""
    if name in PLANNERS:
        return
    if "." not in name:
        raise ConfigError(
            f"{key} is {name!r}; {nearest_hint(name, PLANNERS)}, or a function of your own with its module, as in "
            "'my_module.my_planner' (docs/planning.md)"
        )
    _import_planner(name, key)


def _import_planner(name: str, key: str) -> Callable[..., Any]:
    planner = import_object(name, f"{key} is {name!r}")
    if not callable(planner):
        raise ConfigError(f"{key} {name!r} is no function; name one of lengths, home and options that returns a Plan")
    return planner


def call_planner(name: str, key: str, lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    """Plan by a planner of one's own: its plan is checked, and completed by the options.

    Raises PlanError, with the key that names the planner, if it fails or returns anything but a plan of these documents
    and slots, and for a plan that is not sound or exceeds the limit of rows.
    """
    request, planner = Request.of(lengths, home, options), _import_planner(name, key)
    if not request.lengths:  # a planner need not know what to do with a step without documents
        return request.plan((), name)
    documents, slots = plural(len(request.lengths), "document"), plural(home.slots, "slot")
    try:
        plan = planner(request.lengths, home, options=options)
    except LongspanError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raise PlanError(f"{key} {name!r} failed for {documents} on {slots}: {type(error).__name__}: {error}") from error
    if not isinstance(plan, Plan) or (plan.slots, plan.lengths) != (home.slots, request.lengths):
        raise PlanError(
            f"{key} {name!r} returned {plan if isinstance(plan, Plan) else type(plan).__name__}; it must return a "
            f"longspan.Plan of {slots} (home.slots) and of the {documents} that it received, in their order"
        )
    try:
        return request.plan(plan.micro_batches, name)
    except PlanError as error:
        raise PlanError(f"{key} {name!r} returned a plan that cannot run: {error}") from error


def check_cost(name: str, file: str) -> None:
    """Raise ConfigError for a cost that does not exist, and if `file`, the value of run.machine, is given as well."""
    if file:
        raise ConfigError(f"{COST_KEY} is {name!r} and run.machine is {file!r}; give one of them")
    _import_cost(name, COST_KEY)


def _import_cost(name: str, key: str) -> Any:
    cost = import_object(name, f"{key} is {name!r}") if "." in name and not name.endswith(".json") else None
    if not isinstance(cost, Cost) and not callable(cost):
        raise ConfigError(
            f"{key} is {name!r}; name a longspan.Cost, or a function of the model's configuration that returns one, as "
            "in 'my_module.my_cost'; a file of longspan bench calibrate is the value of run.machine"
        )
    return cost


def own_cost(name: str, model_config: Any, key: str = COST_KEY) -> Cost:
    """Return the cost with a dotted name, for a model. Raises ConfigError, with the `key`, for what is no cost.

    >>> own_cost("my_costs.measured", model.config)  # doctest: +SKIP
    """
    cost = _import_cost(name, key)
    try:
        cost = cost if isinstance(cost, Cost) else cost(model_config)
    except Exception as error:  # whatever somebody's function raises
        raise ConfigError(f"{key} {name!r} failed for the model: {type(error).__name__}: {error}") from error
    if not isinstance(cost, Cost):
        raise ConfigError(f"{key} {name!r} returned {type(cost).__name__}; it must return a longspan.Cost")
    return cost
