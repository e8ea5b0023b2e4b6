"""Factors by which measured steps differ from a cost's prices, and their estimate from steps (`fit_correction`).

A price is linear in the factors of its four parts: `linear` (all products but attention's, launches, and FSDP2's
messages), `attention`, and the other messages of the two levels of the network, `inside` a host and `across` hosts.
What is recorded of steps, and when a correction takes effect, is `plan/refinement.py`'s.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.plan.cost.cost import Cost
from longspan.plan.cost.links import Network

Floats = NDArray[np.float64]
Part = Literal["linear", "attention", "inside", "across"]
PARTS: tuple[Part, ...] = ("linear", "attention", "inside", "across")
Seconds = tuple[float, float, float, float]  # of each part, in the order of PARTS

BOUND = 3.0  # a part's factor over that of the whole is at most this, and at least its inverse
SPREAD = 0.3  # by how much parts' factors differ from that of the whole before anything is measured
ROUNDS, FIRST_ROUNDS = 40, 15  # of weighting; the first ones weigh every step, by the inverse of its distance
OUTLIER = 4.685  # times the usual distance: a step that is as far away has no weight (Tukey's biweight)
DIGITS = 4  # of a factor
REFINED = ", refined by measured steps"  # after the source of a cost


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The factor of each part of a cost: measured seconds over predicted ones.

    >>> cost = Correction(attention=1.25).correct_cost(Cost())
    >>> round(cost.attention_seconds / Cost().attention_seconds, 6), cost.linear_seconds == Cost().linear_seconds
    (1.25, True)

    Raises PlanError for a factor that is not above 0.
    """

    linear: float = 1.0
    attention: float = 1.0
    inside: float = 1.0
    across: float = 1.0

    def __post_init__(self) -> None:
        """Check the factors."""
        for name, factor in self.factors().items():
            number = isinstance(cast(object, factor), (int, float)) and not isinstance(cast(object, factor), bool)
            if not number or not math.isfinite(factor) or factor <= 0:
                raise PlanError(f"{name} of a correction is {factor!r}; give a finite number above 0")

    def factors(self) -> dict[Part, float]:
        """Return the factors by part."""
        return {name: getattr(self, name) for name in PARTS}

    @classmethod
    def of(cls, factors: Sequence[float]) -> "Correction":
        """Make the correction of factors in the order of `PARTS`."""
        return cls(**dict(zip(PARTS, factors, strict=True)))

    @classmethod
    def from_json(cls, values: Any) -> "Correction":
        """Read a correction from a JSON object. Raises PlanError for any other value."""
        if not isinstance(values, dict) or set(cast(dict[str, Any], values)) != set(PARTS):
            raise PlanError(f"a correction is an object with {', '.join(PARTS)}; got {values!r}")
        return cls(**cast(dict[str, Any], values))

    def correct_cost(self, cost: Cost) -> Cost:
        """Return a cost whose parts take their factors times as long, for as many bytes.

        Latencies that a cost does not have by level go with the level inside a host.
        """
        if self == NO_CORRECTION:
            return cost
        return dataclasses.replace(
            cost,
            linear_seconds=cost.linear_seconds * self.linear,
            real_row_seconds=cost.real_row_seconds * self.linear,
            micro_batch_seconds=cost.micro_batch_seconds * self.linear,
            sharding_seconds=cost.sharding_seconds * self.linear,
            closing_seconds=cost.closing_seconds * self.linear,
            launch_seconds=cost.launch_seconds * self.linear,
            update_seconds=cost.update_seconds * self.linear,
            attention_seconds=cost.attention_seconds * self.attention,
            merge_seconds=cost.merge_seconds * self.attention,
            copy_seconds=cost.copy_seconds * self.attention,
            ring_step_seconds=cost.ring_step_seconds * self.inside,
            inside_bytes_per_second=cost.inside_bytes_per_second / self.inside,
            across_bytes_per_second=cost.across_bytes_per_second / self.across,
            states=cost.states and cost.states.apply_factors(linear=self.linear, inside=self.inside),
            network=cost.network and self._correct_network(cost.network),
            forward=cost.forward and self.correct_cost(cost.forward),
            source=cost.source and f"{cost.source}{REFINED}",
        )

    def _correct_network(self, network: Network) -> Network:
        """Return links on which messages take `inside` and `across` times as long, and a layer's latency as inside."""
        links = {"inside": network.inside.scale_times(self.inside), "across": network.across.scale_times(self.across)}
        return dataclasses.replace(network, **links, step_seconds=network.step_seconds * self.inside)


NO_CORRECTION = Correction()
_SMALL_CHANGE = 1e-3  # change of a factor by which a part's seconds are found


