"""What one machine and one model make of rows: the constants by which plans are priced.

The model: a slot's share of the linear layers, plus the longer of causal attention and the ring's traffic, plus a
latency for each ring step. Memory is not priced (planners are given a cap), nor is the wire between pipeline stages.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan.cost.model_shape import ModelShape

DEFAULT_SOURCE = "Qwen3-8B on GPUs of 400 TFLOP/s"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds and bytes of one machine and model; the defaults are Qwen3-8B in bfloat16 at 400 TFLOP/s a device.

    >>> round(float(Cost().group_seconds(65536, 65536**2, 8, inside=True)), 3)
    2.32

    Forward and backward together: `linear_seconds` per row in all layers without attention, `attention_seconds` per
    row squared of one document in causal attention, `ring_bytes` that each row's keys, values and gradients put on the
    wire for a full turn, at `inside_bytes_per_second` where all slots of a group share a node and at
    `across_bytes_per_second` elsewhere; `ring_step_seconds` of latency for each of the degree − 1 steps, and
    `micro_batch_seconds` of launches for each micro-batch. `closing_seconds` are added to a step in free mode: where
    parameters are sharded over slots, they are gathered before it and gradients are summed after it (`with_closing`).
    `source` says in words what model and machine the constants are of, for tables and reports; "" is of no machine: its
    seconds say how the parts of plans compare, and nothing else. Raises PlanError for a value that is negative or not
    finite.
    """

    linear_seconds: float = 45.4e9 / 4e14  # 6 FLOPs for each of 7.57e9 weights
    attention_seconds: float = 36 * 7 * 4096 / 4e14  # layers x (2 forward + 5 backward) x query width
    ring_bytes: float = 36 * 3 * 2 * 1024 * 2  # layers x (forward, backward, gradients) x k and v x width x bfloat16
    inside_bytes_per_second: float = 350e9
    across_bytes_per_second: float = 40e9
    ring_step_seconds: float = 36 * 2 * 10e-6
    micro_batch_seconds: float = 10e-3
    closing_seconds: float = 0.0
    source: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.source is None:
            usual = self.constants() == {f.name: f.default for f in dataclasses.fields(self) if f.name != "source"}
            object.__setattr__(self, "source", DEFAULT_SOURCE if usual else "constants of the caller")
        said: object = self.source
        if not isinstance(said, str):
            raise PlanError(f"source is {said!r}; give words that say what model and machine the cost is of")
        for name, value in self.constants().items():
            positive = name.endswith("_per_second")
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not good or value < 0 or (positive and value == 0):
                least = "above 0" if positive else "of at least 0"
                raise PlanError(f"{name} is {value!r}; give a finite number {least}")

    def constants(self) -> dict[str, Any]:
        """The constants by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "source"}

    def scaled(self, factor: float, source: str) -> "Cost":
        """The cost of a machine on which everything takes `factor` times as long.

        >>> Cost().scaled(2.0, "slower GPUs").micro_batch_seconds
        0.02
        """
        taken = {
            name: value / factor if name.endswith("_per_second") else value * factor
            for name, value in self.constants().items()
            if name != "ring_bytes"
        }
        return dataclasses.replace(self, **taken, source=source)

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

    def with_closing(
        self, weights: float, home: Layout, *, node_size: int = 8, gather_bytes: float = 2, reduce_bytes: float = 4
    ) -> "Cost":
        """This cost for free plans over `weights` parameters that are sharded over the slots of each replica of a home.

        >>> round(Cost().with_closing(8.19e9, Layout(8)).closing_seconds, 3)
        0.133

        Beside a closing micro-batch of launches, each of the w = slots / dp_replicate slots of a replica takes in
        (w − 1) / w of the weights, of `gather_bytes` each, and of the sums of gradients, of `reduce_bytes`; summing its
        1 / w of these over the r replicas by a ring brings 2 (r − 1) / r of it again. A host has `node_size` slots.
        """
        copies, width = home.dp_replicate, home.slots // home.dp_replicate
        together = home.slots <= node_size
        within = self._speed(together or node_size % width == 0)  # else some replica is on two hosts
        gathered = weights * (gather_bytes + reduce_bytes) * (width - 1) / width
        summed = weights / width * reduce_bytes * 2 * (copies - 1) / copies
        wire = gathered / within + summed / self._speed(together)
        return dataclasses.replace(self, closing_seconds=self.micro_batch_seconds + wire)

    def _speed(self, inside: bool) -> float:
        return self.inside_bytes_per_second if inside else self.across_bytes_per_second

    @classmethod
    def for_model(
        cls,
        config: Any,
        *,
        tflops: float,
        attention_tflops: float | None = None,
        inside_gbps: float = 350.0,
        across_gbps: float = 40.0,
        bytes_per_value: int = 2,
        ring_step_latency: float = 10e-6,
        micro_batch_seconds: float = 10e-3,
    ) -> "Cost":
        """The cost of a model on a machine: 6 FLOPs per token for each active weight, 7 x width for causal attention.

        >>> cost = Cost.for_model("Qwen3-8B/config.json", tflops=400, inside_gbps=350, across_gbps=40)  # doctest: +SKIP

        `config` is a transformers configuration, an object or dict like one, a config.json or its folder. `tflops` is
        what a slot (its tensor-parallel ranks together) sustains, in 1e12 FLOP/s, and `attention_tflops` what it does
        in attention, where that differs; `inside_gbps` and `across_gbps` what it sends to another slot of its node and
        elsewhere, in 1e9 bytes/s; `ring_step_latency` the seconds of a step of the ring in one layer;
        `bytes_per_value` of keys and values. Raises PlanError naming attributes that are missing, or that show layers
        which cannot be priced so.
        """
        shape = ModelShape.of(config)
        attention_tflops = tflops if attention_tflops is None else attention_tflops
        rates = {"tflops": tflops, "attention_tflops": attention_tflops}
        for name, value in (rates | {"inside_gbps": inside_gbps, "across_gbps": across_gbps}).items():
            if not value > 0:
                raise PlanError(f"{name} is {value!r}; give a number above 0")
        full = shape.layers - shape.window_layers
        in_windows = shape.window_layers * 14 * shape.query_width * shape.window  # documents longer than the window
        return cls(
            linear_seconds=6 * shape.weights / (tflops * 1e12) + in_windows / (attention_tflops * 1e12),
            attention_seconds=full * 7 * shape.query_width / (attention_tflops * 1e12),
            ring_bytes=float(shape.layers * 3 * 2 * shape.key_width * bytes_per_value),
            inside_bytes_per_second=inside_gbps * 1e9,
            across_bytes_per_second=across_gbps * 1e9,
            ring_step_seconds=shape.layers * 2 * ring_step_latency,
            micro_batch_seconds=micro_batch_seconds,
            source=f"the model at {tflops:g} TFLOP/s",
        )

    def to_json(self) -> dict[str, float | str]:
        """The constants and the source by name, for a JSON document; `Cost.from_json` gives an equal cost back."""
        return self.constants() | {"source": self.source or ""}

    @classmethod
    def from_json(cls, values: Any) -> "Cost":
        """A cost from a JSON object; constants that it leaves out keep their default. Raises PlanError for others."""
        names = [field.name for field in dataclasses.fields(cls)]
        constants = cast(dict[str, Any], values) if isinstance(values, dict) else {"": values}
        if not all(name in names for name in constants):
            raise PlanError(f"a cost is an object with numbers for some of {', '.join(names)}; got {values!r}")
        unnamed: dict[str, Any] = {"source": "a file that does not name its machine"}
        return cls(**(unnamed | constants))


DEFAULT_COST = Cost()


def _floats(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)
