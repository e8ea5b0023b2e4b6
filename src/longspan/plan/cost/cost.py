"""Cost: the constants of one machine and one model by which plans are priced, and the seconds of a group under them.

Memory is not priced (planners receive a cap), nor is the wire between pipeline stages.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import PlanError
from longspan.layout import Floats, Layout
from longspan.plan.check import check_choice, check_comm_type, check_count, check_number
from longspan.plan.cost.links import Network
from longspan.plan.messages import EXCHANGE_SLICE_BYTES, EXCHANGE_SLICES, GATHER_SLICE_BYTES
from longspan.plan.micro_batch import PARTITIONS, most_common_type
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
        check_choice("partition of a cost", self.partition, PARTITIONS)
        for name, value in self.constants().items():
            check_number(f"states.{name}", value)

    @classmethod
    def from_shape(
        cls,
        shape: ModelShape,
        *,
        scan_tflops: float,
        summary_tflops: float,
        step_latency: float,
        channel_seconds: float = 0.0,
    ) -> "StateCost | None":
        """Price a model's state-space layers at these TFLOP/s of scans and of summaries; None for a model without any.
        `channel_seconds` are those of a row and channel of a convolution, with the norms and gates about it. Both
        passes together take 3 times a forward scan. In either pass states with transitions (float32) are one message,
        and the rows before runs another; each costs a `step_latency`.
        """
        mixer = shape.mixer
        layers = shape.mixer_layers
        if mixer is None:
            return None
        scan = 3 * mixer.chunked_flops / (scan_tflops * 1e12)
        # numbers of a transition, which is what a run does to a state
        transition = mixer.heads * (mixer.key_size**2 if mixer.delta else 1)
        # Each pass sends so many messages.
        messages = [mixer.state > 0, mixer.width > 1].count(True)
        return cls(
            scan_seconds=layers * (scan + mixer.channels * channel_seconds),
            summary_seconds=layers * mixer.summary_flops / (summary_tflops * 1e12),
            state_bytes=float(layers * 2 * mixer.state * _STATE_SIZE),
            transition_bytes=float(layers * 2 * transition * _STATE_SIZE),
            step_seconds=layers * 2 * messages * step_latency,
        )

    def constants(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "partition"}

    def for_partition(self, partition: str) -> "StateCost":
        return dataclasses.replace(self, partition=partition)

    def forward_only(self) -> "StateCost":
        return self._scaled(_FORWARD_SHARES)

    def shared_by(self, tp: int) -> "StateCost":
        """Return the cost of a slot of `tp` ranks: all but latencies divide."""
        return self._scaled({name: 1 / tp for name in _FORWARD_SHARES if name != "step_seconds"})

    def with_recomputation(self, share: float) -> "StateCost":
        """Return the cost where a share of the layers runs forward again in backward, its exchanges included."""
        return self._scaled({name: 1 + share * part for name, part in _FORWARD_SHARES.items()})

    def _scaled(self, factors: dict[str, float]) -> "StateCost":
        return dataclasses.replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def seconds(self, group: tuple[Floats, Floats, Floats], degree: Floats, speed: Floats) -> Floats:
        """Return the seconds that each slot of a group takes for states: for summaries, for states on the wire, and in
        latency; 0 for a group of one slot. `group` are its tokens, the sum of its documents' squared lengths and their
        number; `speed` the bytes/s of a slot.
        """
        tokens, squares, documents = group
        summarised_rows = tokens / degree
        # contiguous: only those of the run that a boundary cuts, of a document as long as the typical row's
        if self.partition == "contiguous":
            summarised_rows = np.minimum(summarised_rows, squares / np.maximum(tokens, 1) * (degree - 1) / degree)
        wire = self.exchanged_state_bytes(documents, tokens, degree) * (degree - 1) / degree / speed
        return np.where(degree > 1, self.summary_seconds * summarised_rows + wire + self.step_seconds, 0.0)

    def exchanged_state_bytes(self, documents: ArrayLike, tokens: ArrayLike, degree: ArrayLike) -> Floats:
        """Return the bytes of the states and transitions of a group's runs, which go to every other slot.

        Every run of a document but the last sends a state, and, if it is not the first run either, a transition, by
        which the state before it is moved on. Under "zigzag" a document has two runs on every slot, of which those of
        the last slot are neighbours and count as one. Under "contiguous" each of the degree − 1 boundaries between
        slots cuts a document; the first run of each sends no transition.
        """
        documents = np.asarray(documents)
        tokens = np.asarray(tokens)
        degree = np.asarray(degree)
        if self.partition == "contiguous":
            return self.state_bytes * (degree - 1) + self.transition_bytes * np.maximum(degree - 1 - documents, 0)
        # A document has so many runs, of a row each at least.
        runs = np.minimum(2 * degree - 1, tokens / np.maximum(documents, 1))
        states = documents * (runs - 1)
        transitions = documents * np.maximum(runs - 2, 0)
        sent = degree > 1
        return self.state_bytes * np.where(sent, states, 0) + self.transition_bytes * np.where(sent, transitions, 0)


def attention_imbalance(partition: str, tokens: Floats, squares: Floats, around: Floats) -> Floats | float:
    """Return the attention of the busiest slot in a ring of `around` members, over the mean of its slots: 1 under
    zigzag. Under contiguous a document that spans c slots, end to end, gives the last of them 2 − 1 / c times the mean;
    c is taken of a typical row's document.
    """
    if partition == "zigzag":
        return 1.0
    spanned = np.maximum(around * squares / np.maximum(tokens, 1) ** 2, 1.0)
    return 2 - 1 / spanned


Passes = Literal["forward and backward", "forward"]
DEFAULT_SOURCE = "Qwen3-8B on GPUs of 400 TFLOP/s"
_CHOICES = ("passes", "cp_comm_type", "a2a_size", "heads", "node_size", "stages", "chunks", "choice_share")
_DIVIDED_BY_TP = (
    "linear_seconds",
    "real_row_seconds",
    "attention_seconds",
    "ring_bytes",
    "exchange_bytes",
    "merge_seconds",
    "copy_seconds",
)

PACKED_COPIES = 0.75  # more for rows of several documents in a gather, which an index orders
# Times as long as in dense attention by the fastest kernel products take of gathered keys and of a choice (H200,
# bench/records/indexed-attention-2xH200.md). Gathered pools and blocks, dense entries, and the windows of rows beside
# entries, for whose heads no fast kernel is, are taken to be as slow.
_GATHERED = 3.0
# A micro-batch's forward pass takes this share of its time.
FORWARD_SHARE = 1 / 3
FORWARD_OF_ATTENTION = 2 / 7  # products of a causal pair: 2 forward, 5 backward

# What forward takes of both passes: 2 of 6 FLOPs for each weight; of three turns of keys and values one, in one of two
# passes (backward sends them again, and their gradients home); half of the exchanges; weights are gathered in either
# pass, and gradients summed in float32; as one kernel has two in backward, a third of the launches and of the closing.
FORWARD_SHARES = {
    "linear_seconds": 1 / 3,
    "real_row_seconds": 1 / 3,
    "attention_seconds": FORWARD_OF_ATTENTION,
    "ring_bytes": 1 / 3,
    "exchange_bytes": 1 / 2,
    "ring_step_seconds": 1 / 2,
    "merge_seconds": FORWARD_OF_ATTENTION,
    "copy_seconds": FORWARD_OF_ATTENTION,
    "micro_batch_seconds": 1 / 3,
    "launch_seconds": 1 / 3,
    "group_launch_seconds": 1 / 3,
    "document_launch_seconds": 1 / 3,
    "sharding_seconds": 1 / 4,
    "closing_seconds": 1 / 3,
    "update_seconds": 0.0,
    "gradient_seconds": 0.0,
    "paging_seconds": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds and bytes of one machine and model; the defaults are Qwen3-8B in bfloat16 at 400 TFLOP/s a device.

    >>> round(float(Cost().group_seconds(65536, 65536**2, 8, inside=True)), 3)
    2.32

    All are of forward and backward together, and of the whole model. `linear_seconds` are per row, in all layers
    without attention, of which rows of padding save `real_row_seconds` (experts, logits); `attention_seconds` per row
    squared of one document, in causal attention. `ring_bytes` are what each row's keys, values and gradients put on the
    wire for a full turn, `exchange_bytes` those of its queries, keys, values and outputs, at `inside_bytes_per_second`
    if all slots of a group share a host of `node_size` slots, else at `across_bytes_per_second`. `ring_step_seconds` is
    the latency of a step; a ring takes `merge_seconds` a row to add a step to the output, `all_gather` `copy_seconds`
    to lay out a row. A micro-batch adds `micro_batch_seconds`, and takes no less than the `sharding_seconds` of FSDP2's
    messages behind its work and than the host's `launch_seconds`, with `group_launch_seconds` and
    `document_launch_seconds` more for each group of a slot and document in it. Of `attention_seconds` the
    `choice_share` is of indexers, which run forward alone. A step adds `update_seconds`, and
    `closing_seconds` for what is gathered and summed once (free mode: `with_closing`). Weights on the host come for
    each pass in `streaming_seconds`, behind its work, and sums of their gradients for every backward pass but the first
    in `gradient_seconds` more; an update has `paging_seconds` of copies behind the first forward pass.

    `source` names the constants' model and machine; "" means no machine: seconds only compare parts of plans. `passes`
    "forward" marks the cost of an evaluation, which `forward_only` makes, of `forward` if forward passes were measured.
    Groups are priced under `cp_comm_type`; "auto" is the fastest for each, of those that `heads` query heads allow (0:
    unknown, and types that exchange heads are left out). Under a2a+p2p `a2a_size` slots exchange heads (0: the best
    number). `network` describes the links where they were measured or are known; without it they are ideal. `states`
    are a hybrid's state-space layers. A slot has `stages` pipeline stages of `chunks` model chunks each. Raises
    PlanError for values below 0 or not finite.
    """

    linear_seconds: float = 45.4e9 / 4e14  # 6 FLOPs for each of 7.57e9 weights
    attention_seconds: float = 36 * 7 * 4096 / 4e14  # layers x (2 forward + 5 backward) x query width
    # layers x (forward, backward, gradients) x k and v x width x bfloat16
    ring_bytes: float = 36 * 3 * 2 * 1024 * 2
    # layers x (forward, backward) x (q, out; k, v) x bfloat16
    exchange_bytes: float = 36 * 2 * 2 * (4096 + 1024) * 2
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
    streaming_seconds: float = 0.0
    gradient_seconds: float = 0.0
    paging_seconds: float = 0.0
    source: str | None = field(default=None, compare=False)
    passes: Passes = "forward and backward"
    forward: "Cost | None" = None
    cp_comm_type: str = "p2p"
    a2a_size: int = 1
    heads: int = field(default=0, compare=False)
    node_size: int = field(default=8, compare=False)
    stages: int = 1
    chunks: int = 1
    choice_share: float = 0.0
    states: StateCost | None = None
    network: Network | None = None

    def __post_init__(self) -> None:
        if self.source is None:
            usual = all(value == getattr(Cost, name) for name, value in self.constants().items())
            object.__setattr__(self, "source", DEFAULT_SOURCE if usual else "constants of the caller")
        if not isinstance(source := cast(object, self.source), str):
            raise PlanError(f"source is {source!r}; give words that say what model and machine the cost is of")
        check_choice("passes of a cost", self.passes, get_args(Passes))
        # The planner prices a type of the caller's own as p2p.
        check_comm_type("cp_comm_type of a cost", self.cp_comm_type)
        if self.forward and (self.forward.passes != "forward" or self.passes == "forward"):
            refusal = "forward is the cost of forward passes only, in a cost of both passes"
            raise PlanError(f"{refusal}; Cost.forward_only makes it")
        check_count("a2a_size, the slots that exchange heads,", self.a2a_size, least=0)
        check_count("heads of a cost", self.heads, least=0)
        for name in ("node_size", "stages", "chunks"):
            check_count(f"{name} of a cost", getattr(self, name))
        for name, value in (self.constants() | {"choice_share": self.choice_share}).items():
            check_number(name, value, above_zero=name.endswith("_per_second"))

    def constants(self) -> dict[str, Any]:
        """Return the fields that are numbers of seconds or bytes, by name, but for those of a subclass."""
        return {name: getattr(self, name) for name in _CONSTANTS}

    @property
    def forward_shares(self) -> dict[str, float]:
        """What forward takes of both passes, by the name of a constant."""
        attention = FORWARD_OF_ATTENTION * (1 - self.choice_share) + self.choice_share
        shares = FORWARD_SHARES | {"attention_seconds": attention}
        return shares | ({"ring_bytes": self.network.block_share} if self.network else {})

    def forward_only(self) -> "Cost":
        """Return the cost of forward passes only, as in an evaluation: the constants of `forward`, which were measured
        or priced by themselves, or, without it, `FORWARD_SHARES` of these.
        """
        if self.passes == "forward":
            return self
        shares = {name: value * self.forward_shares.get(name, 1.0) for name, value in self.constants().items()}
        constants = self.forward.constants() if self.forward else shares
        source = self.source and f"{self.source}; forward passes alone"  # "", no machine, stays ""
        states = self.states and self.states.forward_only()
        forward_states = self.forward and self.forward.states
        if self.states and forward_states:
            states = forward_states.for_partition(self.states.partition)
        return dataclasses.replace(self, **constants, source=source, passes="forward", forward=None, states=states)

    def with_pass_before(self, other: "Cost") -> "Cost":
        """Return the cost of micro-batches over which another model runs forward first, by its cost of forward passes;
        in evaluations it does too.
        """

        def add_to(cost: Cost) -> dict[str, Any]:
            """Return the sums of both costs' seconds and bytes."""
            sums = {name: value + getattr(other, name) for name, value in cost.constants().items()}
            return {name: value for name, value in sums.items() if not name.endswith("_per_second")}

        forward = self.forward_only()
        both = dataclasses.replace(forward, **add_to(forward))
        return both if self.passes == "forward" else dataclasses.replace(self, **add_to(self), forward=both)

    def under(self, cp_comm_type: str | Sequence[str], a2a_size: int = 1, *, heads: int | None = None) -> "Cost":
        """Return this cost for groups of a communication type, or of the type that most layers of a list have.
        `a2a_size` slots exchange heads under a2a+p2p (0: the best number), of `heads` query heads (None: as many as so
        far).
        """
        heads = self.heads if heads is None else heads
        return dataclasses.replace(
            self, cp_comm_type=most_common_type(cp_comm_type), a2a_size=a2a_size, heads=heads
        )

    @cached_property
    def ways(self) -> "tuple[Cost, ...]":
        """This cost under each type or size to choose from; if it leaves neither open, this cost alone. The planner
        takes the first of equals. Exchanges need the heads, and those of a2a+p2p a size that divides the heads and a
        host.
        """
        if not self.has_choice:
            return (self,)
        heads = self._known_heads
        types = ["a2a+p2p"]
        if self.cp_comm_type == "auto":
            types = ["a2a", "p2p", "all_gather"] if heads else ["p2p", "all_gather"]
        sizes = range(2, min(self.node_size, heads) + 1)
        fitting_sizes = [size for size in sizes if heads % size == 0 and self.node_size % size == 0]
        return (*map(self.under, types), *(self.under("a2a+p2p", size) for size in fitting_sizes))

    def ways_of(self, degree: ArrayLike) -> "list[Cost]":
        """Return the costs of `ways` without those of an a2a size above the highest of these degrees."""
        highest = np.max(degree, initial=1)
        return [way for way in self.ways if way.a2a_size <= highest]

    @property
    def _known_heads(self) -> int:
        return self.heads or (self.network.heads if self.network else 0)

    @property
    def has_choice(self) -> bool:
        """Whether the fastest type ("auto") or sizes (a2a+p2p without any) are chosen for each group by itself."""
        return self.cp_comm_type == "auto" or (self.cp_comm_type == "a2a+p2p" and not self.a2a_size)

    def allows(self, degree: ArrayLike) -> NDArray[np.bool_]:
        """Return whether degrees suit this type. Under a2a they must divide the heads (unknown: only degree 1 does),
        under a2a+p2p its size must divide them; any degree suits other types.
        """
        degree = np.asarray(degree, dtype=np.int64)
        heads = self._known_heads
        if self.cp_comm_type == "a2a":
            return (heads % np.maximum(degree, 1) == 0) if heads else degree == 1
        return degree % self.a2a_size == 0 if self.a2a_size > 1 else degree > 0

    def for_partition(self, partition: str) -> "Cost":
        """Return this cost for groups with this partition of their rows; only the price of states depends on it."""
        if self.states:
            return dataclasses.replace(self, states=self.states.for_partition(partition))
        return self

    def work_seconds(self, tokens: ArrayLike, squares: ArrayLike) -> Floats:
        """Return the seconds on one slot, without communication, of these sums of tokens and squared lengths."""
        # Kernels take 1 + h / piece times as long on pieces of squares / tokens rows: h · tokens more squares.
        half_speed_rows = self.network.half_speed_rows if self.network else 0.0
        row_seconds = self.linear_seconds + half_speed_rows * self.attention_seconds
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
        `tokens` and `squares` sum its documents' lengths and their squares (padding included), `documents`
        their number (which counts for states); `inside` is whether all its slots share a node, `together` the fewest on
        one node (None: all nodes but the last are full). Seconds are of linear layers, attention, states and messages.
        """
        tokens = _float_array(tokens)
        squares = _float_array(squares)
        degree = _float_array(degree)
        if together is None:  # a group that would fit a node, but is not inside one, has one slot on each
            on_last = np.where(degree % self.node_size, degree % self.node_size, self.node_size)
            together = np.where(inside, degree, np.where(degree > self.node_size, on_last, 1.0))
        if self.has_choice:
            least: Floats | float = np.inf
            for way in self.ways_of(degree):
                seconds = way.group_seconds(tokens, squares, degree, inside, documents, together=together)
                least = np.minimum(least, np.where(way.allows(degree), seconds, np.inf))
            return _float_array(least)
        rows = PricedRows(tokens, squares, degree, _float_array(together))
        if self.states:
            around = degree / head_exchange_size(self.cp_comm_type, self.a2a_size, degree)
            rows = rows._replace(busiest=attention_imbalance(self.states.partition, tokens, squares, around))
        computed, exposed = attention_and_message_seconds(self, rows)
        seconds = self.linear_seconds * tokens / degree + (computed + exposed)
        if self.states:
            speed = np.where(inside, self.inside_bytes_per_second, self.across_bytes_per_second)
            of_states = self.states.seconds((tokens, squares, _float_array(documents)), degree, speed)
            # These may have more axes than seconds of one degree, and are not added in place.
            seconds = seconds + of_states
        return seconds

    def lockstep_seconds(self, slowest: Sequence[float]) -> float:
        """Return the seconds in lockstep of micro-batches whose slowest slots work this long, without the update. Each
        of p stages takes 1 / p of a micro-batch, and fills and drains in (p − 1) / chunks turns of the longest one,
        which itself goes through all stages (1F1B, interleaved: Narayanan et al. 2021). Added is what of the update's
        copies (`paging_seconds`) does not hide behind the first forward pass. The sum is exact, so that every host gets
        the same.
        """
        turns = self.turn_seconds(slowest)
        longest = max(turns, default=0.0)
        bubble = (self.stages - 1) / self.chunks
        seconds = max((math.fsum(turns) + bubble * longest) / self.stages, longest)
        # of the first forward pass, beside the weights that come for it; there may be no micro-batch
        hiding_seconds = sum(turns[:1]) * FORWARD_SHARE / self.stages - self.streaming_seconds
        return seconds + max(0.0, self.paging_seconds - max(0.0, hiding_seconds))

    def turn_seconds(self, slowest: Sequence[float]) -> list[float]:
        """Return the seconds in lockstep of each micro-batch, in the whole model, whose slowest slots work this long:
        no less than the messages of sharded parameters, which run meanwhile, and than the host's launches. Neither its
        forward nor its backward pass is shorter than the copies from the host that it waits for.
        """
        shards = self.sharding_seconds
        launch = self.micro_batch_seconds
        turns = [max(max(seconds, shards) + launch, self.launch_seconds) for seconds in slowest]
        forward_copies = self.streaming_seconds
        if self.passes == "forward":
            return [max(turn, forward_copies) for turn in turns]
        # The first backward pass waits for weights; each later one also for earlier sums of gradients.
        backward_copies = chain([forward_copies], repeat(forward_copies + self.gradient_seconds))
        return [
            turn + (max(0.0, forward_copies - FORWARD_SHARE * turn) + max(0.0, copies - (1 - FORWARD_SHARE) * turn))
            for turn, copies in zip(turns, backward_copies, strict=False)
        ]

    def latency_seconds(self, degree: ArrayLike) -> Floats:
        """Return the seconds that a group of this degree waits for messages however few rows they carry, those of
        states included; under "auto" the lesser of a ring's and a gather's, which suit any number of heads.
        """
        degree = _float_array(degree)
        types = ("p2p", "all_gather") if self.cp_comm_type == "auto" else (self.cp_comm_type,)
        least = np.min([_message_latency_of_type(self, kind, degree) for kind in types], axis=0)
        return least + (self.states.step_seconds * (degree > 1) if self.states else 0.0)

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
        copies = home.dp_replicate
        width = home.slots // home.dp_replicate
        share_host = home.slots <= node_size
        inside = self.inside_bytes_per_second
        across = self.across_bytes_per_second
        # This is the speed of a replica.
        speed = inside if share_host or node_size % width == 0 else across
        gathered = weights * gather_bytes * (width - 1) / width / speed
        forward = self.forward_only()
        forward = dataclasses.replace(forward, closing_seconds=forward.micro_batch_seconds + gathered)
        if self.passes == "forward":
            return forward
        reduced = weights * reduce_bytes * (width - 1) / width / speed
        summed = weights / width * reduce_bytes * 2 * (copies - 1) / copies / (inside if share_host else across)
        closing = self.micro_batch_seconds + gathered + reduced + summed
        return dataclasses.replace(self, closing_seconds=closing, forward=forward)

    def shared_by(self, tp: int) -> "Cost":
        """Return the cost of a slot of `tp` tensor-parallel ranks: compute and bytes divide, latencies do not."""
        if check_count("tp", tp) == 1:
            return self
        return dataclasses.replace(
            self,
            **{name: getattr(self, name) / tp for name in _DIVIDED_BY_TP},
            states=self.states and self.states.shared_by(tp),
            network=self.network and self.network.shared_by(tp),
            forward=self.forward and self.forward.shared_by(tp),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the constants, the source, and all else that is not at its default, for `Cost.from_json`."""
        values = {name: value for name in _CHOICES if (value := getattr(self, name)) != getattr(Cost, name)}
        values |= {"states": dataclasses.asdict(self.states)} if self.states else {}
        for name in ("network", "forward"):
            if part := getattr(self, name):
                values[name] = part.to_json()
        return self.constants() | {"source": self.source or ""} | values

    @classmethod
    def from_json(cls, values: Any) -> "Cost":
        """Read a cost from a JSON object; constants left out keep their default. Raises PlanError for unknown ones."""
        try:
            fields: dict[str, Any] = {"source": "a file that does not name its machine"} | values
            if fields.get("states"):
                fields["states"] = StateCost(**fields["states"])
            readers: dict[str, Any] = {"forward": cls.from_json, "network": Network.from_json}
            return cls(**fields | {name: read(fields[name]) for name, read in readers.items() if fields.get(name)})
        except (TypeError, KeyError, AttributeError) as error:
            names = ", ".join(field.name for field in dataclasses.fields(cls))
            raise PlanError(
                f"a cost is an object with numbers for some of {names}; got {values!r}: {error}"
            ) from None


