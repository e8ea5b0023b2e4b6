"""MachineFigures: what a device and its network sustain, by name, and how they are written to a file.

`machine.py` prices with them. The figures of H200s are their defaults; other GPUs are scaled by data sheet.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Self, cast

from longspan.errors import PlanError
from longspan.plan.check import check_count
from longspan.plan.cost.links import INSIDE_SPEEDS, LEVELS, Link

VERSION = 1  # of the file
# Figures that files of older versions lack.
_OLD_FILE_DEFAULTS: dict[str, Any] = {"memory_bytes": 0, "host_copy_bytes_per_second": 55e9, "compiled_share": 1.0}
_FLOAT8_OVER_BFLOAT16 = 1350 / 700  # speed of products, where float8 was not measured
# Of GPUs by data sheet, against an H200: matrix products in bfloat16, memory, bytes/s inside a host and across; GiB.
KNOWN: dict[str, tuple[float, float, float, float, int] | None] = {
    "H200": None,
    "A100-40": (312 / 989, 1.555 / 4.8, 120e9, 20e9, 40),
    "A100-80": (312 / 989, 2.039 / 4.8, 120e9, 20e9, 80),
    "H100": (1.0, 3.35 / 4.8, 180e9, 40e9, 80),
    "B200": (2250 / 989, 8.0 / 4.8, 360e9, 40e9, 180),
}


@dataclass(frozen=True, kw_only=True)
class MachineFigures:
    """The figures of a device, of its memory and of the links between slots. The defaults are H200s as measured.

    `product_flops_per_second`: of products with weights, `float8_flops_per_second` of those in float8 by rows, with
    what brings rows and weights to float8 (of a layer: bench/training/float8_layer.py); `expert_flops_per_second`: of
    those of experts, with the moves of rows to them (bench/records/experts-H200.md). `layer_pass_seconds`: of a layer's
    passes over memory (norms, gates, sums), for each row and number of its width, of which `compiled_share` is left in
    compiled layers (bench/records/layer-time-H200.md); `logit_pass_seconds`: of the loss, for each row and logit.
    `attention_flops_per_second`: of a kernel on long pieces; on pieces of `half_speed_rows` it reaches half
    (bench/records/attention-pieces-H200.md, under load).
    `scan_flops_per_second`, `summary_flops_per_second`: of state-space layers' scans, and of the passes that make a
    run's states for others; `channel_seconds` those of a row and channel of convolutions with norms and gates. A ring
    makes `merge_passes` passes over its output in float32 a step, at `memory_bytes_per_second`, and `all_gather`
    `gather_passes` over all keys and values (bench/records/attention-time-4xH200.md).
    `step_seconds` is what a batch of messages takes with the launches around it, `ring_wait_seconds` what of a ring's
    step in one layer and pass shows in whole steps; `micro_batch_seconds` those of a micro-batch's launches,
    `layer_launch_seconds` what the host needs for one layer's forward pass. A device holds `memory_bytes` (0: not
    known), and copies to its host's memory and back at `host_copy_bytes_per_second` each way. Encoders reach
    `encoder_flops_per_second` outside attention (narrow products, rotary angles in float32), and launch a wave in
    `wave_seconds` (bench/records/vision-step-4xH200.md).

    FSDP2's messages inside a host run at `sharding_bytes_per_second` (gathers and sums of
    bench/records/step-4xH200-moe.md), of which `sharding_share` shows; its copies take `weight_copy_seconds` a weight
    for each gather and each sum (there and in step-4xH200-64k.md). `update_seconds` are those of the ends of a step,
    `weight_update_seconds` of the optimizer for a weight. Rates of products, passes, share and ends are fitted to every
    second step of bench/records/predictions.md. `inside` and `across` are the links.
    `assumed`: figures of a data sheet, not of a measurement; `assumed_parts` names the figures that a measured machine
    took from another. `world` is the number of ranks that were measured, `date` the day, and `fit_error` the mean
    relative error on samples that were held out.
    """

    device: str = "H200"
    product_flops_per_second: float = 700e12
    float8_flops_per_second: float = 1350e12
    expert_flops_per_second: float = 315e12
    layer_pass_seconds: float = 130e-12
    compiled_share: float = 0.73
    logit_pass_seconds: float = 8.5e-12
    attention_flops_per_second: float = 618e12
    half_speed_rows: float = 1070.0
    scan_flops_per_second: float = 60e12
    summary_flops_per_second: float = 100e12
    channel_seconds: float = 40e-12
    memory_bytes_per_second: float = 4e12
    merge_passes: float = 11.0
    gather_passes: float = 8.0
    step_seconds: float = 40e-6
    ring_wait_seconds: float = 300e-6
    micro_batch_seconds: float = 5e-3
    wave_seconds: float = 2e-3
    encoder_flops_per_second: float = 240e12
    layer_launch_seconds: float = 2e-3
    host_copy_bytes_per_second: float = 55e9
    memory_bytes: int = 143771 << 20
    sharding_bytes_per_second: float = 195e9
    sharding_share: float = 0.47
    weight_copy_seconds: float = 0.55e-12
    update_seconds: float = 5e-3
    weight_update_seconds: float = 2.8e-12
    inside: Link = field(default_factory=lambda: Link.of(0.0, 180e9, INSIDE_SPEEDS))
    across: Link = field(default_factory=lambda: Link.of(50e-6, 40e9))
    node_size: int = 8
    assumed: bool = False
    assumed_parts: tuple[str, ...] = ()
    source: str = "the model on H200s"
    world: int = 0
    date: str = ""
    fit_error: float | None = None

    def __post_init__(self) -> None:
        """Check the counts and the rates: finite and at least 0, speeds above."""
        check_count("node_size of a machine", self.node_size)
        check_count("memory_bytes of a machine", self.memory_bytes, least=0)
        for name, value in self.rates().items():
            good = (
                isinstance(cast(object, value), (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            )
            if not good or value < 0 or (value == 0 and name.endswith("_per_second")):
                least = "above 0" if name.endswith("_per_second") else "of at least 0"
                raise PlanError(f"{name} of a machine is {value!r}; give a finite number {least}")

    def rates(self) -> dict[str, float]:
        """Return the figures that are floats by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type is float}

    @classmethod
    def cpus(cls) -> Self:
        """Make the machine of CPUs with gloo, by orders of magnitude: none is measured, they only rank plans."""
        rate, link = 0.02e12, Link.of(500e-6, 1e9)
        return cls(
            device="cpu",
            product_flops_per_second=rate,
            float8_flops_per_second=rate,
            expert_flops_per_second=rate,
            layer_pass_seconds=0.0,
            logit_pass_seconds=0.0,
            attention_flops_per_second=rate,
            half_speed_rows=0.0,
            scan_flops_per_second=rate,
            summary_flops_per_second=rate,
            channel_seconds=0.0,
            encoder_flops_per_second=rate,
            memory_bytes_per_second=5e9,
            merge_passes=0.0,
            gather_passes=0.0,
            step_seconds=0.0,
            ring_wait_seconds=500e-6,
            layer_launch_seconds=0.0,
            host_copy_bytes_per_second=5e9,
            memory_bytes=0,
            sharding_bytes_per_second=1e9,
            sharding_share=0.0,
            weight_copy_seconds=0.0,
            update_seconds=0.0,
            weight_update_seconds=0.0,
            inside=link,
            across=link,
            assumed=True,
            source="",
        )

    def scale_figures(self, name: str, products: float, memory: float, inside: float, across: float, gib: int) -> Self:
        """Make a device by its data sheet: `products` and `memory` are its speeds over this one's.

        `inside` and `across` are bytes/s of its links, whose latencies are those of H200s; `gib` is the size of its
        memory.
        """
        rates = {key: value * products for key, value in self.rates().items() if key.endswith("flops_per_second")}
        return dataclasses.replace(
            self,
            **rates,
            device=name,
            channel_seconds=self.channel_seconds / memory,
            layer_pass_seconds=self.layer_pass_seconds / memory,
            logit_pass_seconds=self.logit_pass_seconds / memory,
            weight_copy_seconds=self.weight_copy_seconds / memory,
            weight_update_seconds=self.weight_update_seconds / memory,
            memory_bytes_per_second=self.memory_bytes_per_second * memory,
            memory_bytes=gib << 30,
            inside=Link.of(0.0, inside, INSIDE_SPEEDS),
            across=Link.of(50e-6, across),
            assumed=True,
            source=f"the model on {name}s, by data sheet",
        )

    def to_json(self) -> dict[str, Any]:
        """Return all figures by name, for a JSON document; `from_json` gives an equal machine back."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in LEVELS}
        values["assumed_parts"] = list(self.assumed_parts)
        return {"machine": VERSION} | values | {level: getattr(self, level).to_json() for level in LEVELS}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Read a machine from a JSON object.

        Raises PlanError for another version, and for figures that are missing.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(values, dict) or "machine" not in values:
            raise PlanError(
                f"a machine is an object with {', '.join(sorted(names))}; got {str(cast(object, values))[:80]}"
            )
        fields = dict(cast(dict[str, Any], values))
        if (version := fields.pop("machine")) != VERSION:
            raise PlanError(
                f"the machine's file has version {version!r}, and this longspan reads {VERSION}; measure again"
            )
        fields = _OLD_FILE_DEFAULTS | fields
        fields.setdefault(  # older files lack it too, and it depends on their products (without which all is refused)
            "float8_flops_per_second", _FLOAT8_OVER_BFLOAT16 * fields.get("product_flops_per_second", 700e12)
        )
        if differ := sorted(names ^ set(fields)):
            raise PlanError(f"a machine has {', '.join(sorted(names))}; missing or unknown: {', '.join(differ)}")
        links: dict[str, Any] = {level: Link.from_json(fields[level]) for level in LEVELS}
        fields["assumed_parts"] = tuple(fields["assumed_parts"])
        return cls(**fields | links)
