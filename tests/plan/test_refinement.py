"""Refinement: a correction prices plans from fixed steps on, and a checkpoint keeps all that later ones follow from."""

import json

import pytest

from longspan.errors import PlanError
from longspan.plan import Cost
from longspan.plan.cost.correction import NO_CORRECTION, Correction
from longspan.plan.refinement import EVERY, MOST_AHEAD, WINDOW, MeasuredStep, Refinement


def steps_of(refinement: Refinement, steps: range) -> list[Correction]:
    """The corrections of steps whose attention takes twice as long as predicted, refined as a run does it."""
    corrections = []
    for step in steps:
        if refinement.lacks_correction(step):
            refinement.put_correction(step, refinement.fit_last_steps())
        refinement.correction_of(step + 1 + MOST_AHEAD)  # plans are made ahead
        corrections.append(refinement.correction_of(step))
        attention = 0.2 + 0.1 * (step % 5)
        refinement.note_step(MeasuredStep(step, 1.0 + 2 * attention, (1.0, attention, 0.0, 0.0)))
    return corrections


def kept(refinement: Refinement) -> Refinement:
    found = Refinement.from_json(json.loads(json.dumps(refinement.to_json())), Cost())
    assert found is not None
    return found


def test_a_correction_begins_a_period_after_the_steps_it_is_fitted_to() -> None:
    corrections = steps_of(Refinement(Cost()), range(3 * EVERY))
    assert corrections[: 2 * EVERY] == [NO_CORRECTION] * 2 * EVERY
    assert set(corrections[2 * EVERY :]) == {Correction(linear=1.0, attention=2.0, inside=1.286, across=1.286)}


@pytest.mark.parametrize("stop", [1, 9, 10, 11, 15, 20, 25, 39])
def test_a_refinement_that_was_kept_goes_on_as_one_that_never_stopped(stop: int) -> None:
    straight, first = Refinement(Cost()), Refinement(Cost())
    wanted = steps_of(straight, range(45))
    found = steps_of(first, range(stop))
    second = kept(first)
    assert found + steps_of(second, range(stop, 45)) == wanted
    assert second.to_json() == straight.to_json()


def test_a_window_of_steps_counts_and_parts_that_they_lack_are_not_shown() -> None:
    refinement = Refinement(Cost())
    assert refinement.ratios() == {}
    steps_of(refinement, range(WINDOW + 30))
    assert len(refinement.to_json()["steps"]) == WINDOW
    assert refinement.ratios() == {"whole": 1.286, "linear": 1.0, "attention": 2.0}


def test_what_was_kept_for_another_cost_or_is_damaged() -> None:
    values = Refinement(Cost()).to_json()
    assert Refinement.from_json(values, Cost(linear_seconds=1.0)) is None
    for wrong in (None, {}, values | {"steps": [[1, 2.0, [1.0]]]}, values | {"corrections": {"0": {}}}):
        with pytest.raises(PlanError, match=r"refinement|correction"):
            Refinement.from_json(wrong, Cost())
    with pytest.raises(PlanError, match="the correction of step 35 is not known; those of steps 0 to 9, 10 to 19 are"):
        Refinement(Cost()).correction_of(35)
    assert Refinement(Cost(), first=47).correction_of(55) == NO_CORRECTION
