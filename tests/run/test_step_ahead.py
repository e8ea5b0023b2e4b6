"""The next step is planned and its documents are selected while the device computes, before the host reads its sums."""

from pathlib import Path
from typing import Any

import pytest

from longspan.config.sections import RunConfig
from longspan.data.step_order import StepOrder
from longspan.plan import Plan, PlanAhead
from longspan.testing import run_ranks
from longspan.train.step_end import StepEnd
from tests.train.small import small_config, train_rank

STEPS, ABSENT = 4, 2  # documents of one step are not to be had when they are first selected


def _events(rank: int, config: RunConfig) -> list[str]:
    """What the host does in a run, in its order."""
    events = list[str]()
    plan_inline, select, make_sums = PlanAhead._plan_inline, StepOrder.select, StepEnd._make_sums

    def note_plan(plans: PlanAhead, step: int) -> Plan:
        if plans._made_inline is None or plans._made_inline[0] != step:
            events.append(f"plan {step}")
        return plan_inline(plans, step)

    def note_documents(order: StepOrder, corpus: Any, step: int) -> Any:
        events.append(f"documents {step}")
        if step == ABSENT and events.count(f"documents {step}") == 1:
            raise OSError("the disk does not answer")
        return select(order, corpus, step)

    def note_sums(*arguments: Any) -> Any:
        events.append("sums")
        return make_sums(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PlanAhead, "_plan_inline", note_plan)
        patched.setattr(StepOrder, "select", note_documents)
        patched.setattr(StepEnd, "_make_sums", note_sums)
        train_rank(rank, config, 1)
    return events[events.index("documents 0") :]


def test_the_next_step_is_prepared_before_the_sums_of_a_step_are_read(tmp_path: Path) -> None:
    degrees = {"context__context_parallel_size": 1, "context__eval_context_parallel_size": 1}
    config = small_config(tmp_path, train__steps=STEPS, train__eval_every=0, **degrees)
    (events,) = run_ranks(_events, 1, config)
    assert events[: events.index("sums") + 1][-3:] == ["plan 1", "documents 1", "sums"]
    assert [event for event in events if event != "plan 0"] == [
        *("documents 0", "plan 1", "documents 1", "sums"),
        *("plan 2", "documents 2", "sums"),  # an error is left to the step, which selects again
        *("documents 2", "plan 3", "documents 3", "sums"),
        "sums",
    ]
