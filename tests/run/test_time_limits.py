"""`run.timeout_seconds`: how long ranks of a run wait for each other, in each part of it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from longspan.config.sections import RunConfig
from longspan.run import time_limits
from longspan.run.time_limits import LEAST, LONG, TimeLimits, longest_wait


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_limits, "time", clock)
    monkeypatch.setattr(time_limits, "set_timeout", lambda world, seconds: setattr(world.watch, "timeout", seconds))
    return clock


def limits_of(*, is_priced: bool = True, **run: Any) -> tuple[TimeLimits, Any]:
    """The limits of a run, and the watch of its world."""
    config = RunConfig()
    config = replace(config, run=replace(config.run, **run))
    watch = SimpleNamespace(timeout=longest_wait(config))
    world: Any = SimpleNamespace(watch=watch)
    return TimeLimits(config, world, is_priced=is_priced), watch


def limit_of_step(
    limits: TimeLimits, watch: Any, clock: Clock, predicted: float, seconds: float
) -> tuple[float, float]:
    """The limit in a step that takes so many seconds, and after it."""
    with limits.around_step(predicted):
        within = watch.timeout
        clock.now += seconds
    with limits.around_end_of_step():
        return within, watch.timeout


def test_steps_after_the_first_two_are_limited_by_their_prediction(clock: Clock) -> None:
    limits, watch = limits_of()
    assert [limit_of_step(limits, watch, clock, 20.0, 100.0) for _ in range(2)] == [(LONG, LONG)] * 2
    assert limit_of_step(limits, watch, clock, 20.0, 1.0) == (200.0, 200.0)
    assert limit_of_step(limits, watch, clock, 3.0, 1.0) == (LEAST, LEAST), "at least a minute"
    assert watch.timeout == LONG, "around steps: saves, set-up, the end of the run"


def test_steps_that_are_slower_than_predicted_get_more(clock: Clock) -> None:
    limits, watch = limits_of()
    seconds = [limit_of_step(limits, watch, clock, 1.0, 30.0)[0] for _ in range(4)]
    assert seconds == [LONG, LONG, LEAST, 300.0]


@pytest.mark.parametrize(
    ("is_priced", "run", "limit"),
    [(False, {}, LONG), (True, {"timeout_seconds": 25.0}, 25.0), (False, {"timeout_seconds": 1800.0}, 1800.0)],
    ids=["no price", "a number", "a longer one"],
)
def test_one_limit_where_nothing_is_predicted_or_a_number_is_given(
    clock: Clock, is_priced: bool, run: dict[str, Any], limit: float
) -> None:
    limits, watch = limits_of(is_priced=is_priced, **run)
    assert {limit_of_step(limits, watch, clock, 1.0, 1.0) for _ in range(4)} == {(limit, limit)}
    with limits.around_evaluation("books"):
        assert watch.timeout == limit


def test_a_logger_may_take_its_time_after_a_step(clock: Clock) -> None:
    limits, watch = limits_of(loggers=("wandb",))
    assert [limit_of_step(limits, watch, clock, 1.0, 1.0) for _ in range(3)][-1] == (LEAST, LONG)


def test_an_evaluation_is_limited_by_the_one_before_it(clock: Clock) -> None:
    limits, watch = limits_of()
    evaluation: Any = SimpleNamespace(plan=SimpleNamespace(predicted_seconds=50.0), seconds=12.0)
    for key, limit in (("books", LONG), ("books", 500.0), ("code", LONG)):
        with limits.around_evaluation(key):
            assert watch.timeout == limit
        limits.note_evaluation(key, evaluation)
    with pytest.raises(ValueError, match="stopped"), limits.around_evaluation("books"):
        raise ValueError("stopped")
    assert watch.timeout == LONG, "after an evaluation that was stopped, too"
