"""From measured seconds to a Machine: non-negative least squares of relative errors, with numpy.

Kernels and passes are fitted first, then wires, then what the types of attention take beyond these. Samples that are
held out decide nothing: their error is the machine's `fit_error`. What is measured is in `ranks.py` and
`link_trials.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from longspan.plan import AttentionCall, Group, Machine
from longspan.plan.cost.links import KINDS, LEVELS, SHARDED_KINDS, Level, Link, Wire
from longspan.plan.shape.model_shape import QWEN3_8B, ModelShape

Floats = NDArray[np.float64]
Part = Literal["step", "launch", "attention", "memory", "product", "link", "type"]
PARTS: tuple[Part, ...] = ("step", "launch", "attention", "memory", "product", "link", "type")
NEVER_MEASURED = (  # of state-space layers, encoders, experts, compiled layers, copies to the host, rings, FSDP2, AdamW
    "scan_flops_per_second",
    "summary_flops_per_second",
    "channel_seconds",
    "encoder_flops_per_second",
    "float8_flops_per_second",
    "expert_flops_per_second",
    "compiled_share",
    "wave_seconds",
    "host_copy_bytes_per_second",
    "merge_passes",
    "gather_passes",
    "sharding_bytes_per_second",
    "sharding_share",
    "weight_copy_seconds",
    "weight_update_seconds",
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement: how often each figure of a machine counts in it, and the seconds that it took.

    `steps` and `micro_batches` of a model with `weight_flops`, `layers` that were launched forward. `attention_flops`
    of kernels, and `attention_flops_per_row`, these divided by the rows of a document, which count more on short
    documents (`Calibration.predict`); `calls` of attention, or of memory passes over `bytes`. Messages have a `level`,
    a `kind` and `bytes`; a type of attention has its `group`, `call` and `cp_comm_type`. `fitted` samples decide the
    figures, the others are held out.
    """

    part: Part
    name: str
    seconds: float = 0.0
    fitted: bool = True
    steps: int = 0
    micro_batches: int = 0
    weight_flops: float = 0.0
    layers: int = 0
    attention_flops: float = 0.0
    attention_flops_per_row: float = 0.0
    calls: int = 0
    bytes: float = 0.0
    level: Level = "inside"
    kind: str = ""
    group: Group | None = None
    call: AttentionCall | None = None
    cp_comm_type: str = ""


@dataclass(frozen=True)
class Calibration:
    """A machine and the rest of what was measured: seconds of a step, a call of attention and a memory pass."""

    machine: Machine
    step_seconds: float
    call_seconds: float
    pass_seconds: float

    def predict(self, sample: Sample) -> float:
        """Predict the seconds that a sample should have taken.

        Messages and types are priced by the machine. Other samples take the sum of their counts (steps, micro-batches,
        layers, calls) times the seconds of one, and their FLOPs or bytes over the machine's rates. Attention takes
        1 + `half_speed_rows` / n times as long on documents of n rows: at `half_speed_rows` it has half its speed.
        """
        machine = self.machine
        if sample.part == "link":
            return float(getattr(getattr(machine, sample.level), sample.kind).seconds(sample.bytes))
        if sample.part == "type":
            return _type_seconds(machine, sample) + self.call_seconds
        if sample.part == "memory":
            return sample.calls * self.pass_seconds + sample.bytes / machine.memory_bytes_per_second
        attention = sample.attention_flops + machine.half_speed_rows * sample.attention_flops_per_row
        return (
            sample.steps * self.step_seconds
            + sample.micro_batches * machine.micro_batch_seconds
            + sample.layers * machine.layer_launch_seconds
            + sample.weight_flops / machine.product_flops_per_second
            + attention / machine.attention_flops_per_second
            + sample.calls * self.call_seconds
        )

    def relative_error(self, sample: Sample) -> float:
        """Return (predicted − measured) / measured."""
        return self.predict(sample) / sample.seconds - 1


