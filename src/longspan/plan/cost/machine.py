"""Machine: what a device and its network sustain, as one value; the only place where prices of a machine stand.

`Machine.cost` makes the `Cost` of a model on it, `Machine.attention_seconds` the price of one call of attention under
every communication type, by which "auto" is resolved. `longspan bench calibrate` measures a machine and writes it to
a file; `Machine.known` holds figures of GPUs that were measured here, or follow from data sheets.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from longspan.errors import PlanError
from longspan.plan.cost.cost import Cost
from longspan.plan.cost.cost_changes import (
    CostSettings,
    recomputation_share,
    resolve_compiled_parts,
    with_recomputation,
)
from longspan.plan.cost.links import LEVELS, Level, Link, Network
from longspan.plan.cost.machine_figures import KNOWN, MachineFigures
from longspan.plan.cost.model_flops import price_model
from longspan.plan.cost.shared_weights import SharedWeights
from longspan.plan.cost.type_price import AttentionCall, TypePrice, describe_group, price_type, ring_share, type_ways
from longspan.plan.micro_batch import Group
from longspan.plan.shape.model_shape import ModelShape

# Passes over memory of a layer that runs forward twice, over those of forward and backward together (predictions.md).
RECOMPUTED_PASSES = 0.75
FORWARD_PASSES = 1 / 6  # the same of a forward pass alone, which keeps nothing (evaluations-2xH100.md)


class _RowSeconds(NamedTuple):
    """Seconds of a row besides the products of its weights, without recomputation.

    `layer_passes` and `logit_passes` are passes over memory, `unused_head` forward's products of logits of rows that
    predict nothing. `saved` is what float8 saves for each FLOP: of a weight's 6 not for the 2 of its own gradient.
    """

    layer_passes: float
    logit_passes: float
    unused_head: float
    saved: float


@dataclass(frozen=True, kw_only=True)
class Machine(MachineFigures):
    """What one device sustains, and the links between slots: its figures, and what follows from them.

    The defaults are H200s as they were measured; `MachineFigures` says what each figure is.

    >>> machine = Machine.known("H200").with_link("across", bytes_per_second=2.65e9)
    >>> call = AttentionCall(heads=32, kv_heads=8, head_dim=128)
    >>> prices = machine.attention_seconds(Group(tuple(range(8)), (0,), (131072,)), call, node_size=4)
    >>> min(prices, key=lambda kind: prices[kind].seconds)
    'a2a'
    """

    @classmethod
    def known(cls, name: str) -> "Machine":
        """Return the machine of a GPU by name: "H200" as measured, "A100-40", "A100-80", "H100", "B200" by data sheet.

        >>> Machine.known("h100").assumed
        True

        Raises PlanError for another name.
        """
        for known, scale in KNOWN.items():
            if known.lower() == name.lower():
                return cls() if scale is None else cls().scale_figures(known, *scale)
        raise PlanError(
            f"no figures of {name!r}; known are {', '.join(KNOWN)}, or measure with longspan bench calibrate"
        )

    def with_link(
        self, level: Level, *, bytes_per_second: float, seconds: float | None = None, network: str = ""
    ) -> "Machine":
        """Return this machine with another link "inside" a host or "across" hosts; bytes a second are those of a slot.

        `seconds` is the latency of a message (None: that of the link so far). `network`, read of an across link only,
        is "card", one for each slot, or "sockets", over which kinds of messages differ in speed
        (`links.SOCKET_SPEEDS`); "": sockets below 10 GB/s.
        """
        if level not in LEVELS:
            raise PlanError(f"level of a link is {level!r}; use one of {', '.join(LEVELS)}")
        present: Link = getattr(self, level)
        latency = present.point.latency if seconds is None else seconds
        inside = level == "inside"
        link = Link.of(latency, bytes_per_second) if inside else Link.host_link(latency, bytes_per_second, network)
        return dataclasses.replace(self, **{level: link})

    def cost(self, model: Any, settings: CostSettings | None = None) -> Cost:
        """Return the cost of a model on this machine; `model` is a transformers configuration, its file or its folder.

        Products and messages follow from the model's shape. Passes over memory, FSDP2, rows that travel to experts, the
        optimizer and recomputation are added as the settings say; logits that no row needs, and what float8 saves, are
        taken off. Raises PlanError for a model that its configuration does not price.
        """
        settings = settings or CostSettings()
        shape = ModelShape.of(model, depths=settings.depths)
        cost, row = self._shape_cost(shape, settings.bytes_per_number), self._row_seconds(shape, settings)
        kind, count = settings.recomputation, settings.recomputed_layers
        cost = dataclasses.replace(cost, forward=self._forward_cost(cost, row, shape, settings))
        cost = with_recomputation(cost, model, kind, count, frozen=settings.frozen, depths=settings.depths)
        share = recomputation_share(shape, kind, count)
        layer_passes = (1 + RECOMPUTED_PASSES * share) * row.layer_passes
        unused_head = (2 if settings.frozen else 3) * row.unused_head  # forward, gradients of rows, and of weights
        # In float8 are forward's 2 FLOPs of each weight, backward's 2 for gradients of rows, and 2 of recomputation.
        saved = row.saved * (4 + 2 * share * shape.recomputed_weights / max(1, shape.weights))
        cost = dataclasses.replace(
            cost,
            linear_seconds=cost.linear_seconds + layer_passes + row.logit_passes - unused_head - saved,
            real_row_seconds=max(0.0, cost.real_row_seconds - saved * _expert_share(shape))
            + self._head_seconds(shape, settings),
        )
        shared_weights = SharedWeights(self, shape, settings)
        cost = shared_weights.add_messages(cost, recomputed_share=share)
        cost = dataclasses.replace(cost, update_seconds=shared_weights.update_seconds()).shared_by(settings.tp)
        return cost.forward_only() if settings.forward else cost

    def _row_seconds(self, shape: ModelShape, settings: CostSettings) -> _RowSeconds:
        """Return what a row takes besides the products of its weights, without recomputation."""
        tp = max(settings.tp, settings.weight_ranks)  # runs set only weight_ranks, to their tp
        compiled = resolve_compiled_parts(settings.compiled, hidden=shape.hidden, tp=tp) == "layers"
        pass_seconds = self.layer_pass_seconds * (self.compiled_share if compiled else 1.0)
        return _RowSeconds(
            # Half of a layer's passes are attention's, half an MLP's; those of experts are in the rate of experts.
            layer_passes=(shape.layers + shape.dense_layers) / 2 * shape.hidden * pass_seconds,
            logit_passes=settings.target_share * shape.logits * self.logit_pass_seconds,
            unused_head=(1 - settings.target_share) * 2 * shape.hidden * shape.logits / self.product_flops_per_second,
            saved=self._float8_seconds(shape) if settings.float8 else 0.0,
        )

    def _forward_cost(self, cost: Cost, row: _RowSeconds, shape: ModelShape, settings: CostSettings) -> Cost:
        """Return the cost of forward passes without backward, which recompute nothing.

        `forward_only` takes a third of both passes, so 6 FLOPs a weight are in float8 here, 2 of which are forward's.
        Such passes are short, so that what the host takes to launch them counts, in place of a micro-batch's seconds.
        """
        row_seconds = cost.linear_seconds + 3 * FORWARD_PASSES * row.layer_passes + row.logit_passes
        row_seconds -= 3 * row.unused_head
        saved = 3 * 2 * row.saved
        real_row_seconds = max(0.0, cost.real_row_seconds - saved * _expert_share(shape))
        real_row_seconds += self._head_seconds(shape, dataclasses.replace(settings, frozen=False))
        forward = dataclasses.replace(cost, linear_seconds=row_seconds - saved, real_row_seconds=real_row_seconds)
        forward = dataclasses.replace(forward, micro_batch_seconds=0.0)
        return dataclasses.replace(
            SharedWeights(self, shape, settings).add_messages(forward.forward_only()),
            launch_seconds=shape.decoder_layers * self.layer_launch_seconds,
            update_seconds=self.update_seconds,
        )

    def _head_seconds(self, shape: ModelShape, settings: CostSettings) -> float:
        """Return the seconds of a row's logits and loss, which only rows that predict a token have."""
        products = (4 if settings.frozen else 6) * shape.hidden * shape.logits / self.product_flops_per_second
        return settings.target_share * (products + shape.logits * self.logit_pass_seconds)

    def _float8_seconds(self, shape: ModelShape) -> float:
        """Return the seconds that float8 saves a row for each FLOP of all weights of the layers; the head has none."""
        return _layer_weights(shape) * (1 / self.product_flops_per_second - 1 / self.float8_flops_per_second)

    def _shape_cost(self, shape: ModelShape, bytes_per_number: int) -> Cost:
        """Return the cost of a model of this shape, without what settings change.

        Experts run at another rate than dense products, so their weights get the difference. `turns` are the bytes that
        a ring moves of a number of a key or value: twice itself, and its gradient, in float32 at least.
        """
        constants = price_model(
            shape,
            tflops=self.product_flops_per_second / 1e12,
            attention_tflops=self.attention_flops_per_second / 1e12,
            scan_tflops=self.scan_flops_per_second / 1e12,
            summary_tflops=self.summary_flops_per_second / 1e12,
            channel_seconds=self.channel_seconds,
            ring_step_latency=self.ring_wait_seconds,
            bytes_per_value=bytes_per_number,
        )
        expert_extra = 1 / self.expert_flops_per_second - 1 / self.product_flops_per_second
        for name in ("linear_seconds", "real_row_seconds"):
            constants[name] += 6 * shape.expert_weights * expert_extra
        network = None
        if shape.layers:  # that attend: a model of state-space layers only needs no network
            turns = 2 * bytes_per_number + max(4, bytes_per_number)
            constants["ring_bytes"] = float(shape.layers * 2 * shape.key_width * turns)
            network = self._model_network(
                layers=shape.layers,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                key_share=shape.key_width / (shape.query_width + shape.key_width),
                block_share=bytes_per_number / turns,
            )
        return Cost(
            **constants,
            inside_bytes_per_second=self.inside.point.bytes_per_second,
            across_bytes_per_second=self.across.point.bytes_per_second,
            merge_seconds=shape.layers * self._pass_seconds(self.merge_passes, shape.query_width),
            copy_seconds=shape.layers * self._pass_seconds(self.gather_passes, 2 * shape.key_width),
            micro_batch_seconds=self.micro_batch_seconds,
            node_size=self.node_size,
            source=self.source,
            network=network,
        )

    def _pass_seconds(self, passes: float, width: float) -> float:
        """Return the seconds of so many passes over a row of this width, in float32."""
        return passes * width * 4 / self.memory_bytes_per_second

    def _model_network(self, **model: Any) -> Network:
        """Return this machine's links as a model's attention uses them; `model` are the model's fields of `Network`."""
        return Network(
            inside=self.inside,
            across=self.across,
            half_speed_rows=self.half_speed_rows,
            step_seconds=self.step_seconds,
            **model,
        )

    def attention_seconds(
        self, group: Group, call: AttentionCall, *, node_size: int | None = None
    ) -> dict[str, TypePrice]:
        """Return the price of one layer's call for a group under all four types, whatever the group's own is.

        Hosts have `node_size` slots (None: the machine's). Of a2a+p2p the group's sizes count, or the fastest pair.
        """
        prices: dict[str, TypePrice] = {}
        for price in self._type_prices(group, call, node_size or self.node_size):
            kind = price.cp_comm_type
            if kind not in prices or price.seconds < prices[kind].seconds:
                prices[kind] = price
        return prices

    def fastest_type(self, group: Group, call: AttentionCall, *, node_size: int | None = None) -> TypePrice:
        """Return the price of the type that takes least time, which "auto" stands for.

        There always is one: p2p takes any heads.
        """
        if group.degree == 1:
            return TypePrice("p2p", (1, 1), 0.0, 0.0, {"inside": 0.0, "across": 0.0})
        return min(self._type_prices(group, call, node_size or self.node_size), key=lambda price: price.seconds)

    def explain_type(self, group: Group, call: AttentionCall, *, node_size: int | None = None) -> tuple[str, ...]:
        """Explain why `fastest_type` is chosen: a line of the group, one for each type and levels, and the choice."""
        if group.degree == 1:
            return ("one member holds all rows: nothing is communicated",)
        node_size = node_size or self.node_size
        prices = sorted(self._type_prices(group, call, node_size), key=lambda price: bool(price.impossible))
        best = min(prices, key=lambda price: price.seconds)
        choice = f"{best.name} is chosen: it is the fastest"
        return (describe_group(group, call, node_size), *map(str, prices), choice)

    def _type_prices(self, group: Group, call: AttentionCall, node_size: int) -> list[TypePrice]:
        """Return the prices of a call under all types, of a2a+p2p for each pair of sizes that the group may have."""
        nodes, cost = [slot // node_size for slot in group.slots], self._call_cost(call)
        ways = type_ways(group)
        return [price_type(cost, way, group, call, nodes, sent=ring_share(call, way, group)) for way in ways]

    def _call_cost(self, call: AttentionCall) -> Cost:
        """Return the cost of one layer of nothing but this call.

        `pair` are forward's seconds for a query and a key: two products of the half of all pairs that a causal mask
        shows; backward has 5. `turns` are as in `_shape_cost`. `keys` are the numbers of a row's keys and values,
        `queries` those of its queries and outputs.
        """
        has_both, number = call.passes == "both", call.bytes_per_number
        keys, queries = call.kv_heads * call.width, call.heads * call.width
        turns = 2 * number + max(4, number)
        pair, share = 2 * queries / self.attention_flops_per_second / 2, 1.0 if has_both else 2 / 7
        return Cost(
            linear_seconds=0.0,
            attention_seconds=pair * (3.5 if has_both else 1.0),
            ring_bytes=float(keys * (turns if has_both else number)),
            exchange_bytes=float((2 if has_both else 1) * number * (queries + keys)),
            merge_seconds=share * self._pass_seconds(self.merge_passes, queries / 2),  # an output: half of both
            copy_seconds=share * self._pass_seconds(self.gather_passes, keys),
            ring_step_seconds=0.0,
            micro_batch_seconds=0.0,
            source="one layer",
            passes="forward and backward" if has_both else "forward",
            network=self._model_network(
                layers=1,
                heads=call.heads,
                kv_heads=call.kv_heads,
                key_share=keys / (queries + keys),
                block_share=number / turns,
            ),
        )


def _layer_weights(shape: ModelShape) -> int:
    """Return the weights that multiply a row in the layers, without the output head."""
    return shape.weights - shape.hidden * shape.logits


def _expert_share(shape: ModelShape) -> float:
    """Return the share of experts in the weights of the layers."""
    return shape.expert_weights / max(1, _layer_weights(shape))


def is_known(name: str) -> bool:
    """Return whether `Machine.known` has figures of this name."""
    return name.lower() in (known.lower() for known in KNOWN)


def find_device(device: str) -> Machine | None:
    """Find the known machine of a device's full name, or None; a GH200 is no H200, and may have an H100's memory.

    >>> known = find_device("NVIDIA A100-SXM4-80GB")
    >>> known and known.device
    'A100-80'
    """
    names = (name for name in KNOWN if "GH200" not in device and all(part in device for part in name.split("-")))
    return next(map(Machine.known, names), None)
