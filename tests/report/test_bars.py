"""A plan as bars: every document where it belongs, for as long as it takes, and nothing twice."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.plan import Group, MicroBatch, Plan
from longspan.report.gantt import plan_bars
from tests.plan.cases import bounded, plans
from tests.report.runs import mixed_plan


def _covered(plan: Plan, unit: str) -> dict[tuple[int, int], float]:
    """The length of all bars of a slot in a micro-batch; no two of them overlap."""
    places: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for bar in plan_bars(plan, unit=unit).bars:  # pyright: ignore[reportArgumentType]
        for slot in range(bar.slot, bar.slot + bar.slots):
            places.setdefault((bar.micro_batch, slot), []).append((bar.start, bar.stop))
    total = {}
    for key, spans in places.items():
        spans.sort()
        assert all(b[0] >= a[1] - 1e-9 * (1 + a[1]) for a, b in pairwise(spans))
        total[key] = sum(stop - start for start, stop in spans)
    return total


@bounded
@given(st.one_of(plans("lockstep"), plans("free")))
def test_bars_in_time_add_up_to_each_slot_s_work(plan: Plan) -> None:
    times, seconds = plan.timeline(), _covered(plan, "seconds")
    work = times.busy - plan.cost.micro_batch_seconds * (times.busy > 0)
    assert all(length == pytest.approx(work[place], rel=1e-9) for place, length in seconds.items())
    assert {(m, s) for m, s in np.argwhere(work > 1e-12).tolist()} <= seconds.keys()
    assert plan_bars(plan).end == pytest.approx(times.step_seconds)


@bounded
@given(plans())
def test_bars_in_rows_add_up_and_every_document_is_on_its_group_s_slots_once(plan: Plan) -> None:
    lengths, rows = _covered(plan, "rows"), np.zeros((len(plan.micro_batches), plan.slots))
    for m, batch in enumerate(plan.micro_batches):
        for group in batch.groups:
            rows[m, list(group.slots)] += group.rows_per_slot
    assert all(lengths[m, s] == pytest.approx(rows[m, s]) for m, s in np.argwhere(rows > 0).tolist())
    slots: dict[int, list[int]] = {}
    for bar in plan_bars(plan).bars:
        slots.setdefault(bar.document, []).extend(range(bar.slot, bar.slot + bar.slots))
    groups = [group for batch in plan.micro_batches for group in batch.groups]
    assert {d: sorted(s) for d, s in slots.items()} == {d: sorted(g.slots) for g in groups for d in g.documents}


def test_a_long_document_is_one_bar_over_its_slots() -> None:
    wide, short = Group((0, 1, 2, 3), (0,), (9000,)), Group((2,), (1,), (50,))
    plan = Plan(4, (9000, 50), (MicroBatch((short, wide)),), 9048)  # the short one comes first in the plan
    bars = {bar.document: bar for bar in plan_bars(plan).bars}
    assert (bars[0].slot, bars[0].slots) == (0, 4)
    assert bars[1].start == bars[0].stop


def test_thinning_keeps_large_bars_and_counts_the_others() -> None:
    plan = mixed_plan(256)
    picture = plan_bars(plan)
    bars, summaries = picture.select_bars(1000 / picture.end, 600 / 256, limit=300)
    assert 0 < len(bars) <= 300 and all(bar.slots >= 2 for bar in bars)
    drawn = {bar.document for bar in bars}
    left = [d for d in range(len(plan.lengths)) if d not in drawn]
    assert sum(part.documents for part in summaries) == len(left)
    assert sum(part.tokens for part in summaries) == sum(plan.lengths[d] for d in left)
    everything, none = picture.select_bars(1e6, 100, limit=10**6)
    assert len(everything) == len(picture.bars) and not none
