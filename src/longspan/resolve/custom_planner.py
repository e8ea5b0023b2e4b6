"""Planners of one's own, by dotted name: they are imported, called, and their plans checked and completed."""

from collections.abc import Callable, Sequence
from typing import Any

from longspan.config.file import nearest_hint
from longspan.config.keys import AUTO
from longspan.config.plan_section import PLANNERS
from longspan.errors import ConfigError, LongspanError, PlanError, import_object, plural
from longspan.layout import Layout
from longspan.plan import Plan, PlanOptions
from longspan.plan.planners.options import Request


def check_planner_exists(name: str, key: str) -> None:
    """Raise ConfigError, with the key that names it, for a planner that does not exist."""
    if name in PLANNERS:
        return
    if "." not in name:
        raise ConfigError(
            f"{key} is {name!r}; {nearest_hint(name, (AUTO, *PLANNERS))}, or a function of your own with its module, "
            "as in 'my_module.my_planner' (docs/planning.md)"
        )
    _import_planner(name, key)


def _import_planner(name: str, key: str) -> Callable[..., Any]:
    """Import a planner of one's own by its dotted name. Raises ConfigError, with the key that names it, for anything
    but a function.
    """
    planner = import_object(name, f"{key} is {name!r}")
    if not callable(planner):
        raise ConfigError(
            f"{key} {name!r} is no function; name one of lengths, home and options that returns a Plan"
        )
    return planner


def plan_by_custom_planner(
    name: str, key: str, lengths: Sequence[int], home: Layout, *, options: PlanOptions
) -> Plan:
    """Plan by a planner of one's own: its plan is checked, and completed by the options.

    Raises PlanError, with the key that names the planner, if it fails or returns anything but a plan of these documents
    and slots, and for a plan that is not sound or exceeds the limit of rows.
    """
    request = Request.from_arguments(lengths, home, options)
    planner = _import_planner(name, key)
    if not request.lengths:  # a planner need not know what to do with a step without documents
        return request.make_plan((), name)
    documents = plural(len(request.lengths), "document")
    slots = plural(home.slots, "slot")
    try:
        plan = planner(request.lengths, home, options=options)
    except LongspanError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raise PlanError(
            f"{key} {name!r} failed for {documents} on {slots}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(plan, Plan) or (plan.slots, plan.lengths) != (home.slots, request.lengths):
        raise PlanError(
            f"{key} {name!r} returned {plan if isinstance(plan, Plan) else type(plan).__name__}; it must return a "
            f"longspan.Plan of {slots} (home.slots) and of the {documents} that it received, in their order"
        )
    try:
        return request.make_plan(plan.micro_batches, name)
    except PlanError as error:
        raise PlanError(f"{key} {name!r} returned a plan that cannot run: {error}") from error
