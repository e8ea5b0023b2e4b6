"""Refinement: corrections of a run's prices by the seconds of its steps, at fixed steps, kept with its checkpoints.

Every `EVERY` steps a correction is fitted to the last steps. It prices the plans that begin `EVERY` steps later: until
then plans that were made ahead are used up. So the correction of a step follows from what the checkpoint holds, and a
run that resumes has the plans of one that never stopped, however early they are made. No torch, no ranks: the first
rank's fit is the others' too (`run/refining.py`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from longspan.errors import PlanError
from longspan.plan.cost.correction import (
    NO_CORRECTION,
    PARTS,
    Correction,
    Part,
    Seconds,
    fit_correction,
    mean_shares,
    median_ratio,
)
from longspan.plan.cost.cost import Cost

EVERY = 10  # steps between corrections, and until one prices plans
MOST_AHEAD = EVERY - 1  # steps whose plans may be made ahead
WINDOW = 100  # steps that a correction is fitted to
LEAST_STEPS = 5  # that a correction needs
SHOWN = 0.01  # least share of a part that is shown: what steps do not have, they do not measure


class MeasuredStep(NamedTuple):
    """The seconds of a step, and what the cost predicts of each part without a correction."""

    step: int
    seconds: float
    parts: Seconds


class Refinement:
    """The corrections of a run whose plans are priced by `cost`, refined from step `first` on.

    >>> refinement = Refinement(Cost())
    >>> refinement.note_step(MeasuredStep(0, 2.5, (1.5, 0.5, 0.0, 0.0)))
    >>> refinement.correction_of(0) == Correction()
    True
    """

    def __init__(self, cost: Cost, *, first: int = 0) -> None:
        """Begin with no correction for two blocks of `EVERY` steps: the one that has the step `first`, and the next.

        Of `cost` only a hash is kept, by which a checkpoint's refinement is known to be of the same cost.
        """
        self.cost: str = hashlib.sha256(json.dumps(cost.to_json(), sort_keys=True).encode()).hexdigest()
        self._steps: list[MeasuredStep] = []
        block = first // EVERY
        self._corrections = {block: NO_CORRECTION, block + 1: NO_CORRECTION}  # by step // EVERY

    def correction_of(self, step: int) -> Correction:
        """Return the correction that prices the plan of a step. Raises PlanError for a step that is too far ahead."""
        try:
            return self._corrections[step // EVERY]
        except KeyError:
            known = ", ".join(f"{EVERY * block} to {EVERY * block + EVERY - 1}" for block in self._corrections)
            raise PlanError(f"the correction of step {step} is not known; those of steps {known} are") from None

    def note_step(self, measured: MeasuredStep) -> None:
        """Keep a step's seconds for fits, and forget all steps but the last `WINDOW`."""
        self._steps = [*self._steps[1 - WINDOW :], measured]

    def fit_last_steps(self) -> Correction:
        """Fit a correction to the steps that are kept; if these are fewer than LEAST_STEPS, return the newest one."""
        if len(self._steps) < LEAST_STEPS:
            return self._corrections[max(self._corrections)]
        return fit_correction(*self._step_columns())

    def lacks_correction(self, done: int) -> bool:
        """Return whether, after `done` steps, plans from the next multiple of `EVERY` on have no correction yet."""
        return done // EVERY + 1 not in self._corrections

    def put_correction(self, done: int, correction: Correction) -> None:
        """Let a correction that is fitted after `done` steps price plans from the next multiple of `EVERY` on.

        Corrections of blocks of steps that are over are forgotten.
        """
        block = done // EVERY
        self._corrections = {b: c for b, c in self._corrections.items() if b >= block} | {block + 1: correction}

    def _step_columns(self) -> tuple[Sequence[Seconds], Sequence[float]]:
        """Return the predicted seconds by part, and the measured seconds, of all steps that are kept."""
        return [step.parts for step in self._steps], [step.seconds for step in self._steps]

    def ratios(self) -> dict[Part | str, float]:
        """Return the ratios of measured to predicted seconds: of the "whole" step, and of each part of the last steps.

        {} before LEAST_STEPS steps. Parts of less than `SHOWN` of the time are left out.
        """
        if len(self._steps) < LEAST_STEPS:
            return {}
        parts, seconds = self._step_columns()
        shares, factors = mean_shares(parts), fit_correction(parts, seconds).factors()
        ratio_of_all: dict[Part | str, float] = {"whole": float(f"{median_ratio(parts, seconds):.4g}")}
        return ratio_of_all | {name: factors[name] for name in PARTS if shares[name] >= SHOWN}

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; `from_json` gives an equal refinement back."""
        corrections = {str(block): correction.factors() for block, correction in self._corrections.items()}
        return {"cost": self.cost, "corrections": corrections, "steps": self._steps}

    @classmethod
    def from_json(cls, values: Any, cost: Cost) -> "Refinement | None":
        """Read the refinement that a checkpoint kept; None if it corrects the predictions of another cost.

        Raises PlanError for values that `to_json` cannot have written.
        """
        refinement = cls(cost)
        try:
            if values["cost"] != refinement.cost:
                return None
            corrections = cast(Mapping[str, Any], values["corrections"])
            refinement._corrections = {
                int(block): Correction.from_json(correction) for block, correction in corrections.items()
            }
            steps = [(int(step), float(seconds), tuple(map(float, parts))) for step, seconds, parts in values["steps"]]
            if any(len(parts) != len(PARTS) for *_, parts in steps):
                raise ValueError(f"a step has other parts than {', '.join(PARTS)}")
            refinement._steps = [MeasuredStep(step, seconds, cast(Seconds, parts)) for step, seconds, parts in steps]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"the refinement that a checkpoint kept cannot be read: {error!r}") from error
        return refinement