def fit_samples(samples: Sequence[Sample], base: Machine, *, known: bool = False) -> Calibration:
    """Fit the machine under which the fitted samples' relative errors are least, in squares, over `base`.

    Figures that no sample decides are those of `base`, and their names stand in `assumed_parts`. If the device is not
    `known`, `base` is another device, and FLOP/s and `channel_seconds` that are never measured are scaled by how much
    faster its products and its memory are. `fit_error` is the mean error of samples that are held out.
    """
    fitted = {part: [s for s in samples if s.part == part and s.fitted] for part in PARTS}
    figures: dict[str, Any] = {}
    call_seconds = _fit_attention(fitted["attention"], figures)
    pass_seconds = _fit_memory(fitted["memory"], figures)
    step_seconds = _fit_steps(fitted["step"], base, figures)
    if launches := [s.seconds / s.layers for s in fitted["launch"]]:
        figures["layer_launch_seconds"] = float(np.median(launches))
    for level in LEVELS:
        if wires := _fit_wires(fitted["link"], level):
            figures[level] = Link(**wires)
    if not known:
        figures |= _scale_rates(base, figures)
    calibration = Calibration(replace(base, **figures), step_seconds, call_seconds, pass_seconds)
    type_figures = _fit_types(fitted["type"], calibration)
    figures |= type_figures
    names = [*base.rates(), *LEVELS]
    assumed = tuple(name for name in names if name not in figures or name in NEVER_MEASURED)
    machine = replace(calibration.machine, **type_figures, assumed=False, assumed_parts=assumed)
    calibration = replace(calibration, machine=machine)
    errors = mean_errors(calibration, samples)
    return replace(calibration, machine=replace(machine, fit_error=errors.get("all")))


