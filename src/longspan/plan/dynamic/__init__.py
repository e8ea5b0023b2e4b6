"""Plans in which every micro-batch has the groups that suit its documents, of any degree.

`problem` sees documents and slots as numbers; `shelves` places documents for wanted durations of the micro-batches, with
`degrees` and `slots`; `targets` searches those durations; `free` plans without a barrier between micro-batches; `cells`
and `emit` turn what they found into groups. What a plan costs is priced by `plan.evaluate`, not here.

>>> from longspan.layout import Layout
>>> plan = plan_dynamic([5000, 600, 500, 400], Layout(ranks=8), max_tokens_per_slot=1024)
>>> [(len(group.slots), group.lengths) for group in plan.micro_batches[0].groups]
[(1, (400,)), (1, (500,)), (1, (600,)), (5, (5000,))]
"""

from longspan.plan.dynamic.planner import plan_dynamic

__all__ = ["plan_dynamic"]