_CONSTANTS = tuple(f.name for f in dataclasses.fields(Cost) if f.type is float and f.name not in _CHOICES)
DEFAULT_COST = Cost()


def _float_array(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)


def constants_of_shape(
    shape: ModelShape,
    states: StateCost | None,
    *,
    tflops: float,
    attention_tflops: float,
    step_latency: float,
    bytes_per_value: int,
) -> dict[str, Any]:
    """Return the fields of a `Cost` that follow from a model's shape at these rates. A row takes 6 FLOPs for each
    weight, and a causal document of L rows 7 products (2 forward, 5 backward) of L² / 2 pairs in each layer, of 2
    FLOPs for each number of its queries. Under a window, gathered keys or a chunk a row has a number of pairs that does
    not grow with its document, so that they are linear seconds; a row sees half a chunk in the mean. Keys that bits
    mask have all pairs, entries of m rows 1 / m of them. An indexer's products are one for each pair of a row and what
    it scores, and 2 FLOPs of a row for each of its weights, forward alone. A ring sends keys and values forward and
    backward, and their gradients, and index keys or pools once; an exchange has queries, outputs, keys and values in
    both passes.
    """
    limited_flops = (
        shape.window_layers * 14 * shape.window + shape.chunk_layers * 7 * shape.chunk
    ) * shape.query_width
    flops = float((shape.full_layers * 7 + shape.forward_layers * 2) * shape.query_width)
    choice_flops = 0.0
    for choice, layers, indexers in shape.choosing:
        limited_rows = choice.row_pairs if choice.gathers else choice.window
        limited_flops += _GATHERED * layers * 14 * limited_rows * choice.width
        if choice.form == "entries" and not choice.gathers:
            flops += _GATHERED * layers * 7 * choice.width / choice.stride
        choice_flops += _GATHERED * indexers * choice.heads * choice.size / choice.scored
    limited_seconds = limited_flops / (attention_tflops * 1e12)
    row_flops = 6 * shape.weights + 2 * shape.forward_weights
    scan_seconds = states.scan_seconds if states else 0.0
    return {
        "linear_seconds": row_flops / (tflops * 1e12) + limited_seconds + scan_seconds,
        "real_row_seconds": 6 * shape.expert_weights / (tflops * 1e12),
        "attention_seconds": (flops + choice_flops) / (attention_tflops * 1e12),
        "choice_share": choice_flops / (flops + choice_flops) if choice_flops else 0.0,
        "ring_bytes": float(
            (shape.sending_layers * 3 * 2 * shape.key_width + shape.index_numbers) * bytes_per_value
        ),
        "exchange_bytes": float(
            shape.sending_layers * 2 * 2 * (shape.query_width + shape.key_width) * bytes_per_value
        ),
        "ring_step_seconds": (shape.sending_layers * 2 + sum(shape.choice_messages)) * step_latency,
        "states": states,
    }


