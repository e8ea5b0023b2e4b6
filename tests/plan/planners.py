"""Planners that the tests of `AsyncPlanner` send to its process: they must be importable there, and need no torch."""

import os
import signal
import sys
import time
from pathlib import Path

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Plan, plan_fixed


def plan_step(step: int, cap: int | None = None) -> Plan:
    return plan_fixed([100 + step, 50, 7 * step + 1], Layout(4), 2, max_tokens_per_slot=cap)


def noted(folder: Path, step: int, seconds: float = 0.0) -> Plan:
    time.sleep(seconds)
    with (folder / "steps").open("a") as file:
        file.write(f"{step}\n")
    return plan_step(step)


class AwkwardError(Exception):
    """An error that pickles, but does not come back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def troubled(step: int) -> object:
    """A planner that fails in another way at every step but the even ones."""
    if step == 1:
        raise PlanError("document 3 does not fit")
    if step == 3:
        raise AwkwardError(3, 4)
    if step == 5:
        sys.exit(7)
    if step == 7:
        return "no plan"
    return plan_step(step)


def dies_at_three(step: int) -> Plan:
    """A planner that is killed while it plans step 3."""
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return plan_step(step)


def names_modules(step: int) -> Plan:
    """A planner that refuses to plan where torch is loaded, or where SIGTERM would end it."""
    if "torch" in sys.modules:
        raise PlanError("torch is loaded")
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    return plan_step(step)


class CannotBeLoaded:
    """A planner that pickles, and fails where it is loaded."""

    def __call__(self, step: int) -> Plan:
        raise AssertionError

    def __reduce__(self) -> tuple[object, ...]:
        return _fail, ()


def _fail() -> None:
    raise OSError("the index of documents is not here")
