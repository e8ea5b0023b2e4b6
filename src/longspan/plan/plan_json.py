"""Plans from JSON: the inverse of `Plan.to_json`, strict, with errors that name the part that is missing or wrong."""

from typing import Any, cast

from longspan.errors import PlanError
from longspan.files import parse_json
from longspan.plan.cost.cost import Cost
from longspan.plan.micro_batch import Group, MicroBatch

_PLAN = {"slots", "lengths", "micro_batches"}  # needed; the rest has a default
_LIMITS = {"targets", "mode", "max_tokens_per_slot", "node_size", "row_multiple"}
_PLAN_MORE = _LIMITS | {"tokens", "planner", "predicted_seconds", "lower_bound_seconds", "cost"}
_GROUP = {"slots", "documents"}
_GROUP_MORE = {"lengths", "cp_comm_type", "hierarchical_context_parallel_sizes", "partition", "pad_to"}  # with defaults


def read_plan_fields(text: str | bytes) -> tuple[dict[str, Any], Any]:
    """Read the fields of a plan from a JSON document, unchecked, and the number of tokens that it states, or None.

    The number is no field of a plan, but can be compared with its lengths. Raises PlanError.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise PlanError(f"a plan must be JSON as Plan.to_json writes it: {error}") from None
    values = _read_object("the plan", document, _PLAN, _PLAN_MORE)
    tokens = values.pop("tokens", None)
    lengths = values["lengths"] = _read_tuple("lengths", values["lengths"])
    batches = _read_tuple("micro_batches", values["micro_batches"])
    values["micro_batches"] = tuple(_read_micro_batch(m, groups, lengths) for m, groups in enumerate(batches))
    values["cost"] = Cost.from_json(values.get("cost", {}))
    for name in ("predicted_seconds", "lower_bound_seconds"):
        values[name] = _read_seconds(name, values.get(name, 0.0))
    # Lengths that are no integers are refused by `Plan.check`.
    values.setdefault("targets", sum(length - 1 for length in lengths if isinstance(length, int)))
    return values, tokens


def _read_micro_batch(m: int, groups: Any, lengths: tuple[Any, ...]) -> MicroBatch:
    items = _read_tuple(f"micro-batch {m}", groups)
    return MicroBatch(
        tuple(_read_group(f"micro-batch {m}, group {index}", group, lengths) for index, group in enumerate(items))
    )


def _read_group(where: str, item: Any, lengths: tuple[Any, ...]) -> Group:
    """Sizes may be null, as a group without levels has them; lengths that are left out are those of the plan."""
    values = _read_object(where, item, _GROUP, _GROUP_MORE)
    for name in ("slots", "documents", "lengths", "hierarchical_context_parallel_sizes"):
        if name in values and not (name.startswith("hier") and values[name] is None):  # of these only sizes may be null
            values[name] = _read_tuple(f"{where}: {name}", values[name])
    kind = values.get("cp_comm_type", "p2p")
    values["cp_comm_type"] = kind if isinstance(kind, str) else _read_tuple(f"{where}: cp_comm_type", kind)
    documents = values["documents"]
    if not all(type(d) is int and 0 <= d < len(lengths) for d in documents):
        raise PlanError(f"{where} has documents {documents}, but the plan has {len(lengths)} lengths")
    values.setdefault("lengths", tuple(lengths[d] for d in documents))
    return Group(**values)


def _read_object(where: str, value: Any, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where} must be an object, got {type(value).__name__}")
    values = dict(cast(dict[str, Any], value))
    missing, unknown = sorted(required - set(values)), sorted(set(values) - required - optional)
    if missing:
        raise PlanError(f"{where} lacks {', '.join(missing)}")
    if unknown:
        raise PlanError(f"{where} has unknown {', '.join(unknown)}; known are {', '.join(sorted(required | optional))}")
    return values


def _read_tuple(where: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise PlanError(f"{where} must be a list, got {type(values).__name__}")
    return tuple(cast(list[Any], values))


def _read_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise PlanError(f"{name} is {value!r}; it must be a number of at least 0")
    return float(value)
