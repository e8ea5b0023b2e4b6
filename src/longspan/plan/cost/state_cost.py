"""What state-space layers add to a group of several slots: summaries of runs, states on the wire, a wait.

Runs of rows, and what each gives the others, follow from how a group's rows are dealt out (`longspan.ssm`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from longspan.errors import PlanError
from longspan.layout import Floats
from longspan.plan.check import check_choice, check_number
from longspan.plan.micro_batch import PARTITIONS
from longspan.plan.shape.model_shape import ModelShape

_STATE_SIZE = 4  # bytes of a number of a state
# What forward takes of both passes: a third of the products; of summaries two thirds, as backward reads what forward
# computed that a run does to a state; states go round once in either pass.
_FORWARD_SHARES = {
    "scan_seconds": 1 / 3,
    "summary_seconds": 2 / 3,
    "state_bytes": 1 / 2,
    "transition_bytes": 1 / 2,
    "step_seconds": 1 / 2,
}


@dataclass(frozen=True, kw_only=True)
class StateCost:
    """Seconds and bytes of the state-space layers of a model, all of them, forward and backward.

    >>> cost = StateCost(state_bytes=100.0, transition_bytes=50.0)
    >>> float(cost.run_bytes(1.0, 65536.0, 4.0)), float(cost.for_partition("contiguous").run_bytes(1.0, 65536.0, 4.0))
    (850.0, 400.0)

    `scan_seconds` of a row's recurrence, convolution, norms and gates are part of `Cost.linear_seconds`;
    `summary_seconds` are added for each row of a run that other slots need the state of. `state_bytes` are those of a
    run's state, `transition_bytes` of what a run does to one, which go to all slots of a group. `step_seconds` is the
    latency of the exchanges of all layers, among them that of the few rows before a run that its convolution reads.
    Groups have the `partition`. Raises PlanError for a value that is negative or not finite.
    """

    scan_seconds: float = 0.0
    summary_seconds: float = 0.0
    state_bytes: float = 0.0
    transition_bytes: float = 0.0
    step_seconds: float = 0.0
    partition: str = "zigzag"

    def __post_init__(self) -> None:
        """Check the partition and the constants."""
        check_choice("partition of a cost", self.partition, PARTITIONS)
        for name, value in self.constants().items():
            check_number(f"states.{name}", value)

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        *,
        scan_tflops: float,
        summary_tflops: float,
        step_latency: float,
        channel_seconds: float = 0.0,
    ) -> "StateCost | None":
        """Price a model's state-space layers at these TFLOP/s of scans and of summaries; None for a model without any.

        `channel_seconds` are those of a row and channel of a convolution, with the norms and gates about it. Forward
        and backward take 3 times a forward scan. In either pass states with transitions (in float32) are one message,
        and the rows before runs another; each costs a `step_latency`.
        """
        mixer, layers = shape.mixer, shape.mixer_layers
        if mixer is None:
            return None
        scan = 3 * mixer.chunked_flops / (scan_tflops * 1e12)
        transition = mixer.heads * (mixer.key_size**2 if mixer.delta else 1)  # numbers of what a run does to a state
        return cls(
            scan_seconds=layers * (scan + mixer.channels * channel_seconds),
            summary_seconds=layers * mixer.summary_flops / (summary_tflops * 1e12),
            state_bytes=float(layers * 2 * mixer.state * _STATE_SIZE),
            transition_bytes=float(layers * 2 * transition * _STATE_SIZE),
            step_seconds=layers * 2 * (bool(mixer.state) + (mixer.width > 1)) * step_latency,
        )

    def constants(self) -> dict[str, Any]:
        """Return the seconds and bytes by name: all fields but the partition."""
        return {name: value for name, value in vars(self).items() if name != "partition"}

    def for_partition(self, partition: str) -> "StateCost":
        """Return this cost for groups of this partition."""
        return dataclasses.replace(self, partition=partition)

    def forward_only(self) -> "StateCost":
        """Return the cost of forward passes only: the shares `_FORWARD_SHARES` of both passes."""
        return self._scaled(_FORWARD_SHARES)

    def shared_by(self, tp: int) -> "StateCost":
        """Return the cost of a rank, where tensor-parallel ranks share the heads."""
        return self._scaled({name: 1 / tp for name in _FORWARD_SHARES if name != "step_seconds"})

    def with_recomputation(self, share: float) -> "StateCost":
        """Return the cost where a share of the layers runs forward again in backward, its exchanges included."""
        return self._scaled({name: 1 + share * part for name, part in _FORWARD_SHARES.items()})

    def _scaled(self, factors: dict[str, float]) -> "StateCost":
        return dataclasses.replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def seconds(self, rows: tuple[Floats, Floats, Floats], degree: Floats, speed: Floats) -> Floats:
        """Return the seconds that a group's states take of each slot: summaries, states on the wire, and latency.

        `rows` are the group's tokens, the sum of its documents' squared lengths, and the number of documents; `speed`
        is the bytes/s of a slot. A group of one slot sends no state.
        """
        tokens, squares, documents = rows
        summarised = tokens / degree
        if self.partition == "contiguous":  # the run that a boundary cuts, of a document as long as the typical row's
            summarised = np.minimum(summarised, squares / np.maximum(tokens, 1) * (degree - 1) / degree)
        wire = self.run_bytes(documents, tokens, degree) * (degree - 1) / degree / speed
        return np.where(degree > 1, self.summary_seconds * summarised + wire + self.step_seconds, 0.0)

    def run_bytes(self, documents: ArrayLike, tokens: ArrayLike, degree: ArrayLike) -> Floats:
        """Return the bytes of the states and transitions of a group's runs, which go to every other slot."""
        states, transitions = _count_states(self.partition, documents, tokens, degree)
        return self.state_bytes * states + self.transition_bytes * transitions

    @classmethod
    def from_json(cls, values: Any) -> "StateCost":
        """Read a cost from a JSON object; missing constants are 0. Raises PlanError for unknown ones."""
        names = [field.name for field in dataclasses.fields(cls)]
        constants = dict(cast(dict[str, Any], values)) if isinstance(values, dict) else {"": values}
        constants.pop("halo_bytes", None)  # of version 0.2
        if not all(name in names for name in constants):
            raise PlanError(f"states of a cost is an object with some of {', '.join(names)}; got {values!r}")
        return cls(**constants)


