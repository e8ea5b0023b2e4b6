"""Plans in which every micro-batch has the groups that suit its documents, of any degree.

`planner.py` makes plans in several ways and takes the fastest. `lockstep.py` searches for the durations of
micro-batches, `free.py` plans without a barrier between them. `problem.py` has items, blocks and free slots.

>>> from longspan.layout import Layout
>>> plan = plan_dynamic([20000, 7000, 6000, 5000], Layout(ranks=16), max_tokens_per_slot=8192)
>>> [(len(group.slots), group.lengths) for group in plan.micro_batches[0].groups]
[(2, (5000,)), (3, (7000,)), (3, (6000,)), (8, (20000,))]
"""

from longspan.plan.dynamic.planner import plan_dynamic

__all__ = ["plan_dynamic"]