def seconds_of_parts(seconds: Callable[[Correction], float], correction: Correction) -> Seconds:
    """Return the seconds of each part before correction, from a price under any correction.

    >>> seconds_of_parts(lambda c: 2 * c.linear + max(c.attention, 0.5 * c.inside), Correction(linear=1.5))
    (2.0, 1.0, 0.0, 0.0)

    A price is made of sums and maxima of parts times their factors. So the seconds of a part are the derivative of the
    price by the part's factor, here from two prices close to each other. Messages that attention hides have 0.
    """
    parts: list[float] = []
    for name, factor in correction.factors().items():
        longer, shorter = (
            seconds(dataclasses.replace(correction, **{name: factor * (1 + change)}))
            for change in (_SMALL_CHANGE, -_SMALL_CHANGE)
        )
        parts.append(round((longer - shorter) / (2 * _SMALL_CHANGE * factor), 12))  # no rounding errors in place of 0
    linear, attention, inside, across = parts
    return linear, attention, inside, across


def fit_correction(parts: Sequence[Sequence[float]], seconds: Sequence[float]) -> Correction:
    """Return the correction under which parts of steps (in the order of `PARTS`) add up to measured seconds.

    >>> fit_correction([(2, 1, 0, 0), (1, 2, 0, 0), (1, 1, 0, 0)], [3.2, 3.4, 2.2])
    Correction(linear=1.0, attention=1.2, inside=1.1, across=1.1)

    The factors minimise the squared relative error of the steps, without steps that are far off. A step measures one
    number, so parts are told apart only as far as plans vary. Where plans do not tell, a factor is the median ratio of
    whole steps: every factor is drawn to that ratio, more strongly the more steps scatter, and stays within `BOUND` of
    it.
    """
    rows = [(part, measured) for part, measured in zip(parts, seconds, strict=True) if sum(part) > 0 and measured > 0]
    if not rows:
        return NO_CORRECTION
    shares = np.array([np.array(part) / sum(part) for part, _ in rows])  # (steps, parts)
    ratios = np.array([measured / sum(part) for part, measured in rows])
    common = float(np.median(ratios))
    ratios = ratios / common
    factors = np.ones(len(PARTS))
    for turn in range(ROUNDS):
        distance = np.abs(ratios - shares @ factors)
        # The standard deviation of normal errors, and above 0 where all steps fit.
        usual = max(1.4826 * float(np.median(distance)), 1e-7)
        weights = _weigh_steps(distance, usual, keep_all=turn < FIRST_ROUNDS)
        factors = _solve_within_bounds(shares, ratios, weights, pull=(usual / SPREAD) ** 2)
    return Correction.of([float(f"{factor * common:.{DIGITS}g}") for factor in factors.tolist()])


def _weigh_steps(distance: Floats, usual: float, *, keep_all: bool) -> Floats:
    """Return the weight of steps by their distance from the fit: Huber's if all are kept, else Tukey's biweight.

    Huber's is 1 up to the usual distance u and u / distance beyond; Tukey's (1 − (distance / (`OUTLIER` · u))²)², and 0
    for steps that are farther away.
    """
    if keep_all:
        return usual / np.maximum(distance, usual)
    return np.maximum(1 - (distance / (OUTLIER * usual)) ** 2, 0) ** 2


def _solve_within_bounds(shares: Floats, ratios: Floats, weights: Floats, *, pull: float) -> Floats:
    """Solve for the factors of the least weighted squares, each drawn to 1 by `pull`.

    For shares S, weights W and ratios r these solve (Sᵀ W S + pull · I) f = Sᵀ W r + pull. As long as a factor is
    beyond the bounds, the one that is farthest is set to its bound and the others are solved for again.
    """
    weighted = shares * weights[:, None]
    matrix = weighted.T @ shares + pull * np.eye(len(PARTS))
    right_side = weighted.T @ ratios + pull
    factors, free = np.ones(len(PARTS)), np.ones(len(PARTS), dtype=np.bool_)
    while free.any():
        right_side_of_free = right_side[free] - matrix[np.ix_(free, ~free)] @ factors[~free]
        factors[free] = np.linalg.solve(matrix[np.ix_(free, free)], right_side_of_free)
        beyond = np.maximum(factors / BOUND, 1 / np.maximum(factors * BOUND, 1e-9))  # 1e-9 for factors of 0 or less
        if beyond[free].max() <= 1 + 1e-9:
            break
        worst = int(np.where(free, beyond, 0).argmax())
        factors[worst], free[worst] = np.clip(factors[worst], 1 / BOUND, BOUND), False
    return factors


def mean_shares(parts: Sequence[Sequence[float]]) -> dict[Part, float]:
    """Return the mean share of each part in the steps' seconds."""
    whole = math.fsum(math.fsum(part) for part in parts) or 1.0
    return {name: math.fsum(part[i] for part in parts) / whole for i, name in enumerate(PARTS)}


def median_ratio(parts: Sequence[Sequence[float]], seconds: Sequence[float]) -> float:
    """Return the median of measured over predicted seconds of whole steps."""
    return median(measured / sum(part) for part, measured in zip(parts, seconds, strict=True) if sum(part) > 0)
