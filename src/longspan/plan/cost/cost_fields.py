"""The fields of a cost: constants of one machine and one model, and what of a step they price; checks, and JSON.

What they make of groups of documents is `cost.py`'s.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast, get_args

from longspan.errors import PlanError
from longspan.plan.cost.state_cost import StateCost

Passes = Literal["forward and backward", "forward"]
PRICED_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")

DEFAULT_SOURCE = "Qwen3-8B on GPUs of 400 TFLOP/s"
_NOT_CONSTANTS = ("source", "passes", "forward", "cp_comm_type", "a2a_size", "states")


@dataclass(frozen=True, kw_only=True)
class CostFields:
    """The fields of a `Cost`, which says what they mean."""

    linear_seconds: float = 45.4e9 / 4e14  # 6 FLOPs for each of 7.57e9 weights
    attention_seconds: float = 36 * 7 * 4096 / 4e14  # layers x (2 forward + 5 backward) x query width
    ring_bytes: float = 36 * 3 * 2 * 1024 * 2  # layers x (forward, backward, gradients) x k and v x width x bfloat16
    exchange_bytes: float = 36 * 2 * 2 * (4096 + 1024) * 2  # layers x (forward, backward) x (q, out; k, v) x bfloat16
    inside_bytes_per_second: float = 350e9
    across_bytes_per_second: float = 40e9
    ring_step_seconds: float = 36 * 2 * 10e-6
    micro_batch_seconds: float = 10e-3
    closing_seconds: float = 0.0
    launch_seconds: float = 0.0
    source: str | None = field(default=None, compare=False)
    passes: Passes = "forward and backward"
    forward: "Self | None" = None
    cp_comm_type: str = "p2p"
    a2a_size: int = 1
    states: StateCost | None = None

    def __post_init__(self) -> None:
        if self.source is None:
            usual = self.constants() == {f.name: f.default for f in _constant_fields()}
            object.__setattr__(self, "source", DEFAULT_SOURCE if usual else "constants of the caller")
        said: object = self.source
        if not isinstance(said, str):
            raise PlanError(f"source is {said!r}; give words that say what model and machine the cost is of")
        for name, choices in (("passes", get_args(Passes)), ("cp_comm_type", PRICED_TYPES)):
            if getattr(self, name) not in choices:
                raise PlanError(f"{name} of a cost is {getattr(self, name)!r}; use one of {', '.join(choices)}")
        if self.forward and (self.forward.passes != "forward" or self.passes == "forward"):
            raise PlanError(
                "forward is the cost of forward passes alone beside that of both; Cost.forward_only makes it"
            )
        size = cast(object, self.a2a_size)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlanError(f"a2a_size is {size!r}; give the slots that exchange heads, at least 1")
        for name, value in self.constants().items():
            positive = name.endswith("_per_second")
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not good or value < 0 or (positive and value == 0):
                least = "above 0" if positive else "of at least 0"
                raise PlanError(f"{name} is {value!r}; give a finite number {least}")

    def constants(self) -> dict[str, Any]:
        """The constants by name."""
        return {f.name: getattr(self, f.name) for f in _constant_fields()}

    def scaled(self, factor: float, source: str) -> Self:
        """The cost of a machine on which everything takes `factor` times as long.

        >>> cost.scaled(2.0, "slower GPUs").micro_batch_seconds / cost.micro_batch_seconds  # doctest: +SKIP
        2.0
        """
        constants = {
            name: value / factor if name.endswith("_per_second") else value * factor
            for name, value in self.constants().items()
            if name not in ("ring_bytes", "exchange_bytes")
        }
        forward = self.forward and self.forward.scaled(factor, source)
        states = self.states and self.states.scaled(factor)
        return dataclasses.replace(self, **constants, source=source, forward=forward, states=states)

    def to_json(self) -> dict[str, Any]:
        """The constants and the source by name, for a JSON document; `Cost.from_json` gives an equal cost back."""
        usual = {f.name: f.default for f in dataclasses.fields(self)}
        said = {name: getattr(self, name) for name in ("passes", "cp_comm_type", "a2a_size")}
        unusual = {name: value for name, value in said.items() if value != usual[name]}
        forward = {"forward": self.forward.to_json()} if self.forward else {}
        states = {"states": dataclasses.asdict(self.states)} if self.states else {}
        return self.constants() | {"source": self.source or ""} | unusual | states | forward

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """A cost from a JSON object; constants that it leaves out keep their default. Raises PlanError for others."""
        names = [field.name for field in dataclasses.fields(cls)]
        constants = cast(dict[str, Any], values) if isinstance(values, dict) else {"": values}
        if not all(name in names for name in constants):
            raise PlanError(f"a cost is an object with numbers for some of {', '.join(names)}; got {values!r}")
        fields: dict[str, Any] = {"source": "a file that does not name its machine"} | constants
        if fields.get("forward"):
            fields["forward"] = cls.from_json(fields["forward"])
        if fields.get("states"):
            fields["states"] = StateCost.from_json(fields["states"])
        return cls(**fields)


def _constant_fields() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(CostFields) if f.name not in _NOT_CONSTANTS]
