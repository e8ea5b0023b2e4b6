"""A planner and a cost of one's own, by the dotted names in `context.planner` and `context.cost_model`. No torch.

A planner is called as `plan_dynamic` is, with the documents' lengths, the home and the run's options, and decides the
groups and micro-batches of its plan. All else follows from the options: targets, mode, limit of rows, dummy
micro-batches, time and bound. A cost is a `longspan.Cost`, or an object of a class of one's own that inherits from it.
docs/planning.md shows both.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from longspan.config.file import nearest_hint
from longspan.config.keys import import_object
from longspan.config.plan_section import PLANNERS
from longspan.errors import ConfigError, LongspanError, PlanError, plural
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions
from longspan.plan.check import check_comm_types, heads_allow
from longspan.plan.planners.request import Request

OwnPlanner = Callable[..., Any]
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


@cache
def _import_planner(name: str, key: str) -> OwnPlanner:
    """Import the planner of this name. Raises ConfigError for what cannot be called."""
    planner = import_object(name, f"{key} is {name!r}")
    if not callable(planner):
        module, _, attribute = name.rpartition(".")
        lack = f"has no {attribute}" if planner is None else f"has {attribute}, which is no function"
        raise ConfigError(
            f"{key} is {name!r}, and {module} {lack}; name a function of lengths, home and options that returns a Plan"
        )
    return planner


def call_planner(name: str, key: str, lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    """Plan by a planner of one's own: its plan is checked, and completed by the options.

    Raises PlanError, with the key that names the planner, if it fails, returns no Plan, or a plan of other documents or
    slots, and for a plan that is not sound, exceeds the limit of rows or shares heads that its groups cannot share.
    """
    request, planner = Request.of(lengths, home, options), _import_planner(name, key)
    if not request.lengths:  # a planner need not know what to do with a step without documents
        return request.plan((), name)
    try:
        plan = planner(request.lengths, home, options=options)
    except LongspanError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raise PlanError(
            f"{key} {name!r} failed for {plural(len(request.lengths), 'document')} on {plural(home.slots, 'slot')}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(plan, Plan):
        raise PlanError(f"{key} {name!r} returned {type(plan).__name__}; it must return a longspan.Plan")
    if plan.slots != home.slots:
        raise PlanError(
            f"{key} {name!r} returned a plan of {plural(plan.slots, 'slot')}; the home has {home.slots} (home.slots)"
        )
    if plan.lengths != request.lengths:
        raise PlanError(
            f"{key} {name!r} returned a plan of {plural(len(plan.lengths), 'document')} "
            f"({plural(plan.tokens, 'token')}); its lengths must be those of the {len(request.lengths)} documents "
            f"({plural(sum(request.lengths), 'token')}) that it received, in their order"
        )
    try:
        checked_plan = request.plan(plan.micro_batches, name)
        _check_group_heads(checked_plan, options, home)
    except PlanError as error:
        raise PlanError(f"{key} {name!r} returned a plan that cannot run: {error}") from error
    return checked_plan


def _check_group_heads(plan: Plan, options: PlanOptions, home: Layout) -> None:
    """Raise PlanError for groups whose number of slots does not divide the query heads that a2a exchanges.

    Under a2a+p2p only the `inner` members of the first level exchange heads. Groups that are alike are checked once.
    Where the heads are not known, nothing is refused.
    """
    groups = (group for batch in plan.micro_batches for group in batch.groups)
    for degree, kind, sizes in dict.fromkeys(
        (group.degree, group.cp_comm_type, group.hierarchical_context_parallel_sizes) for group in groups
    ):
        types = check_comm_types(kind)
        inner = sizes[0] if sizes is not None and "a2a+p2p" in types else 1
        if not heads_allow(degree, options.heads, types, home.tp) or (options.heads or 0) % (inner * home.tp):
            raise PlanError(
                f"{kind} shares {(options.heads or 0) // home.tp} query heads among the {degree} slots of a group"
                f"{f' ({inner} at a time)' if inner > 1 else ''}, which do not divide them"
            )


def check_cost(name: str, file: str) -> None:
    """Raise ConfigError for a cost that does not exist, and if `file`, the value of run.machine, is given as well."""
    if file:
        raise ConfigError(f"{COST_KEY} is {name!r} and run.machine is {file!r}; give one of them")
    _import_cost(name, COST_KEY)


def _import_cost(name: str, key: str) -> Any:
    """Import the cost of this name, or the function that makes one from a model's configuration.

    Raises ConfigError for anything else.
    """
    if "." not in name or name.endswith(".json"):
        raise ConfigError(
            f"{key} is {name!r}; give a longspan.Cost or a function that returns one by its dotted name, as in "
            "'my_module.my_cost'; a file of longspan bench calibrate is the value of run.machine"
        )
    cost = import_object(name, f"{key} is {name!r}")
    if not isinstance(cost, Cost) and not callable(cost):
        module, _, attribute = name.rpartition(".")
        lack = f"has no {attribute}" if cost is None else f"has {attribute}, which is neither a Cost nor a function"
        raise ConfigError(
            f"{key} is {name!r}, and {module} {lack}; name a longspan.Cost, or a function of the model's "
            "configuration that returns one"
        )
    return cost


def own_cost(name: str, model_config: Any, key: str = COST_KEY) -> Cost:
    """Return the cost with a dotted name, for a model; `key` names it in errors.

    Raises ConfigError for what is no cost, and for a cost whose prices are not finite numbers from 0.

    >>> own_cost("my_costs.measured", model.config)  # doctest: +SKIP
    """
    cost = _import_cost(name, key)
    if not isinstance(cost, Cost):
        try:
            cost = cost(model_config)
        except Exception as error:  # whatever somebody's function raises
            raise ConfigError(
                f"{key} {name!r} failed for the model's configuration: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(cost, Cost):
        raise ConfigError(f"{key} {name!r} returned {type(cost).__name__}; it must return a longspan.Cost")
    _try_cost(cost, name, key)
    return cost


def _try_cost(cost: Cost, name: str, key: str) -> None:
    """Raise ConfigError unless a cost's methods give finite numbers of at least 0, in arrays of the arguments' shape.

    They are tried on three numbers of tokens (3, 1), their squares, and three degrees (3,).
    """
    tokens, degree = np.array([[1.0], [4096.0], [65536.0]]), np.array([1.0, 2.0, 8.0])
    inside = degree < 8  # whether a group lies inside one host
    calls = {
        "group_seconds": (tokens, tokens * tokens, degree, inside),
        "group_bytes": (tokens, degree),
        "work_seconds": (tokens, tokens * tokens),
        "latency_seconds": (degree,),
    }
    for method, arguments in calls.items():
        shape = np.broadcast_shapes(*(np.shape(argument) for argument in arguments))
        try:
            values = np.asarray(getattr(cost, method)(*arguments), dtype=np.float64)
        except Exception as error:
            raise ConfigError(f"{key} {name!r}: {method} failed: {type(error).__name__}: {error}") from error
        if values.shape != shape or not np.isfinite(values).all() or (values < 0).any():
            raise ConfigError(
                f"{key} {name!r}: {method} of arrays that broadcast to {shape} gave {values.shape}, from "
                f"{values.min(initial=np.inf):g} to {values.max(initial=0.0):g}; give that shape, finite and at least 0"
            )
