"""How long ranks wait for each other, in each part of a run, an evaluation or a loop over plans."""

from types import SimpleNamespace
from typing import Any

import pytest

from longspan.comm import time_limits
from longspan.comm.time_limits import LEAST, LONG, TimeLimits, longest_wait


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


def limits_of(
    *, is_automatic: bool = True, timeout: float | str = "auto", loggers: bool = False
) -> tuple[TimeLimits, Any]:
    """The limits of a session, and the watch of its world."""
    watch = SimpleNamespace(timeout=longest_wait(timeout))
    world: Any = SimpleNamespace(watch=watch)
    return TimeLimits(world, is_automatic=is_automatic, has_loggers=loggers), watch


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


@pytest.mark.parametrize("timeout", ["auto", 25.0, 1800.0], ids=["no price", "a number", "a longer one"])
def test_one_limit_where_nothing_is_predicted_or_a_number_is_given(clock: Clock, timeout: float | str) -> None:
    limits, watch = limits_of(is_automatic=False, timeout=timeout)
    limit = longest_wait(timeout)
    assert {limit_of_step(limits, watch, clock, 1.0, 1.0) for _ in range(4)} == {(limit, limit)}
    for _ in range(2):
        with limits.around_evaluation("books", 1.0):
            assert watch.timeout == limit == (LONG if timeout == "auto" else timeout)


def test_a_logger_may_take_its_time_after_a_step(clock: Clock) -> None:
    limits, watch = limits_of(loggers=True)
    assert [limit_of_step(limits, watch, clock, 1.0, 1.0) for _ in range(3)][-1] == (LEAST, LONG)


def test_an_evaluation_is_limited_by_its_prediction_and_the_one_before_it(clock: Clock) -> None:
    limits, watch = limits_of()
    for key, predicted, seconds, limit in (
        ("books", 50.0, 12.0, LONG),
        ("books", 50.0, 80.0, 500.0),
        ("books", 50.0, 1.0, 800.0),
        ("code", 50.0, 1.0, LONG),
        ("code", 2.0, 1.0, LEAST),
    ):
        with limits.around_evaluation(key, predicted):
            assert watch.timeout == limit
            clock.now += seconds
    with pytest.raises(ValueError, match="stopped"), limits.around_evaluation("books", 50.0):
        raise ValueError("stopped")
    assert watch.timeout == LONG, "after an evaluation that was stopped, too"
