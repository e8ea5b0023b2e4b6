"""Cost: the constants of one machine and one model by which plans are priced, and the seconds of a group under them.

A group takes a slot's share of the linear layers, plus attention and the messages that it does not hide, which
`attention_price.py` prices by communication type. Memory is not priced (planners receive a cap), nor is the wire
between pipeline stages. `machine.py` makes the cost of a model on a machine; `model_cost.py` reads files.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import PlanError
from longspan.layout import Floats, Layout
from longspan.plan.check import COMM_TYPES, check_choice, check_count, check_number
from longspan.plan.cost.attention_price import Rows, exchanging_members, latency_seconds, price_attention
from longspan.plan.cost.links import Network, fewest_together
from longspan.plan.cost.model_flops import FORWARD_SHARES, ModelRates, check_rate, price_model
from longspan.plan.cost.state_cost import StateCost
from longspan.plan.shape.model_shape import ModelShape

Passes = Literal["forward and backward", "forward"]
DEFAULT_SOURCE = "Qwen3-8B on GPUs of 400 TFLOP/s"
_CHOICES = ("passes", "cp_comm_type", "a2a_size", "heads", "node_size", "stages", "chunks")
_NOT_CONSTANTS = ("source", "forward", "states", "network", *_CHOICES)
_ATTENTION_FIELDS = ("attention_seconds", "ring_bytes", "exchange_bytes", "merge_seconds", "copy_seconds")
_ROW_FIELDS = ("linear_seconds", "real_row_seconds", *_ATTENTION_FIELDS)
FORWARD_ALONE = "forward passes alone"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds and bytes of one machine and model; the defaults are Qwen3-8B in bfloat16 at 400 TFLOP/s a device.

    >>> round(float(Cost().group_seconds(65536, 65536**2, 8, inside=True)), 3)
    2.32

    All are of forward and backward together. `linear_seconds` are per row, in all layers without attention, of which
    rows of padding save `real_row_seconds` (experts, logits); `attention_seconds` per row squared of one document, in
    causal attention. `ring_bytes` are what each row's keys, values and gradients put on the wire for a full turn, at
    `inside_bytes_per_second` if all slots of a group share a node, else at `across_bytes_per_second`;
    `ring_step_seconds` is the latency of each of the degree − 1 steps, and `micro_batch_seconds` that of the launches
    of each micro-batch. `sharding_seconds` are those of FSDP2's messages in a micro-batch that hide behind its work: in
    lockstep it takes no less. `closing_seconds` are added to a step in free mode: sharded parameters are gathered
    before it and gradients summed after it (`with_closing`). `launch_seconds` is the least that a micro-batch takes in
    lockstep, however few its rows, for the host to launch it; each group of a slot and each document in it takes
    `group_launch_seconds` and `document_launch_seconds` more of the host. `update_seconds` are added to every step: the
    optimizer, and a step's ends. `source` names the constants' model and machine, for reports; "" means no machine:
    seconds only show how the parts of plans compare.
    `passes` "forward" marks the cost of an evaluation, which `forward_only` makes, of `forward` if forward passes were
    measured. `cp_comm_type` is the type under which groups are priced; "auto" is the fastest for each group, of those
    that `heads` query heads of a rank allow (0: unknown, and types that exchange heads are left out). Under a2a+p2p
    `a2a_size` slots exchange heads (0: the best number for each group). `exchange_bytes` are those of a row's queries,
    keys, values and outputs and of their gradients, which a2a exchanges. `merge_seconds` are what a ring takes to add a
    step to each row's output, `copy_seconds` what `all_gather` takes to lay out a row. `network` describes the links
    where they were measured or are known; without it they are ideal. `states` is the cost of a hybrid's state-space
    layers in groups of one partition; None for models without. A host has `node_size` slots. A slot has `stages`
    pipeline stages, which planners set to the home's, of `chunks` model chunks each; all seconds but those of
    `lockstep_seconds` and of a step are of the whole model. Raises PlanError for values below 0 or not finite.
    """

    linear_seconds: float = 45.4e9 / 4e14  # 6 FLOPs for each of 7.57e9 weights
    attention_seconds: float = 36 * 7 * 4096 / 4e14  # layers x (2 forward + 5 backward) x query width
    ring_bytes: float = 36 * 3 * 2 * 1024 * 2  # layers x (forward, backward, gradients) x k and v x width x bfloat16
    exchange_bytes: float = 36 * 2 * 2 * (4096 + 1024) * 2  # layers x (forward, backward) x (q, out; k, v) x bfloat16
    inside_bytes_per_second: float = 350e9
    across_bytes_per_second: float = 40e9
    ring_step_seconds: float = 36 * 2 * 10e-6
    micro_batch_seconds: float = 10e-3
    sharding_seconds: float = 0.0
    merge_seconds: float = 0.0
    copy_seconds: float = 0.0
    real_row_seconds: float = 0.0
    closing_seconds: float = 0.0
    launch_seconds: float = 0.0
    group_launch_seconds: float = 0.0
    document_launch_seconds: float = 0.0
    update_seconds: float = 0.0
    source: str | None = field(default=None, compare=False)
    passes: Passes = "forward and backward"
    forward: "Cost | None" = None
    cp_comm_type: str = "p2p"
    a2a_size: int = 1
    heads: int = field(default=0, compare=False)
    node_size: int = field(default=8, compare=False)
    stages: int = 1
    chunks: int = 1
    states: StateCost | None = None
    network: Network | None = None

    def __post_init__(self) -> None:
        """Name the source of constants that have none, and check all fields."""
        if self.source is None:
            usual = self.constants() == {f.name: f.default for f in _constant_fields()}
            object.__setattr__(self, "source", DEFAULT_SOURCE if usual else "constants of the caller")
        if not isinstance(source := cast(object, self.source), str):
            raise PlanError(f"source is {source!r}; give words that say what model and machine the cost is of")
        for name, choices in (("passes", get_args(Passes)), ("cp_comm_type", COMM_TYPES)):
            check_choice(f"{name} of a cost", getattr(self, name), choices)
        if self.forward and (self.forward.passes != "forward" or self.passes == "forward"):
            refusal = "forward is the cost of forward passes only, in a cost of both passes"
            raise PlanError(f"{refusal}; Cost.forward_only makes it")
        check_count("a2a_size, the slots that exchange heads,", self.a2a_size, least=0)
        check_count("heads of a cost", self.heads, least=0)
        for name in ("node_size", "stages", "chunks"):
            check_count(f"{name} of a cost", getattr(self, name))
        for name, value in self.constants().items():
            check_number(name, value, above_zero=name.endswith("_per_second"))

    def constants(self) -> dict[str, Any]:
        """Return the fields that are numbers of seconds or bytes, by name."""
        return {f.name: getattr(self, f.name) for f in _constant_fields()}

    def forward_only(self) -> "Cost":
        """Return the cost of forward passes only, as in an evaluation: measured, or by `FORWARD_SHARES`.

        >>> cost = Cost().forward_only()
        >>> cost.forward_only() is cost, round(cost.micro_batch_seconds, 4)
        (True, 0.0033)
        """
        if self.passes == "forward":
            return self
        shares = FORWARD_SHARES | ({"ring_bytes": self.network.block_share} if self.network else {})
        shared = {name: value * shares.get(name, 1.0) for name, value in self.constants().items()}
        constants = self.forward.constants() if self.forward else shared
        source = self.source and f"{self.source}; {FORWARD_ALONE}"
        states, forward_states = self.states and self.states.forward_only(), self.forward and self.forward.states
        if self.states and forward_states:  # measured, or priced before recomputation was added
            states = forward_states.for_partition(self.states.partition)
        return dataclasses.replace(self, **constants, source=source, passes="forward", forward=None, states=states)

    def under(self, cp_comm_type: str | Sequence[str], a2a_size: int = 1, *, heads: int | None = None) -> "Cost":
        """Return this cost for groups of a communication type, or of the type that most layers of a list have.

        >>> Cost().under(["a2a", "p2p", "a2a"]).cp_comm_type
        'a2a'
        """
        types = [cp_comm_type] if isinstance(cp_comm_type, str) else list(cp_comm_type)
        heads = self.heads if heads is None else heads
        return dataclasses.replace(self, cp_comm_type=max(types, key=types.count), a2a_size=a2a_size, heads=heads)

    def ways(self, most: int) -> Iterator["Cost"]:
        """Yield this cost under each type or size to choose from for groups of up to `most` slots, or else as it is.

        The planner takes the first of equally fast ones. Exchanges need the heads, from `heads` or the network, and
        those of a2a+p2p a size that divides the heads and a host.
        """
        if not self.has_choice:
            yield self
            return
        heads = self.heads or (self.network.heads if self.network else 0)
        if self.cp_comm_type == "a2a+p2p":
            yield self.under("a2a+p2p")
        else:
            yield from [self.under("a2a")] * bool(heads)
            yield from (self.under("p2p"), self.under("all_gather"))
        inner = range(2, min(most, self.node_size, heads) + 1)
        yield from (self.under("a2a+p2p", i) for i in inner if heads % i == 0 and self.node_size % i == 0)

    @property
    def has_choice(self) -> bool:
        """Whether each group has the type ("auto") or the sizes (a2a+p2p without) that are fastest for it."""
        return self.cp_comm_type == "auto" or (self.cp_comm_type == "a2a+p2p" and not self.a2a_size)

    def allows(self, degree: ArrayLike) -> NDArray[np.bool_]:
        """Return whether degrees suit this type: a2a divides the heads (unknown: only by 1), a2a+p2p has two levels."""
        degree = np.asarray(degree, dtype=np.int64)
        heads = self.heads or (self.network.heads if self.network else 0)
        if self.cp_comm_type == "a2a":
            return (heads % np.maximum(degree, 1) == 0) if heads else degree == 1
        return degree % self.a2a_size == 0 if self.a2a_size > 1 else degree > 0

    def for_partition(self, partition: str) -> "Cost":
        """Return this cost for groups of a partition, which matters only to the states of a hybrid."""
        return dataclasses.replace(self, states=self.states.for_partition(partition)) if self.states else self

    def work_seconds(self, tokens: ArrayLike, squares: ArrayLike) -> Floats:
        """Return the seconds on one slot, without communication, of documents with these sums of rows and squares."""
        half = self.network.half_speed_rows if self.network else 0.0  # on short pieces kernels are slower
        row_seconds = self.linear_seconds + half * self.attention_seconds
        return row_seconds * _float_array(tokens) + self.attention_seconds * _float_array(squares)

    def group_seconds(
        self,
        tokens: ArrayLike,
        squares: ArrayLike,
        degree: ArrayLike,
        inside: ArrayLike,
        documents: ArrayLike = 1,
        *,
        together: ArrayLike | None = None,
    ) -> Floats:
        """Return the seconds of each slot that a group takes, without `micro_batch_seconds`; arguments broadcast.

        `tokens` and `squares` are the sums of its documents' rows and of their squares (padding included), `documents`
        their number (which counts for states); `inside` is whether all its slots share a node, `together` the fewest on
        one node (None: all nodes but the last are full). Seconds are of linear layers, attention, states and messages.
        """
        tokens, squares, degree = _float_array(tokens), _float_array(squares), _float_array(degree)
        together = fewest_together(degree, inside, self.node_size) if together is None else together
        rows = Rows(tokens, squares, degree, _float_array(together))
        if self.has_choice:
            return self._least_seconds(rows, inside, documents)
        if self.states:
            ring_members = degree / exchanging_members(self.cp_comm_type, self.a2a_size, degree)
            rows = rows._replace(busiest=self.states.busiest_ratio(tokens, squares, ring_members))
        attention = price_attention(self, rows)
        seconds = self.linear_seconds * tokens / degree + (attention.computed + attention.exposed)
        if self.states:
            speed = np.where(inside, self.inside_bytes_per_second, self.across_bytes_per_second)
            seconds += self.states.seconds((tokens, squares, _float_array(documents)), degree, speed)
        return seconds

    def _least_seconds(self, rows: Rows, inside: ArrayLike, documents: ArrayLike) -> Floats:
        """Return the seconds of each group under the type that is fastest for that group."""
        tokens, squares, degree, together = rows[:4]
        least: Floats | float = np.inf
        for way in self.ways(int(degree.max(initial=1))):
            seconds = way.group_seconds(tokens, squares, degree, inside, documents, together=together)
            least = np.minimum(least, np.where(way.allows(degree), seconds, np.inf))
        return _float_array(least)

    def lockstep_seconds(self, slowest: Sequence[float]) -> float:
        """Return the seconds in lockstep of micro-batches whose slowest slots work this long, without the update.

        Each of p stages takes 1 / p of a micro-batch, and fills and drains in (p − 1) / chunks turns of the longest
        one, which itself goes through all stages (1F1B, interleaved: Narayanan et al. 2021; exact for forward passes of
        one chunk). The sum is exact, so that every host gets the same.
        """
        turns = self.turn_seconds(slowest)
        longest, bubble = max(turns, default=0.0), (self.stages - 1) / self.chunks
        return max((math.fsum(turns) + bubble * longest) / self.stages, longest)

    def turn_seconds(self, slowest: Sequence[float]) -> list[float]:
        """Return the seconds in lockstep of each micro-batch, in the whole model, whose slowest slots work this long.

        It takes no less than the messages of sharded parameters, which run meanwhile, and than the host's launches.
        """
        shards, launch = self.sharding_seconds, self.micro_batch_seconds
        return [max(max(seconds, shards) + launch, self.launch_seconds) for seconds in slowest]

    def latency_seconds(self, degree: ArrayLike) -> Floats:
        """Return the seconds that a group of this degree waits for messages however few rows they carry."""
        degree = _float_array(degree)
        states = self.states.step_seconds * (degree > 1) if self.states else 0.0
        return latency_seconds(self, degree) + states

    def with_closing(
        self, weights: float, home: Layout, *, node_size: int = 8, gather_bytes: float = 2, reduce_bytes: float = 4
    ) -> "Cost":
        """Return this cost for free plans over `weights` parameters that are sharded over the slots of each replica.

        >>> round(Cost().with_closing(8.19e9, Layout(8)).closing_seconds, 3)
        0.133

        A closing launches a micro-batch. Each of the w = slots / dp_replicate slots of a replica receives (w − 1) / w
        of the weights, `gather_bytes` each, and of gradients, `reduce_bytes` each; a ring over the r replicas then sums
        a slot's 1 / w of the gradients, of which 2 (r − 1) / r arrive. A host has `node_size` slots.
        """
        copies, width, share_host = home.dp_replicate, home.slots // home.dp_replicate, home.slots <= node_size
        in_host = share_host or node_size % width == 0  # all slots of a replica
        speed = self._link_speed(in_host)
        gathered = weights * gather_bytes * (width - 1) / width / speed
        forward = self.forward_only()
        forward = dataclasses.replace(forward, closing_seconds=forward.micro_batch_seconds + gathered)
        if self.passes == "forward":
            return forward
        reduced = weights * reduce_bytes * (width - 1) / width / speed
        summed = weights / width * reduce_bytes * 2 * (copies - 1) / copies / self._link_speed(share_host)
        closing = self.micro_batch_seconds + gathered + reduced + summed
        return dataclasses.replace(self, closing_seconds=closing, forward=forward)

    def _link_speed(self, inside: bool) -> float:
        """Return the bytes/s inside a host or across."""
        return self.inside_bytes_per_second if inside else self.across_bytes_per_second

    def shared_by(self, tp: int) -> "Cost":
        """Return the cost of a slot of `tp` tensor-parallel ranks: compute and bytes divide, latencies do not."""
        if isinstance(tp, bool) or tp < 1:
            raise PlanError(f"tp is {tp!r}; a degree is an integer of at least 1")
        return dataclasses.replace(
            self,
            **{name: getattr(self, name) / tp for name in _ROW_FIELDS},
            states=self.states and self.states.shared_by(tp),
            network=self.network and self.network.shared_by(tp),
            forward=self.forward and self.forward.shared_by(tp),
        )

    @classmethod
    def for_model(
        cls,
        config: Any,
        *,
        tflops: float,
        inside_gbps: float = 350.0,
        across_gbps: float = 40.0,
        micro_batch_seconds: float = 10e-3,
        depths: int = 0,
        **rates: Unpack[ModelRates],
    ) -> "Cost":
        """Return the cost of a model on a machine: 6 FLOPs a token and active weight, 7 x width in causal attention.

        >>> cost = Cost.for_model("Qwen3-8B/config.json", tflops=400, inside_gbps=350, across_gbps=40)  # doctest: +SKIP

        `config` is a transformers configuration, an object or dict like one, a config.json or its folder. `tflops` is
        what a slot (its tensor-parallel ranks together) sustains, in 1e12 FLOP/s, and `rates` are its other figures
        (`ModelRates`). A slot sends `inside_gbps` to another slot of its node and `across_gbps` elsewhere, in 1e9
        bytes/s. `depths` of multi-token prediction are those of `add_mtp`. Raises PlanError naming attributes that are
        missing, or that show layers which cannot be priced so.
        """
        check_rate("inside_gbps", inside_gbps)
        check_rate("across_gbps", across_gbps)
        return cls(
            **price_model(ModelShape.of(config, depths=depths), tflops, **rates),
            inside_bytes_per_second=inside_gbps * 1e9,
            across_bytes_per_second=across_gbps * 1e9,
            micro_batch_seconds=micro_batch_seconds,
            source=f"the model at {tflops:g} TFLOP/s",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the constants, the source, and all else that is not at its default, for `Cost.from_json`."""
        usual = {f.name: f.default for f in dataclasses.fields(self)}
        unusual = {name: value for name in _CHOICES if (value := getattr(self, name)) != usual[name]}
        forward = {"forward": self.forward.to_json()} if self.forward else {}
        states = {"states": dataclasses.asdict(self.states)} if self.states else {}
        network = {"network": self.network.to_json()} if self.network else {}
        return self.constants() | {"source": self.source or ""} | unusual | states | network | forward

    @classmethod
    def from_json(cls, values: Any) -> "Cost":
        """Read a cost from a JSON object; constants left out keep their default. Raises PlanError for unknown ones."""
        constants = cast(dict[str, Any], values) if isinstance(values, dict) else {"": values}
        if not set(constants) <= set(names := [field.name for field in dataclasses.fields(cls)]):
            raise PlanError(f"a cost is an object with numbers for some of {', '.join(names)}; got {values!r}")
        fields: dict[str, Any] = {"source": "a file that does not name its machine"} | constants
        parts: dict[str, Any] = {"forward": cls.from_json, "states": StateCost.from_json, "network": Network.from_json}
        return cls(**fields | {name: read(fields[name]) for name, read in parts.items() if fields.get(name)})


def _constant_fields() -> list[dataclasses.Field[Any]]:
    """Return the fields of seconds, bytes and bytes a second."""
    return [f for f in dataclasses.fields(Cost) if f.name not in _NOT_CONSTANTS]


DEFAULT_COST = Cost()


def _float_array(values: ArrayLike) -> Floats:
    """Return values as a float64 array."""
    return np.asarray(values, dtype=np.float64)
