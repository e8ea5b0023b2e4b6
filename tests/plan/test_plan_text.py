"""The plan as text."""

from longspan.layout import Layout
from longspan.plan import Group, MicroBatch, Plan, plan_fixed


def test_a_short_plan() -> None:
    wide, narrow = Group((0, 1), (0, 1), (1000, 24)), Group((3,), (2,), (300,))
    plan = Plan(4, (1000, 24, 300), (MicroBatch((wide, narrow)), MicroBatch()), 1321, max_tokens_per_slot=600)
    expected = """
given plan, lockstep: 4 slots, 2 micro-batches, at most 600 rows a slot
  documents                3   24 to 1,000 rows, median 300
  tokens               1,324   1,321 targets
  predicted        80.123 ms   no lower bound
  priced for  Qwen3-8B on GPUs of 400 TFLOP/s
  rows used            32.3%   of slots x micro-batches x the fullest slot's 512 rows

  micro-batch   groups                    tokens   fullest slot      seconds    idle
            0   1 x cp 2, 1 x cp 1         1,324            512    70.123 ms   30.6%
            1   dummy                          0              0    10.000 ms    0.0%
"""
    assert plan.table() == expected.strip()


def test_a_long_plan_counts_the_middle() -> None:
    plan = plan_fixed([100] * 120, Layout(2), 1, max_tokens_per_slot=100)
    lines = plan.table(limit=9).splitlines()
    assert len(plan.micro_batches) == 60
    assert len(lines) == 8 + 9 + 1
    assert lines[14].strip() == "…   51 more micro-batches"
    assert [line.split()[0] for line in lines[15:]] == ["57", "58", "59"]
    assert not any("more micro-batches" in plan.table(limit=limit) for limit in (59, 60, 61))


def test_degrees_are_counted_widest_first() -> None:
    groups = tuple(Group(tuple(range(n)), (n - 1,), (5,)) for n in range(1, 7))
    plan = Plan(6, (5,) * 6, (MicroBatch(groups),), 24)
    line = plan.table().splitlines()[-1]
    assert "1 x cp 6, 1 x cp 5, 1 x cp 4, 1 x cp 3, 2 more" in line


def test_no_documents() -> None:
    text = plan_fixed([], Layout(2), 1).table()
    assert "none" in text and "dummy" in text
