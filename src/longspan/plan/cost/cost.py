"""What one machine and one model make of rows: the constants by which plans are priced.

The model: a slot's share of the linear layers, plus the longer of causal attention and the ring's traffic, plus a
latency for each ring step; under the other communication types what `group_seconds` says. Memory is not priced
(planners are given a cap), nor is the wire between pipeline stages.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan.cost.cost_fields import CostFields
from longspan.plan.cost.model_shape import ModelShape
from longspan.plan.cost.state_cost import StateCost

FORWARD_ALONE = "forward passes alone"
# What forward takes of forward and backward together: 2 of 6 FLOPs for each weight; 2 of 7 products of attention; keys
# and values go round once, of three turns (backward sends them again, and their gradients home), in one of two passes;
# queries, keys, values and outputs are exchanged in either pass alike; and, as one kernel has two in backward, a third
# of the launches and of the closing. A cost that was measured forward alone does not use these.
FORWARD_SHARES = {
    "linear_seconds": 1 / 3,
    "attention_seconds": 2 / 7,
    "ring_bytes": 1 / 3,
    "exchange_bytes": 1 / 2,
    "ring_step_seconds": 1 / 2,
    "micro_batch_seconds": 1 / 3,
    "closing_seconds": 1 / 3,
}


@dataclass(frozen=True, kw_only=True)
class Cost(CostFields):
    """Seconds and bytes of one machine and model; the defaults are Qwen3-8B in bfloat16 at 400 TFLOP/s a device.

    >>> round(float(Cost().group_seconds(65536, 65536**2, 8, inside=True)), 3)
    2.32

    Forward and backward together: `linear_seconds` per row in all layers without attention, `attention_seconds` per
    row squared of one document in causal attention, `ring_bytes` that each row's keys, values and gradients put on the
    wire for a full turn, at `inside_bytes_per_second` where all slots of a group share a node and at
    `across_bytes_per_second` elsewhere; `ring_step_seconds` of latency for each of the degree − 1 steps, and
    `micro_batch_seconds` of launches for each micro-batch. `closing_seconds` are added to a step in free mode: where
    parameters are sharded over slots, they are gathered before it and gradients are summed after it (`with_closing`).
    `launch_seconds` is the least that a micro-batch takes in the whole model however few its rows, because the host
    needs so long to launch it: what `simulate` runs through pipeline stages is never less.
    `source` says in words what model and machine the constants are of, for tables and reports; "" is of no machine: its
    seconds say how the parts of plans compare, and nothing else.

    `passes` "forward" is the cost of an evaluation, which `forward_only` makes: of what was measured forward alone,
    `forward`, where that is known. `cp_comm_type` is the type that groups are priced under, "p2p" as a ring ("auto"
    too), of which a2a+p2p exchanges heads between `a2a_size` slots; `exchange_bytes` are those of a row's queries,
    keys, values and outputs and of their gradients, which a2a exchanges. `states` are the costs of a hybrid's
    state-space layers in groups, whose partition they know; None for models without. Raises PlanError for a value that
    is negative or not finite.
    """

    def forward_only(self) -> "Cost":
        """The cost of forward passes alone, as in an evaluation: measured, or by `FORWARD_SHARES`.

        >>> cost = Cost().forward_only()
        >>> cost.forward_only() is cost, round(cost.micro_batch_seconds, 4)
        (True, 0.0033)
        """
        if self.passes == "forward":
            return self
        shares = {name: value * FORWARD_SHARES.get(name, 1.0) for name, value in self.constants().items()}
        constants = self.forward.constants() if self.forward else shares
        source = self.source and f"{self.source}; {FORWARD_ALONE}"
        states = self.states and self.states.forward_only()
        if self.states and self.forward and self.forward.states:  # measured, or before recomputation
            states = self.forward.states.dealt(self.states.partition)
        return dataclasses.replace(self, **constants, source=source, passes="forward", forward=None, states=states)

    def under(self, cp_comm_type: str | Sequence[str], a2a_size: int = 1) -> "Cost":
        """This cost for groups of a communication type, or of the type that most layers of a list have.

        >>> Cost().under(["a2a", "p2p", "a2a"]).cp_comm_type
        'a2a'
        """
        kinds = [cp_comm_type] if isinstance(cp_comm_type, str) else list(cp_comm_type)
        return dataclasses.replace(self, cp_comm_type=max(kinds, key=kinds.count), a2a_size=a2a_size)

    def dealt(self, partition: str) -> "Cost":
        """This cost for groups of a partition, which matters to the states of a hybrid alone."""
        return dataclasses.replace(self, states=self.states.dealt(partition)) if self.states else self

    def work_seconds(self, tokens: ArrayLike, squares: ArrayLike) -> NDArray[np.float64]:
        """Seconds of documents on one slot without communication: `tokens` is their sum, `squares` that of squares."""
        return self.linear_seconds * _floats(tokens) + self.attention_seconds * _floats(squares)

    def group_seconds(
        self, tokens: ArrayLike, squares: ArrayLike, degree: ArrayLike, inside: ArrayLike, documents: ArrayLike = 1
    ) -> NDArray[np.float64]:
        """Seconds that a group takes of each of its slots, without `micro_batch_seconds`; arguments broadcast.

        `tokens` and `squares` are the sums of its documents' rows and of their squares (padding included); `inside`
        says that all its slots share a node, and `documents`, which counts for states, how many they are. Attention
        hides a ring's traffic, but neither that of all_gather nor the exchanges of a2a, each of which waits like one
        step of a ring (4 x H200, packed rows, degree 4: a2a took 0.5 to 0.9 ms a layer beyond kernels and wire,
        bench/records/attention-time-packed-4xH200.md; a step is 0.6 ms there).
        """
        tokens, degree = _floats(tokens), _floats(degree)
        speed = np.where(inside, self.inside_bytes_per_second, self.across_bytes_per_second)
        squares, around = _floats(squares), degree / self._exchanging(degree)
        attention = self.attention_seconds * squares / degree
        if self.states:
            attention = attention * self.states.busiest(tokens, squares, around)
        ring = self.ring_bytes * tokens * (around - 1) / degree / speed
        attention = attention + ring if self.cp_comm_type == "all_gather" else np.maximum(attention, ring)
        seconds = (
            self.linear_seconds * tokens / degree
            + (attention + self._exchange_seconds(tokens, degree, speed))
            + self._latency_of_attention(degree)
        )
        if self.states is None:
            return seconds
        return seconds + self.states.seconds((tokens, squares, _floats(documents)), degree, speed)

    def latency_seconds(self, degree: ArrayLike) -> NDArray[np.float64]:
        """Seconds that a group of this degree waits for messages however few rows they carry."""
        degree = _floats(degree)
        states = self.states.step_seconds * (degree > 1) if self.states else 0.0
        return self._latency_of_attention(degree) + states

    def _latency_of_attention(self, degree: NDArray[np.float64]) -> NDArray[np.float64]:
        exchanging = self._exchanging(degree)
        steps = np.minimum(degree - 1, 1) if self.cp_comm_type == "all_gather" else degree / exchanging - 1
        return self.ring_step_seconds * (steps + (exchanging > 1))

    def group_bytes(self, tokens: ArrayLike, degree: ArrayLike, documents: ArrayLike = 1) -> NDArray[np.float64]:
        """Bytes that all slots of a group put on the wire."""
        tokens, degree = _floats(tokens), _floats(degree)
        exchanging = self._exchanging(degree)
        ring = self.ring_bytes * tokens * (degree / exchanging - 1)
        sent = ring + self.exchange_bytes * tokens * (exchanging - 1) / exchanging
        if self.states is None:
            return sent
        return sent + self.states.wire_bytes(_floats(documents), tokens, degree)

    def _exchanging(self, degree: NDArray[np.float64]) -> NDArray[np.float64]:
        """How many slots exchange heads for rows; the others of a group stand in a ring with these."""
        if self.cp_comm_type == "a2a":
            return degree
        if self.cp_comm_type == "a2a+p2p":
            return np.gcd(degree.astype(np.int64), self.a2a_size).astype(np.float64)
        return np.ones_like(degree)

    def _exchange_seconds(
        self, tokens: NDArray[np.float64], degree: NDArray[np.float64], speed: NDArray[np.float64]
    ) -> NDArray[np.float64] | float:
        """Seconds of a slot's part of the exchange of heads, which nothing hides; of a2a+p2p, inside a node."""
        if "a2a" not in self.cp_comm_type:
            return 0.0
        exchanging = self._exchanging(degree)
        speed = speed if self.cp_comm_type == "a2a" else np.full_like(speed, self.inside_bytes_per_second)
        return self.exchange_bytes * tokens / degree * (exchanging - 1) / exchanging / speed

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
        gathered = weights * gather_bytes * (width - 1) / width / within
        forward = self.forward_only()
        forward = dataclasses.replace(forward, closing_seconds=forward.micro_batch_seconds + gathered)
        if self.passes == "forward":
            return forward
        reduced = weights * reduce_bytes * (width - 1) / width / within
        summed = weights / width * reduce_bytes * 2 * (copies - 1) / copies / self._speed(together)
        closing = self.micro_batch_seconds + gathered + reduced + summed
        return dataclasses.replace(self, closing_seconds=closing, forward=forward)

    def _speed(self, inside: bool) -> float:
        return self.inside_bytes_per_second if inside else self.across_bytes_per_second

    @classmethod
    def for_model(
        cls,
        config: Any,
        *,
        tflops: float,
        attention_tflops: float | None = None,
        scan_tflops: float | None = None,
        summary_tflops: float | None = None,
        channel_seconds: float = 0.0,
        inside_gbps: float = 350.0,
        across_gbps: float = 40.0,
        bytes_per_value: int = 2,
        ring_step_latency: float = 10e-6,
        micro_batch_seconds: float = 10e-3,
        depths: int = 0,
    ) -> "Cost":
        """The cost of a model on a machine: 6 FLOPs per token for each active weight, 7 x width for causal attention.

        >>> cost = Cost.for_model("Qwen3-8B/config.json", tflops=400, inside_gbps=350, across_gbps=40)  # doctest: +SKIP

        `config` is a transformers configuration, an object or dict like one, a config.json or its folder. `tflops` is
        what a slot (its tensor-parallel ranks together) sustains, in 1e12 FLOP/s, `attention_tflops` and `scan_tflops`
        what it does in attention and in the scans of state-space layers, where that differs, `summary_tflops` in the
        passes by which a run's states are told to others, where that is not the scans'; `channel_seconds` a row
        and channel of their convolutions, with the norms and gates about these; `inside_gbps` and `across_gbps` what
        it sends to another slot of its node and elsewhere, in 1e9 bytes/s; `ring_step_latency` the seconds of a step
        of the ring in one layer; `bytes_per_value` of keys and values; `depths` of multi-token
        prediction are those of `add_mtp`. Raises PlanError naming attributes that are missing, or that show layers
        which cannot be priced so.
        """
        shape = ModelShape.of(config, depths=depths)
        attention_tflops = tflops if attention_tflops is None else attention_tflops
        scan_tflops = tflops if scan_tflops is None else scan_tflops
        summary_tflops = scan_tflops if summary_tflops is None else summary_tflops
        rates = {"tflops": tflops, "attention_tflops": attention_tflops, "scan_tflops": scan_tflops}
        rates["summary_tflops"] = summary_tflops
        for name, value in (rates | {"inside_gbps": inside_gbps, "across_gbps": across_gbps}).items():
            if not value > 0:
                raise PlanError(f"{name} is {value!r}; give a number above 0")
        full = shape.layers - shape.window_layers - shape.chunk_layers
        # For documents longer than the window or chunk, of which a row sees half.
        seen = shape.window_layers * 14 * shape.window + shape.chunk_layers * 7 * shape.chunk
        states = StateCost.of(
            shape,
            scan_tflops=scan_tflops,
            summary_tflops=summary_tflops,
            step_latency=ring_step_latency,
            bytes_per_value=bytes_per_value,
            channel_seconds=channel_seconds,
        )
        in_windows = seen * shape.query_width / (attention_tflops * 1e12)
        return cls(
            linear_seconds=6 * shape.weights / (tflops * 1e12) + in_windows + (states.scan_seconds if states else 0.0),
            attention_seconds=full * 7 * shape.query_width / (attention_tflops * 1e12),
            ring_bytes=float(shape.layers * 3 * 2 * shape.key_width * bytes_per_value),
            exchange_bytes=float(shape.layers * 2 * 2 * (shape.query_width + shape.key_width) * bytes_per_value),
            inside_bytes_per_second=inside_gbps * 1e9,
            across_bytes_per_second=across_gbps * 1e9,
            ring_step_seconds=shape.layers * 2 * ring_step_latency,
            micro_batch_seconds=micro_batch_seconds,
            source=f"the model at {tflops:g} TFLOP/s",
            states=states,
        )


DEFAULT_COST = Cost()


def _floats(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)
