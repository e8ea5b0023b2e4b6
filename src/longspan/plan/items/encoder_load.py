"""What encoding the images of a plan's documents takes beside it, dealt to all slots or by each for its documents."""

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.layout import Layout
from longspan.plan.cost.cost import Cost
from longspan.plan.dynamic.planner import plan_dynamic
from longspan.plan.plan import Plan


@dataclass(frozen=True)
class EncoderLoad:
    """Predicted seconds of images dealt to all slots by their cost, and the busiest slot's work over the mean.

    `replicated_seconds`: of every slot encoding all images of its groups' documents, micro-batch by micro-batch.
    """

    seconds: float
    balance: float
    replicated_seconds: float

    @classmethod
    def of(
        cls, plan: Plan, images: Sequence[Sequence[int]], cost: Cost, *, max_rows: int | None = None
    ) -> "EncoderLoad":
        """The load of these images: rows of each, by document of the plan; waves hold `max_rows` of a slot.

        >>> load = EncoderLoad.of(plan, [[256] * 16] * len(plan.lengths), shape.cost())  # doctest: +SKIP
        """
        rows, home = [count for of_document in images for count in of_document], Layout(plan.slots)
        waves = plan_dynamic(rows, home, max_tokens_per_slot=max_rows, max_cp=1, cost=cost, effort="fast")
        work = waves.timeline().busy.sum(0)
        alone = [float(sum(cost.work_seconds(n, n * n) for n in of_document)) for of_document in images]
        return cls(waves.predicted_seconds, float(work.max() / work.mean()), _replicated(plan, alone, cost))


def _replicated(plan: Plan, alone: Sequence[float], cost: Cost) -> float:
    """The slowest slot of each micro-batch, as these wait for each other; `alone` are documents' images on one slot."""
    seconds = 0.0
    for batch in plan.micro_batches:
        work = [0.0] * plan.slots
        for group in batch.groups:
            for slot in group.slots:
                work[slot] += sum(alone[document] for document in group.documents)
        seconds += max(work) + cost.micro_batch_seconds * any(work)
    return seconds
