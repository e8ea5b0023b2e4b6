"""A planner of one's own, which a run takes by its dotted name:

    PYTHONPATH=examples longspan train examples/first.toml --world 4 --device cpu \
        --context.planner own_planner.two_degrees

`python examples/own_planner.py` prints one of its plans.
"""

from collections.abc import Sequence

from longspan import Group, Layout, MicroBatch, Plan, PlanOptions


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


if __name__ == "__main__":
    options = PlanOptions(max_tokens_per_slot=4096)
    home, lengths = Layout(ranks=4), [9000, 3000, 2500, 1200, 700, 40]
    plan = two_degrees(lengths, home, options=options)
    print(plan.table(options.cost))
