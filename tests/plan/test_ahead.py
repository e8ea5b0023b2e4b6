"""Plans made ahead are those made inline, whatever was asked for before; errors come where they belong."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import PlanError
from longspan.plan import Plan
from longspan.plan.plan_ahead import AsyncPlanner
from longspan.testing import run_ranks
from tests.faults.live_run import lives
from tests.plan import planners


def _wait_for(what: Callable[[], bool], seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while not (happened := what()) and time.monotonic() < until:
        time.sleep(0.02)
    return happened


@pytest.fixture(scope="module")
def plans() -> Iterator[AsyncPlanner]:
    with AsyncPlanner(planners.plan_step, ahead=2) as opened:
        yield opened


def test_the_same_plans_as_inline_in_any_order(plans: AsyncPlanner) -> None:
    inline = AsyncPlanner(planners.plan_step, ahead=0)
    for step in (0, 1, 2, 7, 8, 9, 8, 5, 5, 5, 40, 3, 41, 4, 0, 10**6):
        assert plans.plan(step) == inline.plan(step) == planners.plan_step(step)
        assert {*plans._answers} <= {step, step + 1, step + 2}  # plans of past steps are forgotten


def test_the_next_steps_are_planned_and_no_more(tmp_path: Path) -> None:
    def planned() -> list[int]:
        file = tmp_path / "steps"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    with AsyncPlanner(partial(planners.noted, tmp_path), ahead=3) as plans:
        plans.start(5)
        assert _wait_for(lambda: planned() == [5, 6, 7, 8])
        for step in (5, 5, 6, 7):
            assert plans.plan(step) == planners.plan_step(step)
        assert _wait_for(lambda: planned() == list(range(5, 11)))
        assert plans.plan(100) == planners.plan_step(100)
        assert _wait_for(lambda: planned()[6:] == [100, 101, 102, 103])
        time.sleep(0.1)
        assert len(planned()) == 10


def test_going_on_elsewhere_voids_what_was_asked_for(tmp_path: Path) -> None:
    with AsyncPlanner(partial(planners.noted, tmp_path, seconds=0.1), ahead=9) as plans:
        plans.plan(5)
        assert plans.plan(100) == planners.plan_step(100)
    planned = [int(line) for line in (tmp_path / "steps").read_text().split()]
    assert planned[0] == 5 and planned.index(100) <= 2


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_coming_plan_is_had_without_waiting_for_it(tmp_path: Path, ahead: int) -> None:
    with AsyncPlanner(partial(planners.noted, tmp_path, seconds=0.05), ahead=ahead) as plans:
        early = plans.plan_if_made(7)
        assert early == (None if ahead else planners.plan_step(7))
        assert plans.plan(7) == planners.plan_step(7) == plans.plan_if_made(7)
    planned = [int(line) for line in (tmp_path / "steps").read_text().split()]
    assert planned == sorted(set(planned))


def test_errors_come_at_the_step_that_they_belong_to() -> None:
    with AsyncPlanner(planners.troubled, ahead=8) as plans:  # pyright: ignore[reportArgumentType]
        for step in (0, 2, 4, 6, 8):
            assert plans.plan(step) == planners.plan_step(step)
        assert plans.plan_if_made(1) is None
        with pytest.raises(PlanError, match="document 3 does not fit") as caught:
            plans.plan(1)
        (note,) = caught.value.__notes__
        assert "planners.py" in note and "while planning step 1" in note
        with pytest.raises(PlanError, match=r"planner of step 3 failed with .*AwkwardError: 3 and 4"):
            plans.plan(3)
        with pytest.raises(PlanError, match="planner of step 5 failed with SystemExit: 7"):
            plans.plan(5)
        with pytest.raises(PlanError, match="returned str for step 7; it must return a Plan"):
            plans.plan(7)
        assert plans.plan(8) == planners.plan_step(8)
        assert plans.plan_if_made(1) is None
    inline = AsyncPlanner(planners.troubled, ahead=0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="returned str for step 7"):
        inline.plan(7)
    assert inline.plan_if_made(1) is None


def test_a_dead_process_is_an_error_that_names_the_step() -> None:
    with AsyncPlanner(planners.dies_at_three, ahead=3) as plans:
        plans.start(0)
        assert _wait_for(lambda: not lives(_pid(plans)))
        for step in (0, 1, 2):
            assert plans.plan(step) == planners.plan_step(step)
        with pytest.raises(PlanError, match=r"step 3 has no plan: .* was killed by signal 9 \(SIGKILL\) before step 3"):
            plans.plan(3)
        with pytest.raises(PlanError, match=r"step 4 has no plan: .* before step 3 was planned"):
            plans.plan(4)
    with AsyncPlanner(planners.plan_step, ahead=1) as plans:  # one that was idle
        plans.plan(1)
        os.kill(_pid(plans), signal.SIGKILL)
        assert _wait_for(lambda: not lives(_pid(plans)))
        with pytest.raises(PlanError, match="step 7 has no plan"):
            plans.plan(7)


def test_closing_leaves_no_process() -> None:
    with AsyncPlanner(planners.plan_step, ahead=1) as plans:
        plans.plan(0)
        pid = _pid(plans)
    assert not lives(pid)
    with pytest.raises(PlanError, match="inside a with block"):
        plans.plan(1)
    plans.close()


def _pid(plans: AsyncPlanner) -> int:
    assert plans._worker is not None
    return plans._worker.process.pid


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (lambda step: planners.plan_step(step, 5000), "cannot be sent to the process that plans ahead"),
        (planners.CannotBeLoaded(), "the index of documents is not here"),
    ],
)
def test_planners_that_do_not_arrive(planner: Callable[[int], Plan], message: str) -> None:
    with pytest.raises((PlanError, OSError), match=message), AsyncPlanner(planner, ahead=1) as plans:
        plans.plan(0)


@pytest.mark.parametrize(("step", "ahead"), [(-1, 1), (True, 0), (1.0, 1), (0, -1)])
def test_refused(step: Any, ahead: Any) -> None:
    with pytest.raises(PlanError, match=r"(step|ahead) is .*; give an integer of at least 0"):
        AsyncPlanner(planners.plan_step, ahead=ahead).plan(step)


def test_a_forked_process_gets_none_of_these_plans(plans: AsyncPlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    this_process = os.getpid()
    with monkeypatch.context() as changed:
        changed.setattr(os, "getpid", lambda: this_process + 1)
        with pytest.raises(PlanError, match=f"belong to process {this_process}, this is process {this_process + 1}"):
            plans.plan(0)


# ---- from ranks, scripts, and processes that end badly


def _plan_step_3(rank: int) -> Plan:
    """By a process without torch, which outlives signals that are meant for its parent."""
    assert "torch" in sys.modules
    current_process().daemon = rank == 1  # such a process may start none by multiprocessing
    with AsyncPlanner(planners.names_modules, ahead=rank + 1) as plans:
        return plans.plan(3)


def test_every_rank_and_a_daemonic_process_have_the_same_plans() -> None:
    assert run_ranks(_plan_step_3, 2) == [planners.plan_step(3)] * 2


_SCRIPT = """
import os, sys, time
from longspan.plan.plan_ahead import AsyncPlanner
from tests.plan import planners

