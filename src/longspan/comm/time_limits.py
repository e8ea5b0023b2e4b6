"""How long ranks wait for each other before one that is missing is named, where a plan predicts what they do.

That is `run.timeout_seconds` of `longspan train` and `longspan eval`, and what trainers do. A number holds everywhere.
With "auto" a step may last ten times as long as it is predicted to, or as the last steps did in the median where that
is longer, and at least 60 s; an evaluation likewise. `LONG` holds where nothing is predicted, and where ranks wait for
work of one of them: set-up, the first two steps and the first evaluation of each set, which compile kernels,
checkpoints and saved models, loggers that upload, and all of a run whose plans are priced for another machine, as on
CPUs. Work of one rank that sends signs of life (`leave_together`) may last as long as it takes. `set_timeout` sets the
limit of a rank's collectives, on which all of this rests.
"""

import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median

from longspan.comm.world import World, open_worlds

LEAST, TIMES, LONG = 60.0, 10.0, 600.0  # seconds, multiples of the predicted time, seconds
FIRST_STEPS = 2  # of a session, in which kernels are compiled
MEASURED = 20  # steps whose median counts


def set_timeout(world: World, seconds: float) -> None:
    """Set how long this rank waits for the others in collectives that start from now on.

    >>> set_timeout(world, 60)

    Each rank may do so on its own. The seconds count for every open world of the same `timeout` too, as these worlds
    share communicators; a world that is opened later begins with its own `timeout`.
    """
    for open_world in open_worlds():
        if open_world.timeout == world.timeout:
            open_world.watch.timeout = float(seconds)
            open_world.process_groups.set_timeout(seconds)


@contextmanager
def longer_timeout(world: World, seconds: float) -> Iterator[None]:
    """Let this rank wait for the others for at least `seconds` inside, as while one of them writes a file.

    >>> with longer_timeout(world, 600):
    ...     world.control.barrier("the last rank has written")
    """
    usual_timeout = world.watch.timeout
    if seconds > usual_timeout:
        set_timeout(world, seconds)
    try:
        yield
    finally:
        if seconds > usual_timeout and world in open_worlds():
            set_timeout(world, usual_timeout)


def longest_wait(timeout: float | str) -> float:
    """Return the seconds that a world begins with: `run.timeout_seconds`, or under "auto" the longest limit."""
    return LONG if isinstance(timeout, str) else timeout


class TimeLimits:
    """The limits of one session over plans: of `longspan train`, of a trainer, or of a loop of one's own.

    >>> limits = TimeLimits(world)
    >>> with limits.around_step(plan.predicted_seconds):
    ...     run_step(model, plan, documents, world)

    Unless `is_automatic`, the world's own time-out holds: for a time-out that is a number, and for plans priced for
    other devices than those that run them. With `has_loggers` a step's end has the longest limit.
    """

    def __init__(self, world: World, *, is_automatic: bool = True, has_loggers: bool = False) -> None:
        """Begin a session of no steps, whose first ones have the longest limit."""
        self._world, self._is_automatic, self._has_loggers = world, is_automatic, has_loggers
        self._steps = deque[float](maxlen=MEASURED)  # seconds of the last usual steps
        self._steps_begun, self._step_limit = 0, LONG  # steps begun, and the limit of the current one in seconds
        self._evaluation_seconds = dict[Hashable, float]()  # seconds of the last evaluation with the same kernels

    @contextmanager
    def around_step(self, predicted: float, *, is_usual: bool = True) -> Iterator[None]:
        """Bound how long ranks wait within one step that is predicted to take `predicted` seconds.

        The first steps have the longest limit. Their time, and that of a step that is not `is_usual`, such as a
        profiled one, does not count for later limits.
        """
        self._steps_begun += 1
        is_known = self._steps_begun > FIRST_STEPS
        self._step_limit = TIMES * max([predicted, *self._step_seconds()]) if is_known else LONG
        started = time.monotonic()
        with self._limit_waits(self._step_limit):
            yield
        if is_known and is_usual:
            self._steps.append(time.monotonic() - started)

    def around_end_of_step(self) -> AbstractContextManager[None]:
        """Return a context for what ranks do after a step, when a logger of the first rank may upload its row."""
        return self._limit_waits(LONG if self._has_loggers else self._step_limit)

    @contextmanager
    def around_evaluation(self, key: Hashable, predicted: float) -> Iterator[None]:
        """Bound how long ranks wait within an evaluation that is predicted to take `predicted` seconds.

        `key` is that of evaluations which run the same kernels; the first of them has the longest limit.
        """
        seconds = self._evaluation_seconds.get(key)
        started = time.monotonic()
        with self._limit_waits(LONG if seconds is None else TIMES * max(predicted, seconds)):
            yield
        self._evaluation_seconds[key] = time.monotonic() - started

    def _step_seconds(self) -> list[float]:
        """Return the median of the last usual steps, in seconds; an empty list before the first."""
        return [median(self._steps)] if self._steps else []

    def _limit_waits(self, seconds: float) -> AbstractContextManager[None]:
        """Return a context in which ranks wait so long, at least `LEAST`; if not automatic, the world's limit stays."""
        return self._set_limit(max(LEAST, seconds)) if self._is_automatic else nullcontext()

    @contextmanager
    def _set_limit(self, seconds: float) -> Iterator[None]:
        """Let ranks wait for each other for these seconds within the context."""
        usual_timeout = self._world.watch.timeout
        set_timeout(self._world, seconds)
        try:
            yield
        finally:  # after an error too, as the run then saves a checkpoint before it ends
            set_timeout(self._world, usual_timeout)
