"""The learning rate of every step, by the schedule's shape."""

import math

import pytest

from longspan.config.sections import TrainConfig
from longspan.errors import ConfigError
from longspan.train.optim.schedule import Schedule, Shape


@pytest.mark.parametrize(
    ("step", "wanted"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 6))), (9, 0.1), (20, 0.1)],
)
def test_warm_up_then_cosine(step: int, wanted: float) -> None:
    assert Schedule(steps=10, warmup=4, lr=1.0, min_ratio=0.1).lr_at(step) == pytest.approx(wanted, rel=1e-12)


def test_schedule_falls_after_the_warm_up_and_is_never_zero() -> None:
    rates = [Schedule(steps=300, warmup=20, lr=6e-3).lr_at(step) for step in range(300)]
    assert rates[:20] == sorted(rates[:20]) and rates[19:] == sorted(rates[19:], reverse=True)
    assert min(rates) > 0 and max(rates) == 6e-3
    assert Schedule(steps=1, lr=1.0, min_ratio=0.5).lr_at(0) == 0.5
    assert Schedule(steps=1, lr=1.0, warmup=1).lr_at(0) == 1.0


SHAPES: dict[Shape, list[float]] = {
    "cosine": [0.5, 1.0, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.5 - 0.25 * math.sqrt(2), 0.0],
    "linear": [0.5, 1.0, 0.75, 0.5, 0.25, 0.0],
    "constant": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0],
    "wsd": [0.5, 1.0, 1.0, 1.0, 0.5, 0.0],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_after_the_warm_up(shape: Shape) -> None:
    decay = 2 if shape == "wsd" else 0
    schedule = Schedule(steps=6, lr=1.0, warmup=2, min_ratio=0.0, shape=shape, decay=decay)
    assert [schedule.lr_at(step) for step in range(6)] == pytest.approx(SHAPES[shape], abs=1e-12)


def test_the_decay_of_wsd_is_a_tenth_unless_given_and_longer_runs_share_what_comes_before() -> None:
    short, long = (Schedule(steps=steps, lr=2.0, warmup=3, min_ratio=0.1, shape="wsd") for steps in (40, 400))
    assert (short.decay_steps, long.decay_steps) == (4, 40)
    assert [short.lr_at(step) for step in range(36)] == [long.lr_at(step) for step in range(36)]
    assert short.lr_at(39) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"schedule": "cosine", "decay_steps": 5}, 'decay_steps is 5 and train.schedule is "cosine"'),
        (
            {"schedule": "wsd", "steps": 20, "warmup_steps": 15, "decay_steps": 6},
            "15 and 6 steps of decay .* than the 20",
        ),
        ({"schedule": "wsd", "steps": 20, "warmup_steps": 19}, "19 and 2 steps of decay"),
    ],
)
def test_decays_that_have_no_place(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule.of(TrainConfig(**keys))  # type: ignore[arg-type]
