"""What one machine and one model make of rows: the constants by which plans are priced.

The model: a slot's share of the linear layers, plus the longer of causal attention and the ring's traffic, plus a
latency for each ring step. Memory is not priced (planners are given a cap), nor is the wire between pipeline stages.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds and bytes of one machine and model; the defaults are Qwen3-8B in bfloat16 at 400 TFLOP/s a device.

    >>> round(float(Cost().group_seconds(65536, 65536**2, 8, inside=True)), 3)
    2.32

    Forward and backward together: `linear_seconds` per row in all layers without attention, `attention_seconds` per
    row squared of one document in causal attention, `ring_bytes` that each row's keys, values and gradients put on the
    wire for a full turn, at `inside_bytes_per_second` where all slots of a group share a node and at
    `across_bytes_per_second` elsewhere; `ring_step_seconds` of latency for each of the degree − 1 steps, and
    `micro_batch_seconds` of launches for each micro-batch. Raises PlanError for a value that is negative or not finite.
    """

    linear_seconds: float = 45.4e9 / 4e14  # 6 FLOPs for each of 7.57e9 weights
    attention_seconds: float = 36 * 7 * 4096 / 4e14  # layers x (2 forward + 5 backward) x query width
    ring_bytes: float = 36 * 3 * 2 * 1024 * 2  # layers x (forward, backward, gradients) x k and v x width x bfloat16
    inside_bytes_per_second: float = 350e9
    across_bytes_per_second: float = 40e9
    ring_step_seconds: float = 36 * 2 * 10e-6
    micro_batch_seconds: float = 10e-3

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            positive = name.endswith("_per_second")
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not good or value < 0 or (positive and value == 0):
                least = "above 0" if positive else "of at least 0"
                raise PlanError(f"{name} is {value!r}; give a finite number {least}")

    def work_seconds(self, tokens: ArrayLike, squares: ArrayLike) -> NDArray[np.float64]:
        """Seconds of documents on one slot without communication: `tokens` is their sum, `squares` that of squares."""
        return self.linear_seconds * _floats(tokens) + self.attention_seconds * _floats(squares)

    def group_seconds(
        self, tokens: ArrayLike, squares: ArrayLike, degree: ArrayLike, inside: ArrayLike
    ) -> NDArray[np.float64]:
        """Seconds that a group takes of each of its slots, without `micro_batch_seconds`; arguments broadcast.

        `tokens` and `squares` are the sums of its documents' rows and of their squares (padding included); `inside`
        says that all its slots share a node.
        """
        tokens, degree = _floats(tokens), _floats(degree)
        speed = np.where(inside, self.inside_bytes_per_second, self.across_bytes_per_second)
        ring = self.ring_bytes * tokens * (degree - 1) / degree / speed
        attention = np.maximum(self.attention_seconds * _floats(squares) / degree, ring)
        return self.linear_seconds * tokens / degree + attention + self.ring_step_seconds * (degree - 1)

    def to_json(self) -> dict[str, float]:
        """The constants by name, for a JSON document; `Cost.from_json` gives an equal cost back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Cost":
        """A cost from a JSON object; constants that it leaves out keep their default. Raises PlanError for others."""
        names = [field.name for field in dataclasses.fields(cls)]
        found = cast(dict[str, Any], values) if isinstance(values, dict) else {"": values}
        if not all(name in names for name in found):
            raise PlanError(f"a cost is an object with numbers for some of {', '.join(names)}; got {values!r}")
        return cls(**found)


DEFAULT_COST = Cost()


def _floats(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)