class PricedRows(NamedTuple):
    """Groups to price, as arrays that broadcast: `tokens` and `squares` sum the documents' lengths and their squares;
    `together` is the fewest members that share a host, `busiest` what the busiest member of a ring computes over the
    mean, `typical` the length of a typical row's document (None: squares / tokens). A row sees `window` rows at most;
    members of a narrow group fetch only the share `sent` of what a ring sends.
    """

    tokens: Floats
    squares: Floats
    degree: Floats
    together: Floats
    busiest: Floats | float = 1.0
    typical: Floats | None = None
    window: float = np.inf
    sent: float = 1.0


def head_exchange_size(kind: str, a2a_size: int, degree: Floats) -> Floats:
    """Return how many members of a group of each degree exchange heads among themselves: all under a2a, the common
    divisor of degree and `a2a_size` under a2a+p2p, else 1. The other factor of the degree is a ring.
    """
    if kind == "a2a":
        return degree
    if kind == "a2a+p2p":
        return np.gcd(degree.astype(np.int64), a2a_size).astype(np.float64)  # so that their sets divide the group
    return np.ones_like(degree)


def kv_copies(heads: int, kv_heads: int, members: ArrayLike) -> Floats:
    """Return how often every key/value head is sent to members that exchange heads: `HeadSplit.kv_copies` for an array
    of `members`, which may also be numbers that do not divide the heads.
    """
    members = np.asarray(members, dtype=np.int64)
    member_heads = np.maximum(1, heads // members)
    runs = member_heads // np.gcd(max(1, heads // kv_heads), member_heads)
    return np.maximum(1.0, np.asarray(members * runs / kv_heads, dtype=np.float64))


def attention_and_message_seconds(cost: Cost, rows: PricedRows) -> tuple[Floats, Floats]:
    """Return two times of each slot of groups, in seconds: of kernels, and of the messages that these do not hide.

    Kernels take attention_seconds · squares / degree, times `busiest`, and on measured links 1 + h / piece times that,
    h being half_speed_rows. A ring of r members cuts the typical document into pieces of 1 / r of its rows. In a gather
    a member's queries meet all keys, which counts as a piece of 1 / √r. Under a window no piece is longer than a causal
    document whose rows see as many keys. A ring adds each step to the output, in `merge_seconds` a row. A gather orders
    all rows by document, in `copy_seconds` a row; under a narrow window a member orders its own rows and those that it
    fetched.
    """
    around = rows.degree / head_exchange_size(cost.cp_comm_type, cost.a2a_size, rows.degree)  # members of a ring
    computed = cost.attention_seconds * rows.squares / rows.degree * rows.busiest
    typical = rows.squares / np.maximum(rows.tokens, 1) if rows.typical is None else rows.typical
    if cost.network:
        piece = typical / (np.sqrt(rows.degree) if cost.cp_comm_type == "all_gather" else around)
        computed = computed * (1 + cost.network.half_speed_rows / np.clip(piece, 1, 2 * rows.window))
    if cost.cp_comm_type == "all_gather":
        copies = 1 + PACKED_COPIES * (1 - np.minimum(typical / np.maximum(rows.tokens, 1), 1))
        computed = computed + cost.copy_seconds * copies * rows.tokens * (rows.degree > 1)
    elif rows.sent < 1:
        fetched = rows.sent * (around - 1) * rows.tokens
        computed = computed + cost.copy_seconds * (rows.tokens + fetched) / rows.degree * (around > 1)
    else:
        computed = computed + cost.merge_seconds * rows.tokens / rows.degree * (around - 1)
    if not (rows.degree > 1).any():  # groups of one slot send nothing
        return computed, np.zeros_like(computed)
    exposed = _exposed_seconds_on_network if cost.network else _exposed_seconds_on_ideal_links
    return computed, exposed(cost, rows, around, computed) + _message_latency_of_type(
        cost, cost.cp_comm_type, rows.degree
    )


def _message_latency_of_type(cost: Cost, kind: str, degree: Floats) -> Floats:
    """Without the messages of state-space layers. A ring of r members has r − 1 steps, a gather one, and an exchange
    of heads one more. On ideal links each takes `ring_step_seconds`. On measured links each is several messages
    of `step_seconds` in every layer: a step's block goes round in both passes, and its gradients in backward; an
    exchange goes there and back."""
    exchanging = head_exchange_size(kind, cost.a2a_size, degree)
    swaps = (exchanging > 1).astype(np.float64)
    steps: Floats = np.minimum(degree - 1, 1.0) if kind == "all_gather" else degree / exchanging - 1
    if cost.network is None:
        return cost.ring_step_seconds * (steps + swaps)
    forward = cost.passes == "forward"
    messages = cost.network.layers * (steps + 2 * swaps if forward else 3 * steps + 4 * swaps)
    of_choices = cost.network.forward_messages + (0.0 if forward else cost.network.backward_messages)
    return cost.network.step_seconds * (messages + of_choices * (degree > 1))


def _exposed_seconds_on_ideal_links(cost: Cost, rows: PricedRows, around: Floats, computed: Floats) -> Floats:
    """A slot sends its share of `ring_bytes` r − 1 times in t seconds. Of a ring of r members max(0, t − computed)
    is exposed, of a gather all of t. Exchanges of heads are exposed as a whole; those inside a host take place
    beside those between hosts."""
    degree = rows.degree
    kind = cost.cp_comm_type
    speed = np.where(rows.together >= degree, cost.inside_bytes_per_second, cost.across_bytes_per_second)
    turn = cost.ring_bytes * rows.tokens * (around - 1) / degree / speed
    exposed = turn if kind == "all_gather" else np.maximum(turn - computed, 0.0)
    exchanging = degree / around
    if "a2a" in kind:
        # Of a2a+p2p exchanges stay inside a host. Of a2a those between hosts take place beside those inside.
        together = rows.together if kind == "a2a" else degree
        near = np.minimum(exchanging, together) - 1
        far = np.maximum(exchanging - together, 0)
        sent = cost.exchange_bytes * rows.tokens / degree / exchanging
        exposed = exposed + sent * np.maximum(
            near / cost.inside_bytes_per_second, far / cost.across_bytes_per_second
        )
    return exposed


def _exposed_seconds_on_network(cost: Cost, rows: PricedRows, around: Floats, computed: Floats) -> Floats:
    """`block` is the bytes of a member's keys and values in a layer, `gradients` those of a block's gradients,
    `queries` those of its queries (outputs are as many), `keys` and `back` those of keys and values that it
    exchanges with all copies, forward and in backward: gradients of the copies of a head are summed, and travel
    in the dtype of sums. Members of a narrow ring fetch before the kernels, and send gradients after them. Of
    large exchanges and gathers, which go in two slices of heads, half is exposed, and what of the other half is
    longer than the kernels of a slice."""
    network = cost.network
    kind = cost.cp_comm_type
    assert network is not None
    degree = rows.degree
    together = rows.together
    both = cost.passes != "forward"
    exchanges_heads = "a2a" in kind
    member_rows = rows.tokens / degree / network.layers  # bytes of a cost are of all layers
    ring_bytes = cost.ring_bytes * rows.sent
    block = ring_bytes * member_rows * (network.block_share if both else 1.0)
    gradients = ring_bytes * member_rows * network.gradient_share
    exchanging = degree / around
    copies: Floats | float = 1.0
    # Only exchanges of heads send these; else the numbers have no meaning.
    queries = keys = back = block
    if exchanges_heads:
        copies = kv_copies(network.heads, network.kv_heads, exchanging)
        exchanged = cost.exchange_bytes * member_rows / (2 if both else 1)
        queries = (1 - network.key_share) / 2 * exchanged
        keys = network.key_share * exchanged * copies
        back = keys * np.where(copies > 1, network.gradient_share / network.block_share, 1.0)
    seconds = 0.0 * computed
    directions = (True, False) if both else (True,)
    for forward in directions:
        share = 1.0
        if both:
            share = FORWARD_OF_ATTENTION if forward else 1 - FORWARD_OF_ATTENTION
        kernels = share * computed / network.layers
        # Between hosts a gather's bytes come through all slots of a host together.
        if kind == "all_gather":
            received = block * (degree - 1)
            near = network.inside.gather.seconds(received)
            far = network.across.gather.seconds(received / together)
            messages = [np.where(together >= degree, near, np.maximum(near, far))]
            messages += [] if forward else [network.exchange_seconds(gradients, degree, together)]
            seconds = seconds + _exposed_seconds(messages, kernels, block * degree >= GATHER_SLICE_BYTES)
            continue
        # Members of a2a have no ring.
        if kind != "a2a":
            sizes = [block * copies] if forward else [block * copies, gradients * copies]
            inside = together >= degree
            if rows.sent < 1:
                seconds = seconds + sum(network.point_seconds((around - 1) * size, inside) for size in sizes)
            else:
                travels = sum((around - 1) * network.point_seconds(size, inside) for size in sizes)
                seconds = seconds + np.maximum(travels - kernels * (1 - 1 / around), 0.0)
        if exchanges_heads:
            leaves, returns = (queries + keys, queries) if forward else (queries, queries + back)
            messages = [
                network.exchange_seconds(size / exchanging, exchanging, together) for size in (leaves, returns)
            ]
            seconds = seconds + _exposed_seconds(
                messages, kernels, queries >= EXCHANGE_SLICES * EXCHANGE_SLICE_BYTES
            )
    return network.layers * seconds


def _exposed_seconds(messages: Sequence[Floats], kernels: Floats, sliced: NDArray[np.bool_]) -> Floats:
    """Each message takes so many seconds by itself. Where they are `sliced`, the second half of each goes on beside
    a half of the kernels."""
    first, *others = (np.where(sliced, np.maximum(sent / 2, sent - kernels / 2), sent) for sent in messages)
    return sum(others, first)
