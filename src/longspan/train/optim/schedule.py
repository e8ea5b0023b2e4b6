"""The learning rate as a function of the step."""

import math
from dataclasses import dataclass

from longspan.config.sections import OptimizerSection
from longspan.errors import ConfigError

# One in so many steps decays where the steps of the decay are not given.
WSD_DECAY = 10


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rates of a run: a linear warm-up to `lr`, then a curve down to `lr · min_ratio` at the last step.

    >>> schedule = Schedule(steps=5, lr=1.0, warmup=2, min_ratio=0.0)
    >>> [round(schedule.lr_at(step), 3) for step in range(5)]
    [0.5, 1.0, 0.75, 0.25, 0.0]

    Step i of the warm-up has lr · (i + 1) / warmup, so that no step has rate 0. The curve is half a cosine, a straight
    line, none ("constant"), or that of WSD (warm-up, stable, decay): constant up to the last `decay` steps (0: a tenth
    of the steps), which are a straight line.
    """

    steps: int
    lr: float
    warmup: int = 0
    min_ratio: float = 0.1
    shape: str = "cosine"
    decay: int = 0

    @classmethod
    def of(cls, optimizer: OptimizerSection, steps: int) -> "Schedule":
        """Read the schedule of [optimizer]. Raises ConfigError for a decay that does not fit in the steps."""
        shape, decay = optimizer.schedule
        schedule = cls(
            steps=steps,
            lr=optimizer.lr,
            warmup=optimizer.warmup_steps,
            min_ratio=optimizer.min_lr_ratio,
            shape=shape,
            decay=decay,
        )
        if schedule.shape == "wsd" and schedule.warmup + schedule.decay_steps > steps:
            raise ConfigError(
                f"optimizer.warmup_steps {schedule.warmup} and {schedule.decay_steps} steps of decay "
                f"(optimizer.lr_schedule) are more than the {steps} steps of the run; shorten them, or train longer"
            )
        return schedule

    @property
    def decay_steps(self) -> int:
        """The number of steps of WSD's decay."""
        return self.decay or -(-self.steps // WSD_DECAY)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of step 0, 1, …, steps − 1; later steps have the rate of the last."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        start = self.steps - self.decay_steps if self.shape == "wsd" else self.warmup
        progress = min(1.0, max(0.0, (step - start + 1) / max(1, self.steps - start)))
        height = 1.0 - progress  # the share that is left of the way from the least rate to the peak
        if self.shape == "constant":
            height = 1.0
        elif self.shape == "cosine":
            height = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.min_ratio + (1.0 - self.min_ratio) * height)
