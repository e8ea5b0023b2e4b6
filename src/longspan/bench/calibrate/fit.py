"""From measured seconds to the constants of a Cost: non-negative least squares of relative errors, with numpy.

Samples are scaled to all layers of the model before they come here. What is measured is `bench_calibrate_ranks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from longspan.plan import Cost

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement: how often each constant counts in it, and the seconds that it took.

    `steps`, `micro_batches`, `tokens`, `squares` (of document lengths, for attention), all of one slot; `calls` where
    attention was called by itself; `ring_steps` and `ring_bytes` of attention around a ring, `wire_steps` and
    `wire_bytes` of a ring that carries blocks without attention. `fitted` samples decide the constants, others do not.
    """

    name: str
    seconds: float = 0.0
    steps: int = 0
    micro_batches: int = 0
    tokens: float = 0.0
    squares: float = 0.0
    calls: int = 0
    ring_steps: int = 0
    ring_bytes: float = 0.0
    wire_steps: int = 0
    wire_bytes: float = 0.0
    fitted: bool = True


@dataclass(frozen=True)
class Calibration:
    """A cost and the rest of what was measured: seconds of a step, an attention call and a bare ring step."""

    cost: Cost
    step_seconds: float
    call_seconds: float
    wire_step_seconds: float
    ring_measured: bool

    def predict(self, sample: Sample) -> float:
        """Seconds that a sample should have taken."""
        cost = self.cost
        ring = sample.ring_bytes / cost.inside_bytes_per_second
        return (
            sample.steps * self.step_seconds
            + sample.micro_batches * cost.micro_batch_seconds
            + sample.tokens * cost.linear_seconds
            + sample.calls * self.call_seconds
            + max(sample.squares * cost.attention_seconds, ring)
            + sample.ring_steps * cost.ring_step_seconds
            + sample.wire_steps * self.wire_step_seconds
            + sample.wire_bytes / cost.inside_bytes_per_second
        )

    def relative_error(self, sample: Sample) -> float:
        """(predicted − measured) / measured."""
        return self.predict(sample) / sample.seconds - 1


def calibrate(
    samples: Sequence[Sample],
    *,
    ring_bytes: float,
    exchange_bytes: float = Cost.exchange_bytes,
    across_bytes_per_second: float = 0.0,
) -> Calibration:
    """The constants under which the fitted samples' relative errors are least, in squares.

    Compute comes first, from samples of degree 1; then the wire; then a ring step, as what attention around a ring
    takes beyond these. `ring_bytes` and `exchange_bytes` are the model's own, per row. Where no ring was measured, or
    its blocks were too small to tell the speed of the wire, Cost's defaults stay. `across_bytes_per_second`: 0 takes
    what was measured inside, at most the default.
    """
    fitted = [sample for sample in samples if sample.fitted]
    step, micro_batch, token, square, call = _fit_compute(fitted)
    wire_step, byte = _fit_wire(fitted)
    inside = 1 / byte if byte > 0 else Cost.inside_bytes_per_second
    rings = [sample for sample in fitted if sample.ring_steps]
    explained = [sample.calls * call + max(sample.squares * square, sample.ring_bytes / inside) for sample in rings]
    unexplained = np.array([sample.seconds for sample in rings]) - explained
    ring_step = (
        least_squares(_column(rings, "ring_steps"), unexplained, _column(rings, "seconds")[:, 0])[0] if rings else None
    )
    cost = Cost(
        linear_seconds=token,
        attention_seconds=square,
        ring_bytes=ring_bytes,
        exchange_bytes=exchange_bytes,
        inside_bytes_per_second=inside,
        across_bytes_per_second=across_bytes_per_second or min(inside, Cost.across_bytes_per_second),
        ring_step_seconds=Cost.ring_step_seconds if ring_step is None else ring_step,
        micro_batch_seconds=micro_batch,
    )
    return Calibration(cost, step, call, wire_step, ring_measured=bool(rings))


def _fit_compute(samples: Sequence[Sample]) -> list[float]:
    single = [sample for sample in samples if not sample.ring_steps and not sample.wire_steps]
    columns = [_column(single, name) for name in ("steps", "micro_batches", "tokens", "squares", "calls")]
    seconds = _column(single, "seconds")[:, 0]
    return least_squares(np.hstack(columns), seconds, seconds)


def _fit_wire(samples: Sequence[Sample]) -> list[float]:
    wire = [sample for sample in samples if sample.wire_steps]
    if not wire:
        return [0.0, 0.0]
    seconds = _column(wire, "seconds")[:, 0]
    return least_squares(np.hstack([_column(wire, "wire_steps"), _column(wire, "wire_bytes")]), seconds, seconds)


def least_squares(columns: Floats, values: Floats, weights: Floats) -> list[float]:
    """The x >= 0 with the least sum of squares of (columns @ x − values) / weights.

    columns (samples, n), values and weights (samples,). Exact: the solution is the plain one on the columns that it
    uses, and n is small enough to try every choice of columns.
    """
    n = columns.shape[1]
    a, b = columns / weights[:, None], values / weights
    best, solution = float(b @ b), np.zeros(n)
    for use in map(list, chain.from_iterable(combinations(range(n), k) for k in range(1, n + 1))):
        scale = np.linalg.norm(a[:, use], axis=0)
        if not scale.all():
            continue  # a constant that no sample contains
        x = np.linalg.lstsq(a[:, use] / scale, b, rcond=None)[0] / scale
        residual = a[:, use] @ x - b
        if (x >= 0).all() and float(residual @ residual) < best * (1 - 1e-12):
            best, solution = float(residual @ residual), np.zeros(n)
            solution[use] = x
    return solution.tolist()


def _column(samples: Sequence[Sample], name: str) -> Floats:
    return np.array([[getattr(sample, name)] for sample in samples], dtype=np.float64).reshape(-1, 1)
