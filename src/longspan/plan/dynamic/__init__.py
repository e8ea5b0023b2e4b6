"""Plans in which every micro-batch has the groups that suit its documents, of any degree.

`problem` sees documents and slots as numbers. `shelves` places documents for wanted durations of the micro-batches,
with `degrees`, `slots` and `queue`; `targets` searches those durations; `cells` and `emit` turn the best `draft` into
groups. `free` plans without a barrier between micro-batches; `bundles` and `greedy` are for a handful of documents.
`planner` checks what is asked and takes the fastest. What a plan costs is priced by `plan.evaluate`, not here.

>>> from longspan.layout import Layout
>>> plan = plan_dynamic([5000, 600, 500, 400], Layout(ranks=8), max_tokens_per_slot=1024)
>>> [(len(group.slots), group.lengths) for group in plan.micro_batches[0].groups]
[(1, (400,)), (1, (500,)), (1, (600,)), (5, (5000,))]
"""

from longspan.plan.dynamic.planner import plan_dynamic

__all__ = ["plan_dynamic"]
