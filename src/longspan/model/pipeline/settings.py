"""The settings of a pipeline as a value: which stages each rank holds, and how many micro-batches a step takes."""

from dataclasses import dataclass
from typing import Literal, get_args

from longspan.errors import PlanError

ScheduleName = Literal["gpipe", "1f1b", "zero_bubble", "zbv"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


@dataclass(frozen=True)
class PipelineSettings:
    """A schedule over `pp` ranks that hold `virtual_stages` stages each.

    >>> PipelineSettings("1f1b", pp=2, virtual_stages=2).stages_at(1)
    (1, 3)

    Raises PlanError for an unknown schedule, or one that cannot have so many stages a rank.
    """

    schedule: str = "1f1b"
    pp: int = 1
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        count = self.virtual_stages
        if self.schedule not in SCHEDULES:
            raise PlanError(f"pipeline_schedule is {self.schedule!r}; use {', '.join(SCHEDULES)}")
        if count < 1:
            raise PlanError(f"virtual_stages is {count}; a rank holds at least one pipeline stage")
        if self.pp == 1 and count > 1:
            raise PlanError(f"virtual_stages is {count} with pp 1; interleaved stages need a pipeline: use pp 2")
        if self.is_folded and count != 2:
            raise PlanError(
                f"pipeline_schedule 'zbv' folds two stages onto each rank, virtual_stages is {count}; use 2, or "
                "'zero_bubble'"
            )

    @property
    def stages(self) -> int:
        """The number of stages, over all pipeline positions."""
        return self.pp * self.virtual_stages

    @property
    def is_folded(self) -> bool:
        """Whether stages go down the pipeline positions and up again, so that the first holds the last stage too."""
        return self.schedule == "zbv"

    @property
    def loss_place(self) -> int:
        """The pipeline position of the ranks that hold the last stage."""
        return 0 if self.is_folded else self.pp - 1

    def stages_at(self, place: int) -> tuple[int, ...]:
        """Return the stages, in model order, that the ranks at pipeline position `place` (from 0) hold.

        Every pp-th stage; with "zbv" one from the front and one from the back.
        """
        if self.is_folded:
            return place, self.stages - 1 - place
        return tuple(range(place, self.stages, self.pp))

    @property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every stage, in model order."""
        positions = {stage: place for place in range(self.pp) for stage in self.stages_at(place)}
        return tuple(positions[stage] for stage in range(self.stages))

    def enough_micro_batches(self, count: int) -> int:
        """Return the least number of micro-batches, `count` or more, that a training step can take; dummies are added.

        torch's interleaved schedules run n micro-batches in n // pp rounds of equal size (one round if n is below pp),
        and raise an error where that number of rounds does not divide n.
        """
        in_rounds = self.schedule == "zero_bubble" or (self.schedule == "1f1b" and self.virtual_stages > 1)
        if self.pp > 1 and in_rounds:
            return next(n for n in range(count, count + self.pp) if n % max(1, n // self.pp) == 0)
        return count
