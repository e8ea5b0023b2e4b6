"""Refinement in a run: who fits the corrections of its prices, and what is recorded of them.

The first rank notes the seconds of its steps, which are those of the slowest rank, as all wait for it at the end of a
step. What it fits is sent to all ranks every `EVERY` steps, so that all price plans by the same numbers.
"""

from typing import Any

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank
from longspan.config.plan_section import ONE_DEGREE
from longspan.config.sections import RunConfig
from longspan.errors import CheckpointError, PlanError
from longspan.plan import Cost, Plan
from longspan.plan.cost.correction import Correction, seconds_of_parts
from longspan.plan.refinement import MeasuredStep, Refinement
from longspan.run.run_data import TrainingRun
from longspan.train.plans import PlanChoice

STATE = "refinement"  # in the state of a checkpoint
ROW = "correction_"  # and the name of a part: columns of metrics


def refinement_of_run(
    config: RunConfig, cost: Cost, state: dict[str, Any], world: World, log: LogLine
) -> Refinement | None:
    """Return the refinement of a run that begins, or goes on from the state of a checkpoint.

    It is None if `run.refine` is "off" or, under "auto", on CPUs and where all plans have one degree. It begins anew,
    with a line in the log, where the checkpoint's was of another cost. Raises CheckpointError for a damaged one.
    """
    refine, dynamic = config.run.refine, config.context.planner not in ONE_DEGREE
    if refine == "off" or (refine == "auto" and not (dynamic and world.device.type == "cuda")):
        return None
    if STATE not in state:
        return Refinement(cost, first=int(state.get("step", 0)))
    try:
        refinement = Refinement.from_json(state[STATE], cost)
    except PlanError as error:
        raise CheckpointError(f"{error}; set run.refine to 'off' to go on without it") from error
    if refinement is None:
        log("plans are priced by another cost than before: what was refined by measured steps is left out")
        return Refinement(cost, first=int(state["step"]))
    return refinement


def refine_prices(run: TrainingRun, step: int) -> None:
    """Fit the correction that prices the plans of the next block of `EVERY` steps, if it is missing.

    Entered by all ranks before a step, counted from 0. It is missing when a new block begins (`plan/refinement.py`).
    """
    refinement = run.refinement
    if refinement is None or not refinement.lacks_correction(step):
        return
    fitted = refinement.fit_last_steps() if is_first_rank(run.world) else None
    correction = run.world.control.broadcast_object(fitted, what="correction of prices")
    assert correction is not None
    refinement.put_correction(step, correction)


def note_step(run: TrainingRun, plan: Plan, step: int, seconds: float) -> None:
    """Note the measured seconds of a step (counted from 0) next to those predicted by part, on the first rank.

    `seconds` are without the encoders. The first step of a session is left out: kernels are loaded in it.
    """
    if run.refinement is None or not is_first_rank(run.world) or step == run.done:
        return
    choice, home, correction = run.choice, run.world.home, run.refinement.correction_of(step)
    parts = seconds_of_parts(lambda factors: _plan_seconds(plan, choice, factors, home), correction)
    run.refinement.note_step(MeasuredStep(step, seconds, parts))


def _plan_seconds(plan: Plan, choice: PlanChoice, correction: Correction, home: Any) -> float:
    """Return the seconds that a plan is predicted to take under the run's prices with a correction."""
    cost = choice.apply_correction(correction).home_options(home).cost
    return plan.timeline(cost).step_seconds


def correction_columns(run: TrainingRun, step: int) -> dict[str, float]:
    """Return the correction that priced the plan of a step, for its row of metrics; none without refinement."""
    if run.refinement is None:
        return {}
    return {f"{ROW}{name}": factor for name, factor in run.refinement.correction_of(step).factors().items()}
