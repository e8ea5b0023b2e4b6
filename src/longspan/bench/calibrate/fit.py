"""From measured seconds to a Machine: five lines of non-negative least squares of relative errors, with numpy.

They are of attention, passes over memory, steps, the host's launches and messages. What is measured is in `trials.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from longspan.plan import Machine
from longspan.plan.cost.links import KINDS, LEVELS, Level, Link, Wire
from longspan.plan.cost.machine import LAYER_BYTES

Floats = NDArray[np.float64]
Part = Literal["attention", "memory", "step", "host", "link"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement: how often each thing that has a price counts in it, and its seconds; messages have a kind."""

    part: Part
    name: str
    seconds: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    level: Level = "inside"
    kind: str = ""


@dataclass(frozen=True)
class Calibration:
    """A machine, and the measured and fitted seconds of each sample."""

    machine: Machine
    samples: tuple[Sample, ...]
    fitted_seconds: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """The mean relative error of the lines, without sign."""
        pairs = zip(self.fitted_seconds, self.samples, strict=True)
        return float(np.mean([abs(seconds / sample.seconds - 1) for seconds, sample in pairs]))


def fit_samples(samples: Sequence[Sample], base: Machine, *, known: bool = False) -> Calibration:
    """Fit the machine under which the samples' relative errors are least, in squares, over `base`.

    Figures that no sample decides are those of `base`, and their names stand in `assumed_parts`; if the device is not
    `known`, the rate of experts is scaled by how much faster its products are.
    """
    parts = {sample.part: [s for s in samples if s.part == sample.part] for sample in samples}
    figures: dict[str, Any] = {}
    fitted: dict[str, float] = {}

    def line(part: Part, *names: str, rows: Sequence[Sample] | None = None) -> dict[str, float]:
        """Fit the seconds of one of each of these counts, and note what the samples of the part should take."""
        rows = parts.get(part, []) if rows is None else rows
        counts = [[sample.counts.get(name, 0.0) for name in names] for sample in rows]
        columns = np.array(counts).reshape(-1, len(names))
        seconds = np.array([sample.seconds for sample in rows])
        solution = least_squares(columns, seconds, seconds)
        fitted.update(zip((sample.name for sample in rows), (columns @ solution).tolist(), strict=True))
        return {name: value for name, value in zip(names, solution, strict=True) if value}

    attention = line("attention", "flops", "flops a row", "calls")
    if flop := attention.get("flops"):
        figures |= {"attention_flops_per_second": 1 / flop, "half_speed_rows": attention.get("flops a row", 0.0) / flop}
    if byte := line("memory", "bytes", "calls").get("bytes"):
        figures["memory_bytes_per_second"] = 1 / byte
    machine = replace(base, **figures)
    others = [(s, _other_seconds(s, machine)) for s in parts.get("step", [])]
    products = [replace(s, seconds=s.seconds - other) for s, other in others]
    steps = line("step", "flops", "micro-batches", "steps", rows=products)
    fitted |= {s.name: fitted[s.name] + other for s, other in others}
    if flop := steps.get("flops"):
        figures |= {"product_flops_per_second": 1 / flop, "micro_batch_seconds": steps.get("micro-batches", 0.0)}
    if host := line("host", "layers", "groups", "documents", "steps"):
        figures |= {f"{name}_seconds": host.get(f"{name}s", 0.0) for name in ("layer", "group", "document")}
    for level in LEVELS:
        wires: dict[str, Wire] = {}
        for kind in KINDS:
            rows = [s for s in parts.get("link", []) if (s.level, s.kind) == (level, kind)]
            if rows:
                message, longest = line("link", "bytes", "messages", rows=rows), max(s.counts["bytes"] for s in rows)
                latency = message.get("messages", 0.0)
                # Where the latency hides all bytes, the longest message takes a tenth more.
                wires[kind] = Wire(latency, 1 / message["bytes"] if "bytes" in message else 10 * longest / latency)
        if len(wires) == len(KINDS):
            figures[level] = Link(**wires)
    if not known and "product_flops_per_second" in figures:
        ratio = figures["product_flops_per_second"] / base.product_flops_per_second
        figures["expert_flops_per_second"] = base.expert_flops_per_second * ratio
    assumed = tuple(n for n in [*base.rates(), *LEVELS] if n not in figures or n == "expert_flops_per_second")
    machine = replace(base, **figures, assumed=False, assumed_parts=assumed)
    return Calibration(machine, tuple(samples), tuple(fitted[sample.name] for sample in samples))


def _other_seconds(sample: Sample, machine: Machine) -> float:
    """Return what of a step is attention and passes over memory; at most half of it counts as such."""
    attention = sample.counts["attention flops"] + machine.half_speed_rows * sample.counts["attention flops a row"]
    seconds = attention / machine.attention_flops_per_second
    return min(seconds + sample.counts["passes"] * LAYER_BYTES / machine.memory_bytes_per_second, sample.seconds / 2)


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
