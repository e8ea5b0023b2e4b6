"""A planner and a cost of one's own, which a run takes by their dotted names:

    PYTHONPATH=examples longspan train examples/first.toml --world 4 --device cpu \
        --context.planner own_planner.two_degrees --context.cost_model own_planner.slow_messages

`python examples/own_planner.py` prints a plan of the planner under the cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longspan import Cost, Group, Layout, MicroBatch, Plan, PlanOptions


def two_degrees(lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    """Documents that fit a slot stay on one; each longer one is shared by all slots, in a micro-batch of its own."""
    rows = options.max_tokens_per_slot or max(lengths)
    everyone, kind = tuple(range(home.slots)), options.cp_comm_type
    batches, room = [], [0] * home.slots
    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        length = lengths[document]
        if length > rows:
            batches.append([Group(everyone, (document,), (length,), kind)])
            continue
        slot = max(everyone, key=lambda s: room[s])
        if room[slot] < length:  # of the micro-batch that is being filled
            batches.append([])
            room, slot = [rows] * home.slots, 0
        batches[-1].append(Group((slot,), (document,), (length,), kind))
        room[slot] -= length
    micro_batches = tuple(MicroBatch(tuple(groups)) for groups in batches)
    return Plan(home.slots, tuple(lengths), micro_batches, targets=sum(lengths) - len(lengths))


@dataclass(frozen=True, kw_only=True)
class SlowMessages(Cost):
    """A network on which every message of a group waits some time, however many messages are on their way."""

    message_seconds: float = 0.0

    def group_seconds(self, tokens: Any, squares: Any, degree: Any, *more: Any, **keywords: Any) -> Any:
        """As `Cost.group_seconds`, and what the messages between the slots of a group wait."""
        seconds = super().group_seconds(tokens, squares, degree, *more, **keywords)
        if self.has_choice:  # the fastest type or sizes of each group, all of them priced by this method
            return seconds
        return seconds + self.message_seconds * (degree - 1)


def slow_messages(model: Any) -> Cost:
    """The cost of a model, given its configuration, on this network."""
    constants = Cost.for_model(model, tflops=400).constants()
    return SlowMessages(**constants, message_seconds=2e-3, source="the model on a slow network")


if __name__ == "__main__":
    from transformers import Qwen3Config

    options = PlanOptions(max_tokens_per_slot=4096, cost=slow_messages(Qwen3Config()))
    home, lengths = Layout(ranks=4), [9000, 3000, 2500, 1200, 700, 40]
    plan = two_degrees(lengths, home, options=options)
    print(plan.table(options.cost))
