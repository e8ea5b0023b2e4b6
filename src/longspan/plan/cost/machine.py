"""Machine: what a device and its network sustain; the only place where prices of a machine stand.

`Machine.cost` makes the `Cost` of a model on it, by the settings of a run; `Machine.attention_prices` prices one call
of attention under every communication type, by which "auto" is resolved.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from longspan.errors import ConfigError, LongspanError, PlanError
from longspan.files import read_json
from longspan.plan.check import check_choice, check_count, check_number
from longspan.plan.cost.cost import Cost, StateCost, constants_of_shape
from longspan.plan.cost.links import INSIDE_SPEEDS, LEVELS, SLOWEST_CARD, SOCKET_SPEEDS, Level, Link, Network
from longspan.plan.cost.type_prices import AttentionCall, TypePrice, price_type
from longspan.plan.form import Compiled, Form, Recomputation
from longspan.plan.micro_batch import Group
from longspan.plan.shape.model_shape import ModelShape, has_name, peak_tflops
from longspan.plan.shape.packed import PackedWeights, packed_weights_of_model

# The version is that of the file.
VERSION = 2


class DataSheet(NamedTuple):
    """A GPU by its data sheet: TB/s and GiB of its memory (what ECC takes is left out), bytes/s of messages inside a
    host and across, and to the host's memory each way, and the GPUs of a host. PEAK_TFLOPS has its products.
    """

    memory_speed: float
    gib: int
    inside: float
    across: float
    host: float = 55e9
    node_size: int = 8


# Sources: NVIDIA's data sheets of A100, H100, HGX B200 and B300, GH200, L40S, L4, A10 and RTX A6000, and its papers on
# the architectures of GA102 (RTX 3090), Ada (RTX 4090) and RTX Blackwell; GiB of B200, B300, L40S, L4, A10 and the
# A6000 are those that devices report. Of speeds we take what H200s reach: two fifths of NVLink or PCIe each way inside
# a host, four fifths of a network card (200 Gb/s for an A100,
# 400, 800 for a B300, 100 where GPUs are on PCIe), and seven eighths of the bus to the host (PCIe 5, 64 GB/s each way,
# where none is named). None is measured but H200s.
KNOWN: dict[str, DataSheet | None] = {
    "H200": None,
    "A100-40": DataSheet(1.555, 40, 120e9, 20e9),
    "A100-80": DataSheet(2.039, 80, 120e9, 20e9),
    "H100": DataSheet(3.35, 80, 180e9, 40e9),
    "B200": DataSheet(8.0, 180, 360e9, 40e9),
    "B300": DataSheet(8.0, 268, 360e9, 80e9),  # 288 GB
    "GH200": DataSheet(4.0, 96, 180e9, 40e9, host=390e9, node_size=1),  # 96 GB; NVLink-C2C to its host, 450 GB/s
    "L40S": DataSheet(0.864, 45, 12.8e9, 10e9, host=27.5e9),  # 48 GB; PCIe 4, 32 GB/s each way
    "L4": DataSheet(0.300, 22, 12.8e9, 10e9, host=27.5e9),  # 24 GB; PCIe 4
    "A10": DataSheet(0.600, 22, 12.8e9, 10e9, host=27.5e9),  # 24 GB; PCIe 4
    "RTX-A6000": DataSheet(0.768, 47, 12.8e9, 10e9, host=27.5e9),  # 48 GB; PCIe 4, without bridges
    "RTX-3090": DataSheet(0.936, 24, 12.8e9, 10e9, host=27.5e9),  # PCIe 4, without bridges
    "RTX-4090": DataSheet(1.008, 24, 12.8e9, 10e9, host=27.5e9),  # PCIe 4
    "RTX-5090": DataSheet(1.792, 32, 25.6e9, 10e9),
    "RTX-PRO-6000": DataSheet(1.792, 96, 25.6e9, 10e9),  # Blackwell
}
WITHOUT_BFLOAT16 = ("T4", "V100", "RTX-2080-Ti")  # GPUs before Ampere
# Bytes of memory that layers read and write besides their products, of H200s (bench/records/predictions.md):
LAYER_BYTES = 520  # norms, gates, sums, for each row and number of its width
# Both connections of a layer of several streams, for each row and number of these, as its operators read and write.
STREAM_BYTES = 450
COMPILED_SHARE = 0.73
# The loss reads and writes these for each row and logit.
LOGIT_BYTES = 34
MERGE_BYTES = 44  # a ring's step adds to its output, for each row and number
GATHER_BYTES = 32  # a gather lays out rows
CHANNEL_BYTES = 160  # a state-space layer's convolution, norms and gates, for each row and channel
WEIGHT_COPY_BYTES = 2.2  # FSDP2's copies of a weight
# The optimizer reads and writes these for each weight.
UPDATE_BYTES = 11.2
# Bytes/s of copies from and to the host at once, over those of one way (an H200's bus, in GB/s).
BOTH_WAYS = 102 / 55
# Weights that come, sums that come and sums that go, one after another, over weights that come while others go.
ONE_AT_A_TIME = 3 * BOTH_WAYS / 2
# Numbers that an adapter reads and writes for each input and output of its linear. Forward the input is read, and the
# output written, read beside the linear's, and their sum written; backward its gradient is scaled and read by two
# products, the input is read, and its two gradients are added. Then (1 + 4) / 2 and (5 + 4) / 2 in the mean.
FORWARD_ADAPTER_PASSES = 2.5
ADAPTER_PASSES = FORWARD_ADAPTER_PASSES + 4.5
# Packed weights are taken to be unpacked at this share of the speed of memory (not measured).
UNPACKING_SHARE = 0.6
# Rates over that of dense products in bfloat16: float8 with its conversions, scans of state-space layers, and their
# passes that make a run's states for others.
FLOAT8_SPEED = 1350 / 700
SCAN_SPEED = 60 / 700
SUMMARY_SPEED = 100 / 700
# This share of FSDP2's messages in a micro-batch shows.
SHARDING_SHARE = 0.47
# Of a layer's launches, those that FSDP2 adds in every micro-batch (many-micro-batches-2xH100.md), also on one slot,
# and what is left of them where no attention crosses hosts (many-micro-batches-H200.md).
SHARDED_LAUNCHES = 0.3
SHARDED_LAUNCHES_OF_ONE = 0.6
REPLAYED_LAUNCHES = 0.54
# A forward pass alone, of a layer's launches: fitted to evaluations (bench/records/predictions.md); counted launches of
# an uncompiled layer are 0.27 of a step that recomputes it, 0.35 of another (docs/planning.md).
FORWARD_LAUNCHES = 0.26
RECOMPUTED_PASSES = 0.75  # passes over memory of a layer that runs forward twice, over those of both passes
FORWARD_PASSES = 1 / 6  # the same of a forward pass alone, which keeps nothing (evaluations-2xH100.md)
# Features from which "auto" compiles: at 1,024 a layer's kernels take less than the host, and compiled layers are no
# faster (bench/records/first-steps-2xH200.md).
_COMPILED_WIDTH = 2048


def resolve_compiled_parts(word: Compiled, *, hidden: int, tp: int) -> Compiled:
    """Return what of layers is compiled on GPUs under this word: "auto" is "layers" for layers of at least a certain
    width without tensor parallelism, else "none".
    """
    if word == "auto":
        return "layers" if tp == 1 and hidden >= _COMPILED_WIDTH else "none"
    return word


@dataclass(frozen=True, kw_only=True)
class CostSettings(Form):
    """What of a run changes the time of a model: the second argument of `Machine.cost`.

    A form, whose layers recompute as `recomputation` says, and besides: whether a step `trains_all` weights, or an
    adapter over frozen ones, on linears whose inputs and outputs are `adapted_widths` in all layers together;
    `bytes_per_number` of rows and weights, `tp` ranks of a slot, `ep` slots that share
    experts, and only `forward` passes. FSDP2 shards weights over `shards` slots (0: every slot has all of them, without
    FSDP2), in `dp_replicate` copies, gathers them for every micro-batch's forward pass and again for its backward pass,
    and sums gradients; what the form keeps whole it gathers or sums once a step. `weight_ranks` of a slot share its
    weights (0: those of tp). In `free` mode both are once, and a micro-batch of padding more. Only the `target_share`
    of the rows predict a token: others have no logits. In float8 layers multiply but for gradients of weights. Of a
    rank's bytes on the host `streamed_bytes` of weights come for each pass, and `paged_bytes` come for an update,
    behind the next forward pass, while no more go.
    """

    trains_all: bool = True
    adapted_widths: float = 0.0
    bytes_per_number: int = 2
    tp: int = 1
    ep: int = 1
    shards: int = 0
    free: bool = False
    weight_ranks: int = 0
    dp_replicate: int = 1
    target_share: float = 1.0
    forward: bool = False
    streamed_bytes: float = 0.0
    paged_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one device, its host and the links between slots sustain; the defaults are H200s as they were measured.

    >>> machine = Machine.known("H200").with_link("across", bytes_per_second=2.65e9)
    >>> call = AttentionCall(heads=32, kv_heads=8, head_dim=128)
    >>> prices = machine.attention_prices(Group(tuple(range(8)), (0,), (131072,)), call, node_size=4)
    >>> min(prices, key=lambda kind: prices[kind].seconds)
    'a2a'

    `product_flops_per_second`: of products with weights; `expert_flops_per_second`: of those of experts, with the moves
    of rows to them. `attention_flops_per_second`: of a kernel on long pieces; on pieces
    of `half_speed_rows` it reaches half. All else that a device computes goes
    by `memory_bytes_per_second`. `step_seconds` is what a batch of messages takes with the launches around it, however
    well it hides; `micro_batch_seconds` what a micro-batch adds, and the end of a step.

    The host launches one layer, forward and backward, in `layer_seconds`, and `group_seconds` more for each group that
    a slot is in, `document_seconds` for each of their documents (bench/records/many-micro-batches-2xH100.md).
    A device holds `memory_bytes` (0: not known), and copies to its host's memory and back at
    `host_copy_bytes_per_second` each way. `inside` and `across` are the links of hosts of `node_size` slots.

    `assumed`: figures of a data sheet; `assumed_parts` are those that a measured machine took from another. `world` is
    the number of ranks that were measured, `date` the day.
    """

    device: str = "H200"
    product_flops_per_second: float = 700e12
    expert_flops_per_second: float = 315e12
    attention_flops_per_second: float = 618e12
    half_speed_rows: float = 1070.0
    memory_bytes_per_second: float = 4e12
    step_seconds: float = 40e-6
    micro_batch_seconds: float = 5e-3
    layer_seconds: float = 8e-3
    group_seconds: float = 0.4e-3
    document_seconds: float = 10e-6
    host_copy_bytes_per_second: float = 55e9
    memory_bytes: int = 143771 << 20
    inside: Link = field(default_factory=lambda: Link.of(0.0, 180e9, INSIDE_SPEEDS))
    across: Link = field(default_factory=lambda: Link.of(50e-6, 40e9))
    node_size: int = 8
    assumed: bool = False
    assumed_parts: tuple[str, ...] = ()
    source: str = "the model on H200s"
    world: int = 0
    date: str = ""

    def __post_init__(self) -> None:
        check_count("node_size of a machine", self.node_size)
        check_count("memory_bytes of a machine", self.memory_bytes, least=0)
        for name, value in self.float_fields().items():
            check_number(f"{name} of a machine", value, above_zero=name.endswith("_per_second"))

    def float_fields(self) -> dict[str, float]:
        """Return the figures that are numbers of seconds, bytes or speeds, by name: all but counts, links and texts."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type is float}

    @classmethod
    def known(cls, name: str) -> "Machine":
        """Return the machine of a GPU by name: "H200" as measured, the others of KNOWN by data sheet.

        >>> Machine.known("h100").assumed, Machine.known("rtx4090").memory_bytes >> 30
        (True, 24)

        Raises PlanError for another name.
        """
        known = find_known_name(name)
        if old := find_known_name(name, WITHOUT_BFLOAT16):
            raise PlanError(f"a {old} has no products in bfloat16, in which runs on GPUs compute")
        if known is None:
            raise PlanError(
                f"no figures of {name!r}; known are {', '.join(KNOWN)}, or measure with longspan bench calibrate"
            )
        usual = cls()
        sheet = KNOWN[known]
        if sheet is None:
            return usual
        products = (peak_tflops(known, "bfloat16") or 0.0) / (peak_tflops("H200", "bfloat16") or 1.0)
        return replace(
            scale_product_speeds(usual, products),
            device=known,
            memory_bytes_per_second=usual.memory_bytes_per_second * (sheet.memory_speed / 4.8),
            host_copy_bytes_per_second=sheet.host,
            memory_bytes=sheet.gib << 30,
            inside=Link.of(0.0, sheet.inside, INSIDE_SPEEDS),
            across=Link.of(50e-6, sheet.across),
            node_size=sheet.node_size,
            assumed=True,
            source=f"the model on {known}s, by data sheet",
        )

    @classmethod
    def cpus(cls) -> "Machine":
        """Make the machine of CPUs with gloo, by orders of magnitude: none is measured, they only rank plans."""
        rate = 0.02e12
        link = Link.of(500e-6, 1e9)
        return cls(
            device="cpu",
            product_flops_per_second=rate,
            expert_flops_per_second=rate,
            attention_flops_per_second=rate,
            half_speed_rows=0.0,
            memory_bytes_per_second=1e12,  # caches hold what a layer passes over
            step_seconds=0.0,
            layer_seconds=0.0,
            group_seconds=0.0,
            document_seconds=0.0,
            host_copy_bytes_per_second=5e9,
            memory_bytes=0,
            inside=link,
            across=link,
            assumed=True,
            source="",
        )

    def with_link(self, level: Level, *, bytes_per_second: float, seconds: float | None = None) -> "Machine":
        """Return this machine with another link "inside" a host or "across" hosts; bytes a second are those of a slot.
        `seconds` is the latency of a message (None: that of the link so far). Across hosts a link below 10 GB/s goes
        through sockets, over which kinds of messages differ in speed (`SOCKET_SPEEDS`).
        """
        check_choice("level of a link", level, LEVELS)
        latency = getattr(self, level).point.latency if seconds is None else seconds
        speeds = SOCKET_SPEEDS if level == "across" and bytes_per_second < SLOWEST_CARD else None
        return replace(self, **{level: Link.of(latency, bytes_per_second, speeds)})

    @property
    def sharding_bytes_per_second(self) -> float:
        return self.inside.gather.bytes_per_second

    @property
    def paging_bytes_per_second(self) -> float:
        """Bytes/s of copies from the host while others go there, each way."""
        return BOTH_WAYS / 2 * self.host_copy_bytes_per_second

    @property
    def weight_copy_seconds(self) -> float:
        """Seconds of FSDP2's copies of one weight, for each gather and each sum."""
        return WEIGHT_COPY_BYTES / self.memory_bytes_per_second

    def unpacking_seconds(self, packed_bytes: float, whole_bytes: float) -> float:
        """Return the seconds in which packed weights become whole: what is read, and what is written."""
        return (packed_bytes + whole_bytes) / (UNPACKING_SHARE * self.memory_bytes_per_second)

    def cost(self, model: Any, settings: CostSettings | None = None) -> Cost:
        """Return the cost of a model on this machine; `model` is a transformers configuration, its file or its folder.
        Products and messages follow from the model's shape. Passes over memory, FSDP2, rows that travel to experts, the
        optimizer and recomputation are added as the settings say; logits that no row needs, and what float8 saves, are
        taken off. Raises PlanError for a model that its configuration does not price.
        """
        settings = settings or CostSettings()
        shape = ModelShape.of(model, mtp_layers=settings.mtp_layers)
        kind = settings.recomputation
        count = settings.recomputed_layers
        frozen = not settings.trains_all
        share = recomputed_layer_share(shape, kind, count)
        cost = self._shape_cost(shape, settings.bytes_per_number)
        forward = self._shape_cost(shape.forward, settings.bytes_per_number) if shape.forward_layers else cost
        forward = self._add_row_seconds(
            forward,
            shape.forward,
            settings,
            passes=3 * FORWARD_PASSES,
            adapter_passes=3 * FORWARD_ADAPTER_PASSES,
            products=3,
            saved=6,
        )
        # Such passes are short: what the host takes to launch them counts, in place of a micro-batch's seconds.
        forward = replace(forward, micro_batch_seconds=0.0).forward_only()
        packed = packed_weights_of_model(model, settings.frozen) if frozen else PackedWeights()
        forward = self._add_sharding_seconds(forward, shape, settings, 0.0, packed)
        on_host = settings.streamed_bytes or settings.paged_bytes
        if on_host:
            forward = self._add_host_seconds(forward, shape, settings, packed)
        if settings.forward:
            return forward.shared_by(settings.tp)
        cost = cost_with_recomputation(replace(cost, forward=forward), shape, kind, count, frozen=frozen)
        # In float8 are forward's 2 FLOPs of each weight, backward's 2 for gradients of rows, and 2 of recomputation.
        saved = 4 + 2 * share * shape.recomputed_weights / max(1, shape.weights)
        # Logits have products forward, for gradients of rows and, where the head is trained, for those of weights.
        products = 2 if frozen else 3
        passes = 1 + RECOMPUTED_PASSES * share
        adapter_passes = ADAPTER_PASSES + FORWARD_ADAPTER_PASSES * share
        cost = self._add_row_seconds(
            cost, shape, settings, passes=passes, adapter_passes=adapter_passes, products=products, saved=saved
        )
        cost = self._add_sharding_seconds(cost, shape, settings, share, packed)
        if on_host:
            cost = self._add_host_seconds(cost, shape, settings, packed)
        return cost.shared_by(settings.tp)

    def _add_host_seconds(
        self, cost: Cost, shape: ModelShape, settings: CostSettings, packed: PackedWeights
    ) -> Cost:
        """Copies of the root, the embedding, hide behind nothing: they come before the first layer, for a pass and for
        an update that hides behind the pass, and their gradients go after it. The head's, unless it is the embedding,
        hide as a layer's do. Every backward pass but the first also waits for gradients that come back, and for those
        that go: the stream that copies waits until sums have left, so that these copies go one way at a time."""
        streamed, paged = (
            size / self.paging_bytes_per_second for size in (settings.streamed_bytes, settings.paged_bytes)
        )
        head = shape.hidden * shape.logits
        layer_weights = shape.weights - head + shape.stored_experts - shape.expert_weights
        around_layers = (shape.stored_weights - layer_weights) * settings.bytes_per_number
        root_bytes = max(around_layers - head * settings.bytes_per_number, around_layers / 2)
        layer_bytes = (layer_weights - packed.numbers - packed.experts) * settings.bytes_per_number
        layer_bytes += packed.bytes + packed.experts_bytes
        root_share = root_bytes / max(1, around_layers + layer_bytes)
        # weights come; gradients go where some are made
        copies = 1 if not settings.trains_all or cost.passes == "forward" else 2
        # A forward pass alone has no update.
        if cost.passes == "forward":
            paged = 0.0
        return replace(
            cost,
            micro_batch_seconds=cost.micro_batch_seconds + copies * root_share * streamed,
            update_seconds=cost.update_seconds + root_share * paged,
            streaming_seconds=(1 - root_share) * streamed,
            gradient_seconds=(copies - 1) * (1 - root_share) * streamed * (ONE_AT_A_TIME - 1),
            paging_seconds=(1 - root_share) * paged,
        )

    def _add_row_seconds(
        self,
        cost: Cost,
        shape: ModelShape,
        settings: CostSettings,
        *,
        passes: float,
        adapter_passes: float,
        products: int,
        saved: float,
    ) -> Cost:
        """Logits of rows that predict nothing are left out. `passes` are a layer's passes over memory, over those of
        forward and backward together, `adapter_passes` those of adapters over what their linears read and
        write. Logits take `products` of 2 FLOPs for each weight of the head. In float8 `saved` FLOPs for each weight of
        the layers are faster."""
        tp = max(settings.tp, settings.weight_ranks)  # runs set only weight_ranks, to their tp
        compiled = resolve_compiled_parts(settings.compiled, hidden=shape.hidden, tp=tp) == "layers"
        # Half of a layer's passes are attention's, half an MLP's; those of experts are in the rate of experts.
        layer_bytes = LAYER_BYTES * (
            (shape.layers + shape.dense_layers) / 2 + shape.forward_layers * FORWARD_PASSES
        )
        if shape.streams > 1:
            layer_bytes += STREAM_BYTES * shape.streams * shape.decoder_layers
        layer_bytes *= (COMPILED_SHARE if compiled else 1.0) * shape.hidden
        adapter_bytes = adapter_passes * settings.adapted_widths * settings.bytes_per_number
        layer_seconds = (layer_bytes * passes + adapter_bytes) / self.memory_bytes_per_second
        head_weights = shape.hidden * shape.logits
        rate = self.product_flops_per_second
        logit_seconds = settings.target_share * shape.logits * LOGIT_BYTES / self.memory_bytes_per_second
        unused_seconds = (1 - settings.target_share) * products * 2 * head_weights / rate
        layer_weights = shape.weights - head_weights
        saved_seconds = saved * layer_weights * (1 - 1 / FLOAT8_SPEED) / rate if settings.float8 else 0.0
        expert_share = shape.expert_weights / max(1, layer_weights)
        real = max(0.0, cost.real_row_seconds - saved_seconds * expert_share)
        return replace(
            cost,
            linear_seconds=cost.linear_seconds + layer_seconds + logit_seconds - unused_seconds - saved_seconds,
            real_row_seconds=real + settings.target_share * 2 * products * head_weights / rate + logit_seconds,
        )

    def _add_sharding_seconds(
        self, cost: Cost, shape: ModelShape, settings: CostSettings, recomputed: float, packed: PackedWeights
    ) -> Cost:
        """Return the cost with what a micro-batch and a step take because slots share the weights (FSDP2, HSDP,
        experts), with an update, and with the host's launches. `recomputed` is the share of layers that run forward
        twice.

        g gathers, and s sums of gradients, of n weights over w slots (experts over their own w · tp / ep) take

        copies(g, s) = n (g + s) · WEIGHT_COPY_BYTES / memory          on the device; all of it shows
        wire(g, s)   = n (w − 1) / w · (g · number + s · max(4, number)) / link
        shown(g, s)  = copies(g, s) + SHARDING_SHARE · wire(g, s)      the rest of the wire may hide: `sharding_seconds`

        with `number` bytes of a number. Packed weights travel as bytes and each gather unpacks them: they count as the
        numbers that have as many bytes, and have no sums. And of (g, s) = (2, 1), or (1, 0) of forward alone,

        micro-batch  + shown(what comes in every micro-batch) + latency · exchanges of rows
        closing      = shown(what comes once a step), in free mode with the whole wire, as nothing runs beside it
        update       + UPDATE_BYTES · n / w / memory + 4 · 2 (c − 1) / c · n / w / link      of c copies, in a ring
        a row        + exchanges · its routed bytes / ep · max((near − 1) / inside, (ep − near) / across)

        where `near` of the ep slots share a host, and rows are exchanged 2 times forward, 2 backward and 2 in layers
        that are recomputed, with nothing to hide it.
        """
        forward = cost.passes == "forward"
        number = settings.bytes_per_number
        memory = self.memory_bytes_per_second
        tp = settings.weight_ranks or settings.tp
        ep = settings.ep
        width = settings.shards
        dense = (shape.stored_weights - shape.stored_experts) / tp
        experts = shape.stored_experts / ep
        # A slot's experts are sharded over so many ranks; below 1 where slots share experts.
        expert_ranks = tp / ep
        # Attention is replayed where none crosses hosts; on a machine that was measured its launches count as they are.
        replayed = 0 < width * settings.dp_replicate <= self.node_size and not forward
        launches = REPLAYED_LAUNCHES if replayed and not self.world else 1.0
        micro_batch = cost.micro_batch_seconds
        hidden = 0.0
        closing = 0.0
        if width:
            dense_bytes = packed.bytes / tp
            experts_bytes = packed.experts_bytes / ep
            whole_bytes = (packed.numbers / tp + packed.experts / ep) * number
            unpacking = self.unpacking_seconds(dense_bytes + experts_bytes, whole_bytes)
            dense += dense_bytes / number - packed.numbers / tp
            experts += experts_bytes / number - packed.experts / ep
            sent = dense * (width - 1) / width
            sent += experts * max(0.0, width * expert_ranks - 1) / (width * expert_ranks)
            speed = self.sharding_bytes_per_second
            if width > self.node_size:  # a ring of all slots crosses each boundary once, for the slots of a host
                speed = min(speed, self.across.gather.bytes_per_second * self.node_size)

            def sharding_seconds(gathers: int, sums: int, shown: float = SHARDING_SHARE) -> tuple[float, float]:
                """Return the seconds of so many gathers and sums that show, and those that may hide; `shown` is the
                share of the wire's seconds that shows.
                """
                wire = sent * (gathers * number + sums * max(4, number)) / speed
                copies = self.weight_copy_seconds * (dense + experts) * (gathers + sums)
                return copies + gathers * unpacking + shown * wire, (1 - shown) * wire

            gathers_each, sums_each = (0, 0) if settings.free else settings.times_each_micro_batch
            # In every micro-batch there are one or two gathers and a sum, or those of them that do not come once a
            # step.
            sums = 1 if settings.trains_all and not forward else 0
            sums_each = min(sums, sums_each)
            shown, hidden = sharding_seconds(1 if forward else gathers_each, sums_each)
            micro_batch += shown
            launches += (SHARDED_LAUNCHES if width > 1 else SHARDED_LAUNCHES_OF_ONE) * sums_each
            if not forward:
                closing, _ = sharding_seconds(
                    int(not gathers_each), sums - sums_each, 1.0 if settings.free else SHARDING_SHARE
                )
                if settings.free:
                    closing += cost.micro_batch_seconds
        exchanges = 2.0 if forward else 4.0 + 2.0 * recomputed
        row_seconds, exchange_latency = self._expert_exchange_seconds(shape, settings, exchanges)
        update = self.micro_batch_seconds
        if settings.trains_all:
            # These are the weights of a rank's shard.
            weights = (dense + experts / expert_ranks) / max(1, width)
            copies = settings.dp_replicate
            link = self.inside if copies * width <= self.node_size else self.across
            update += UPDATE_BYTES / memory * weights
            update += weights * 4 * 2 * (copies - 1) / copies / link.gather.bytes_per_second
        # A layer that runs several times is launched as often.
        runs = max(shape.decoder_layers, shape.layers + shape.forward_layers * (1 if forward else FORWARD_LAUNCHES))
        launched_layers = runs * (FORWARD_LAUNCHES if forward else 1)
        return replace(
            cost,
            linear_seconds=cost.linear_seconds + row_seconds,
            real_row_seconds=cost.real_row_seconds + row_seconds,
            micro_batch_seconds=micro_batch + exchange_latency,
            sharding_seconds=hidden,
            launch_seconds=launched_layers * self.layer_seconds * launches,
            group_launch_seconds=launched_layers * self.group_seconds,
            document_launch_seconds=launched_layers * self.document_seconds,
            closing_seconds=closing,
            update_seconds=self.micro_batch_seconds if forward else update,
        )

    def _expert_exchange_seconds(
        self, shape: ModelShape, settings: CostSettings, exchanges: float
    ) -> tuple[float, float]:
        """By the formula of `_add_sharding_seconds`; (0, 0) where no slots share experts."""
        ep = settings.ep
        if ep <= 1 or not shape.expert_layers:
            return 0.0, 0.0
        near = min(ep, self.node_size)
        row_bytes = exchanges * shape.routed_numbers * settings.bytes_per_number / ep
        inside = self.inside.exchange
        across = self.across.exchange
        near_seconds = row_bytes * (near - 1) / inside.bytes_per_second
        far_seconds = row_bytes * (ep - near) / across.bytes_per_second
        latency = exchanges * shape.expert_layers * (inside if near == ep else across).latency
        return max(near_seconds, far_seconds), latency

    def _shape_cost(self, shape: ModelShape, bytes_per_number: int) -> Cost:
        """Experts run at another rate than dense products, so their weights get the difference. A ring sends each
        number of keys and values twice, and its gradient once, in float32 at least: these bytes are `turns`."""
        tflops = self.product_flops_per_second / 1e12
        memory = self.memory_bytes_per_second
        states = StateCost.from_shape(
            shape,
            scan_tflops=tflops * SCAN_SPEED,
            summary_tflops=tflops * SUMMARY_SPEED,
            channel_seconds=CHANNEL_BYTES / memory,
            step_latency=self.step_seconds,
        )
        constants = constants_of_shape(
            shape,
            states,
            tflops=tflops,
            attention_tflops=self.attention_flops_per_second / 1e12,
            step_latency=self.step_seconds,
            bytes_per_value=bytes_per_number,
        )
        expert_extra = 1 / self.expert_flops_per_second - 1 / self.product_flops_per_second
        for name in ("linear_seconds", "real_row_seconds"):
            constants[name] += 6 * shape.expert_weights * expert_extra
        network = None
        # These layers attend: a model of state-space layers only needs no network.
        if shape.layers:
            turns = 2 * bytes_per_number + max(4, bytes_per_number)
            index_bytes = shape.index_numbers * bytes_per_number
            constants["ring_bytes"] = float(shape.sending_layers * 2 * shape.key_width * turns + index_bytes)
            network = Network(
                inside=self.inside,
                across=self.across,
                layers=round(shape.sending_layers),
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                key_share=shape.key_width / (shape.query_width + shape.key_width),
                block_share=bytes_per_number / turns,
                half_speed_rows=self.half_speed_rows,
                step_seconds=self.step_seconds,
                forward_messages=shape.choice_messages[0],
                backward_messages=shape.choice_messages[1],
            )
        return Cost(
            **constants,
            inside_bytes_per_second=self.inside.point.bytes_per_second,
            across_bytes_per_second=self.across.point.bytes_per_second,
            merge_seconds=shape.sending_layers * MERGE_BYTES * shape.query_width / memory,
            copy_seconds=shape.sending_layers * GATHER_BYTES * 2 * shape.key_width / memory,
            micro_batch_seconds=self.micro_batch_seconds,
            node_size=self.node_size,
            source=self.source,
            network=network,
        )

    def attention_prices(
        self, group: Group, call: AttentionCall, *, node_size: int | None = None
    ) -> dict[str, TypePrice]:
        """Return the price of one layer's call for a group under all four types, whatever the group's own is; one that
        the heads forbid takes infinite seconds. Hosts have `node_size` slots (None: the machine's). Of a2a+p2p the
        group's sizes count, or the fastest pair.
        """
        # A model of one layer with nothing but this call.
        # The width is that of a key and a value together.
        width = call.head_dim + (call.value_dim or call.head_dim)
        shape = ModelShape(
            layers=1,
            weights=0,
            query_width=call.heads * width // 2,
            key_width=call.kv_heads * width // 2,
            heads=call.heads,
            kv_heads=call.kv_heads,
        )
        cost = self._shape_cost(shape, call.bytes_per_number)
        cost = cost if call.passes == "both" else cost.forward_only()
        degree = group.degree
        sizes = group.hierarchical_context_parallel_sizes
        # the members that exchange heads under a2a+p2p; a prime degree has no two levels: its a2a+p2p is a ring
        divisors = [size for size in range(2, degree) if degree % size == 0]
        a2a_sizes = [sizes[0]] if sizes else divisors or [1]
        nodes = Counter(slot // (node_size or self.node_size) for slot in group.slots)
        together = min(nodes.values())
        prices: dict[str, TypePrice] = {}
        types = [("a2a", degree), ("p2p", 1), ("all_gather", 1), *(("a2a+p2p", size) for size in a2a_sizes)]
        for kind, exchanging in types:
            price = price_type(cost, kind, exchanging, group, call, together)
            if kind not in prices or price.seconds < prices[kind].seconds:
                prices[kind] = price
        return prices

    def fastest_type_price(self, group: Group, call: AttentionCall, *, node_size: int | None = None) -> TypePrice:
        """Return the price of one layer's call under the type that takes least time, which "auto" stands for. That is
        never a type that the heads forbid, whose seconds are infinite: p2p takes any heads.
        """
        if group.degree == 1:
            return TypePrice(cp_comm_type="p2p", sizes=(1, 1), seconds=0.0, exposed=0.0)
        return min(
            self.attention_prices(group, call, node_size=node_size).values(), key=lambda price: price.seconds
        )

    def to_json(self) -> dict[str, Any]:
        """Return all figures by name, for a JSON document; `from_json` gives an equal machine back."""
        links = {level: getattr(self, level).to_json() for level in LEVELS}
        return {"machine": VERSION} | vars(self) | {"assumed_parts": list(self.assumed_parts)} | links

    @classmethod
    def from_json(cls, values: Any) -> "Machine":
        """Read a machine from a JSON object. Raises PlanError for another version, and for other figures."""
        names = {f.name for f in dataclasses.fields(cls)}
        fields = dict(cast(dict[str, Any], values)) if isinstance(values, dict) else {}
        if (version := fields.pop("machine", None)) != VERSION:
            raise PlanError(
                f"it is version {version!r} of a machine, and this longspan reads {VERSION}; measure again"
            )
        if differ := sorted(names ^ set(fields)):
            raise PlanError(f"a machine has {', '.join(sorted(names))}; missing or unknown: {', '.join(differ)}")
        links: dict[str, Any] = {level: Link.from_json(fields[level]) for level in LEVELS}
        fields["assumed_parts"] = tuple(fields["assumed_parts"])
        return cls(**fields | links)


def scale_product_speeds(machine: Machine, factor: float) -> Machine:
    """Return a machine whose products, of weights, experts and attention, are `factor` times as fast."""
    fields = machine.float_fields().items()
    return replace(machine, **{name: rate * factor for name, rate in fields if name.endswith("flops_per_second")})


def cost_with_recomputation(
    cost: Cost, shape: ModelShape, kind: Recomputation, layers: int = 0, *, frozen: bool = False
) -> Cost:
    """Return a model's cost if `layers` layers (0: all) run forward again in backward, by what they keep of attention
    (`kind`). Layers of "selective" keep its output and the log-sum-exp, those of "exchanged" also what `a2a` types
    exchanged, those of "full" nothing.

    Another forward pass takes a third of what a layer's weights take (2 FLOPs of 6); under "full" also 2 of
    attention's 7 products, one of the ring's two passes and a third of its bytes, and one of two exchanges of heads.
    Keys are chosen again wherever a layer runs again.
    Under "selective" the queries, keys and values are exchanged once more. torch stops before the last product of a
    dense layer, from which nothing is kept. Gradients of `frozen` weights are not computed: 2 FLOPs of 6 less.
    """
    if kind == "none" and not frozen:
        return cost
    share = recomputed_layer_share(shape, kind, layers)
    full, selective = (share if kind == word else 0.0 for word in ("full", "selective"))  # shares of the layers
    # Keys have this share of what is exchanged.
    key_share = shape.key_width / max(1, shape.query_width + shape.key_width)
    scans = cost.states.scan_seconds if cost.states else 0.0
    # Weights that multiply rows forward alone have a third of the others' products.
    products = shape.weights + shape.forward_weights / 3
    recomputed_share = share * shape.recomputed_weights / products
    repeated = ("ring_step_seconds", "ring_bytes", "merge_seconds", "copy_seconds")
    shares = cost.forward_shares
    with_gradients = shape.layers / max(1, shape.layers + shape.forward_layers * 2 / 7)
    again = full * shares["attention_seconds"] * with_gradients + (share - full) * cost.choice_share
    weight_factor = 1 + (recomputed_share - frozen * shape.weights / products) * 2 / 6
    return replace(
        cost,
        linear_seconds=(cost.linear_seconds - scans) * weight_factor + scans * (1 + share / 3),
        real_row_seconds=cost.real_row_seconds * weight_factor,
        attention_seconds=cost.attention_seconds * (1 + again),
        **{name: getattr(cost, name) * (1 + full * shares[name]) for name in repeated},
        exchange_bytes=cost.exchange_bytes * (1 + full / 2 + selective * (1 + key_share) / 4),
        states=cost.states and cost.states.with_recomputation(share),
        forward=cost.forward_only(),
    )


def recomputed_layer_share(shape: ModelShape, kind: Recomputation, layers: int) -> float:
    """Return the share of a model's layers that run forward twice, if `layers` of them do (0: all); 0 under "none"."""
    if kind == "none":
        return 0.0
    return min(layers or shape.decoder_layers, shape.decoder_layers) / shape.decoder_layers


def find_machine_of_device(device: str) -> Machine | None:
    """Find the known machine of a device by its full name; None for another device."""
    # A laptop's GPU is slower than that of the same name.
    if "Laptop" in device:
        return None
    names = [name for name in KNOWN if has_name(device, name)]
    return Machine.known(max(names, key=len)) if names else None  # the longest: a GH200's name has "H200" too


def find_known_name(name: str, known_names: Iterable[str] = KNOWN) -> str | None:
    """Find a GPU among known ones, however its name is written: "RTX 4090", "rtx4090" and "4090" are one."""

    def letters(text: str) -> str:
        return re.sub("[ _-]", "", text).lower().removeprefix("nvidia").removeprefix("geforce").removeprefix("rtx")

    return next((known for known in known_names if letters(known) == letters(name)), None)


def read_machine(file: str, key: str) -> Machine:
    """Read the machine in a JSON file, whose name becomes its `source`, or return a known machine by a name such as
    "h200".

    A file that is there is read even if it has the name of a known machine. `key` is the option or key that names the
    file, for messages. Raises ConfigError for a name that is not known, and for a file that holds no machine.
    """
    path = Path(file)
    # The path may be of a file that is not there, or of a folder.
    is_path = path.suffix or path.exists()
    if not path.is_file() and (find_known_name(file) or not is_path):
        try:
            return Machine.known(file)
        except PlanError as error:
            raise ConfigError(f"{key} {file}: {error}; other GPUs are --gpu-bytes N --tflops N") from error
    try:
        return replace(Machine.from_json(read_json(path)), source=file)
    except (OSError, ValueError, TypeError, LongspanError) as error:
        fault = f"holds no machine: {error.strerror if isinstance(error, OSError) else error}"
        raise ConfigError(
            f"{key} {file} {'is a folder' if isinstance(error, IsADirectoryError) else fault}; give the file that "
            "`longspan bench calibrate --out FILE.json` writes for this machine"
        ) from error
