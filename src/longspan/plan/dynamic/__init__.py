"""Plans in which every micro-batch has the groups that suit its documents, of any degree.

`problem.py` sees documents as numbers and `slots.py` slots. In lockstep `search.py` looks for the durations of the
micro-batches; `lockstep.py` places documents for given durations, with `degrees.py` for the long ones, and returns a
`draft.py`, which `grouping.py` turns into groups. `free.py` plans without a barrier between micro-batches, and
`few_documents.py` a handful of documents. `planner.py` checks the arguments and takes the fastest plan. What a plan
costs is computed in `plan/timeline.py`, not here.

>>> from longspan.layout import Layout
>>> plan = plan_dynamic([20000, 7000, 6000, 5000], Layout(ranks=16), max_tokens_per_slot=8192)
>>> [(len(group.slots), group.lengths) for group in plan.micro_batches[0].groups]
[(2, (6000,)), (2, (5000,)), (3, (7000,)), (8, (20000,))]
"""

from longspan.plan.dynamic.planner import plan_dynamic

__all__ = ["plan_dynamic"]