def planner(step):
    return planners.plan_step(step)

def main():
    print("rank", os.environ.get("RANK"), flush=True)
    with AsyncPlanner({planner}, ahead=1) as plans:
        print(plans.plan(2) == planners.plan_step(2), plans._worker.process.pid, flush=True)
        {end}

if {guard}:
    main()
"""


def _run(folder: Path, *, planner: str = "planner", end: str = "pass", guard: str = "True") -> tuple[int, str, str]:
    """Exit code and outputs, which go to files: a process that is left behind may hold those open."""
    script, out, err = (folder / name for name in ("script.py", "out", "err"))
    script.write_text(_SCRIPT.format(planner=planner, end=end, guard=guard))
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with out.open("w") as stdout, err.open("w") as stderr:
        env, command = os.environ | {"PYTHONPATH": path, "RANK": "5"}, [sys.executable, str(script)]
        done = subprocess.run(command, check=False, stdout=stdout, stderr=stderr, timeout=60, env=env)
    return done.returncode, out.read_text(), err.read_text()


def test_a_script_without_a_guard_is_told_so_and_takes_no_rank(tmp_path: Path) -> None:
    code, out, err = _run(tmp_path)
    assert code == 1 and 'under if __name__ == "__main__"' in err
    assert [line for line in out.splitlines() if line.startswith("rank")] == ["rank 5", "rank None"]


@pytest.mark.parametrize(
    ("planner", "end"),
    [
        ("planner", "os.kill(os.getpid(), 9)"),  # one that the script defines
        ("planners.plan_step", "os._exit(0) if os.fork() else time.sleep(5)"),
    ],
)
def test_no_process_is_left_when_its_parent_ends(tmp_path: Path, planner: str, end: str) -> None:
    code, out, err = _run(tmp_path, planner=planner, end=end, guard='__name__ == "__main__"')
    assert "True" in out and code in (0, -9), err
    assert _wait_for(lambda: not lives(int(out.split()[-1])), 4)