def _count_states(partition: str, documents: ArrayLike, tokens: ArrayLike, degree: ArrayLike) -> tuple[Floats, Floats]:
    """Count the states and the transitions that a group sends.

    Every run of a document but the last sends a state. A run that is not the first either also sends a transition, as
    the state before it passes through. Under "zigzag" a document has two runs on every slot, of which those of the last
    slot are neighbours and count as one. Under "contiguous" each of the degree − 1 boundaries between slots cuts one
    document, whose state goes on; the first run of each document sends no transition.
    """
    documents, tokens, degree = np.asarray(documents), np.asarray(tokens), np.asarray(degree)
    if partition == "contiguous":
        return degree - 1, np.maximum(degree - 1 - documents, 0)
    runs = np.minimum(2 * degree - 1, tokens / np.maximum(documents, 1))  # of a document, a row each at least
    states, transitions = documents * (runs - 1), documents * np.maximum(runs - 2, 0)
    return np.where(degree > 1, states, 0), np.where(degree > 1, transitions, 0)


def busiest_ratio(partition: str, tokens: Floats, squares: Floats, around: Floats) -> Floats | float:
    """Return the attention of the busiest slot in a ring of `around` members, over the mean of its slots.

    A document that spans c slots end to end gives its last slot 2 - 1 / c times the mean: c here is that of a
    typical row's document. In zigzag all slots have as much.
    """
    if partition == "zigzag":
        return 1.0
    spanned = np.maximum(around * squares / np.maximum(tokens, 1) ** 2, 1.0)
    return 2 - 1 / spanned
