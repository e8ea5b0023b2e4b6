"""Plans in which every micro-batch has the groups that suit its documents, of any degree.

`problem` sees documents and slots as numbers. `shelves` places documents for wanted durations of the micro-batches,
with `degrees`, `slots` and `queue`; `targets` searches those durations; `cells` and `emit` turn the best `draft` into
groups. `free` plans without a barrier between micro-batches; `bundles` and `greedy` are for a handful of documents.
`planner` checks what is asked and takes the fastest. What a plan costs is priced by `plan.evaluate`, not here.

>>> from longspan.layout import Layout
>>> plan = plan_dynamic([20000, 7000, 6000, 5000], Layout(ranks=16), max_tokens_per_slot=8192)
>>> [(len(group.slots), group.lengths) for group in plan.micro_batches[0].groups]
[(2, (6000,)), (2, (5000,)), (3, (7000,)), (8, (20000,))]
"""

from longspan.plan.dynamic.planner import plan_dynamic

__all__ = ["plan_dynamic"]