def mean_errors(calibration: Calibration, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean relative error, without sign, of samples held out: of each part that has any, and of "all".

    Single products are left out: a machine's rate is that of products in whole steps.
    """
    errors_of_part: dict[str, list[float]] = {}
    for sample in samples:
        if not sample.fitted and sample.part != "product":
            errors_of_part.setdefault(sample.part, []).append(abs(calibration.relative_error(sample)))
    if errors_of_part:
        errors_of_part["all"] = list(chain.from_iterable(errors_of_part.values()))
    return {part: float(np.mean(errors)) for part, errors in errors_of_part.items()}


def _fit_attention(samples: Sequence[Sample], figures: dict[str, Any]) -> float:
    """Fit the rate of attention over long pieces, and the rows at which it is half, into `figures`.

    Returns the seconds of a call without any FLOPs.
    """
    flops, half_speed, call = _solve_seconds(samples, "attention_flops", "attention_flops_per_row", "calls")
    if flops:
        figures |= {"attention_flops_per_second": 1 / flops, "half_speed_rows": half_speed / flops}
    return call


def _fit_memory(samples: Sequence[Sample], figures: dict[str, Any]) -> float:
    """Fit the bytes a second of memory into `figures`; returns the seconds of a pass over no bytes."""
    call, byte = _solve_seconds(samples, "calls", "bytes")
    if byte:
        figures["memory_bytes_per_second"] = 1 / byte
    return call


def _fit_steps(samples: Sequence[Sample], base: Machine, figures: dict[str, Any]) -> float:
    """Fit the rate of products and the seconds of a micro-batch into `figures`.

    Returns the seconds of a step without micro-batches. Attention's seconds are taken off first, by the figures that
    were fitted before; errors stay relative to whole steps (`weights`).
    """
    rate = figures.get("attention_flops_per_second", base.attention_flops_per_second)
    half_speed_rows = figures.get("half_speed_rows", base.half_speed_rows)
    attention_flops = [s.attention_flops + half_speed_rows * s.attention_flops_per_row for s in samples]
    product_samples = [
        replace(s, seconds=s.seconds - flops / rate) for s, flops in zip(samples, attention_flops, strict=True)
    ]
    step, micro_batch, flop = _solve_seconds(product_samples, "steps", "micro_batches", "weight_flops", weights=samples)
    if flop:
        figures |= {"product_flops_per_second": 1 / flop, "micro_batch_seconds": micro_batch}
        # The samples are of one width, so that passes over memory are in the rate; a step's end is measured as a whole.
        figures |= {"layer_pass_seconds": 0.0, "logit_pass_seconds": 0.0, "update_seconds": max(0.0, step)}
    return step


def _fit_wires(samples: Sequence[Sample], level: Level) -> dict[str, Wire]:
    """Fit the wires of a level by kind; {} if one of the kinds that a link must have was not measured.

    The wires of sharded parameters are fitted only if both were measured.
    """
    points = {
        kind: [(s.bytes, s.seconds) for s in samples if (s.level, s.kind) == (level, kind)]
        for kind in (*KINDS, *SHARDED_KINDS)
    }
    if not all(points[kind] for kind in KINDS):
        return {}
    has_sharded = all(points[kind] for kind in SHARDED_KINDS)
    return {kind: Wire.fit(points[kind]) for kind in (*KINDS, *(SHARDED_KINDS if has_sharded else ()))}


def _fit_types(samples: Sequence[Sample], calibration: Calibration) -> dict[str, float]:
    """Fit the seconds of a batch of messages and of a ring's step: what all types take beyond kernels and wires.

    The price of a type is linear in the step's seconds, so that prices at 0 and at 1 give its slope.
    """
    if not samples:
        return {}
    machine_without_steps, machine_of_one_second = (
        replace(calibration.machine, step_seconds=seconds) for seconds in (0.0, 1.0)
    )
    prices = np.array([_type_seconds(machine_without_steps, sample) for sample in samples])
    slopes = np.array([[_type_seconds(machine_of_one_second, sample)] for sample in samples]) - prices[:, None]
    seconds = np.array([sample.seconds for sample in samples])
    step = least_squares(slopes, seconds - prices - calibration.call_seconds, seconds)[0]
    # Only inside a host, where messages hide behind kernels: between hosts their own seconds would count as waits.
    waits = [_ring_wait(calibration, s) for s in samples if s.cp_comm_type == "p2p" and s.level == "inside"]
    return {"step_seconds": step} | ({"ring_wait_seconds": float(np.median(waits))} if waits else {})


def _ring_wait(calibration: Calibration, sample: Sample) -> float:
    """Return the seconds by which each step of a ring makes the call longer than its kernels.

    Forward and backward have degree − 1 steps each.
    """
    assert sample.group and sample.call
    price = calibration.machine.attention_seconds(sample.group, sample.call)["p2p"]
    exposed_seconds = sample.seconds - calibration.call_seconds - (price.seconds - price.exposed)
    return max(0.0, exposed_seconds / (2 * (sample.group.degree - 1)))


def _type_seconds(machine: Machine, sample: Sample) -> float:
    """Return the price on a machine of a sample's call of attention under its communication type."""
    assert sample.group and sample.call
    return machine.attention_seconds(sample.group, sample.call)[sample.cp_comm_type].seconds


def _scale_rates(base: Machine, figures: Mapping[str, Any]) -> dict[str, float]:
    """Return figures that are never measured, scaled from those of the base.

    FLOP/s are multiplied by how much faster the device's products are, as measured; `channel_seconds` are divided by
    how much faster its memory is.
    """
    base_rate = _layer_rate(base)
    product_ratio = figures.get("product_flops_per_second", base_rate) / base_rate
    memory_ratio = figures.get("memory_bytes_per_second", base.memory_bytes_per_second) / base.memory_bytes_per_second
    rates = {name: getattr(base, name) * product_ratio for name in NEVER_MEASURED if name.endswith("_flops_per_second")}
    return rates | {"channel_seconds": base.channel_seconds / memory_ratio}


def _layer_rate(machine: Machine) -> float:
    """Return the FLOP/s of a dense model's layers with their passes over memory, as products of a step are measured."""
    return 6 * ModelShape.of(QWEN3_8B).weights / machine.cost(QWEN3_8B).linear_seconds


def _solve_seconds(samples: Sequence[Sample], *names: str, weights: Sequence[Sample] | None = None) -> list[float]:
    """Solve for the seconds that one unit of each named field takes, by least squares; 0 for each without samples.

    Errors are relative to the seconds of `weights` (None: of the samples).
    """
    if not samples:
        return [0.0] * len(names)
    columns = np.stack([_sample_column(samples, name) for name in names], axis=1)
    return least_squares(columns, _sample_column(samples, "seconds"), _sample_column(weights or samples, "seconds"))


def _sample_column(samples: Sequence[Sample], name: str) -> Floats:
    """Return a field of all samples (samples,)."""
    return np.array([getattr(sample, name) for sample in samples], dtype=np.float64)


def least_squares(columns: Floats, values: Floats, weights: Floats) -> list[float]:
    """Solve for the x >= 0 with the least sum of squares of (columns @ x − values) / weights.

    The shapes are columns (samples, n), values and weights (samples,). Exact: the solution is the plain one on the
    columns that it uses, and n is small enough to try every choice of columns.
    """
    n = columns.shape[1]
    a, b = columns / weights[:, None], values / weights
    best_squares, solution = float(b @ b), np.zeros(n)
    for use in map(list, chain.from_iterable(combinations(range(n), k) for k in range(1, n + 1))):
        scale = np.linalg.norm(a[:, use], axis=0)
        if not scale.all():
            continue  # a constant that no sample contains
        x = np.linalg.lstsq(a[:, use] / scale, b, rcond=None)[0] / scale
        residual = a[:, use] @ x - b
        # Fewer columns, which come first, win unless more of them are better beyond rounding.
        if (x >= 0).all() and float(residual @ residual) < best_squares * (1 - 1e-12):
            best_squares, solution = float(residual @ residual), np.zeros(n)
            solution[use] = x
    return solution.tolist()
