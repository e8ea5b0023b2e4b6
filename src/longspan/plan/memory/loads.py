"""The rows that a slot works on in a micro-batch, and what of them a communication type moves."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from longspan.plan.cost.machine import Machine
from longspan.plan.cost.type_price import AttentionCall
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.plan import Plan
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import key_value_heads


@dataclass(frozen=True, order=True)
class SlotLoad:
    """The rows of one slot in one micro-batch.

    `exchanged_rows` of them are in groups that exchange heads, of which the longest has so many `members` (1: none). A
    ring's blocks have at most `ring_rows`; `gathered_rows` are all rows of a group whose keys and values are gathered.
    `runs` counts the runs of documents on the slot. A `later` micro-batch is not the first of its step: gradients of
    earlier ones are there.
    """

    rows: int
    exchanged_rows: int = 0
    members: int = 1
    ring_rows: int = 0
    gathered_rows: int = 0
    runs: int = 1
    later: bool = False

    def covers(self, other: "SlotLoad") -> bool:
        """Return whether no number of `other` is larger than this load's, so that `other` needs no more memory."""
        return all(a >= b for a, b in zip(astuple(self), astuple(other), strict=True))


def slot_loads(
    plans: Sequence[Plan], read: ConfigReader, settings: MemorySettings, machine: Machine, tp: int = 1
) -> tuple[SlotLoad, ...]:
    """Return the loads of all slots in all micro-batches of these plans, without loads that another load covers.

    Plans without micro-batches have one load of one row. "auto" is the type that the machine expects to be fastest.
    """
    heads = read.count("num_attention_heads")
    head_dim = read.count("head_dim", "attention_head_dim") or read.count("hidden_size") // max(1, heads)
    kv_heads = max(1, key_value_heads(read) // tp)
    number = settings.compute_bytes
    call = AttentionCall(heads=max(1, heads // tp), kv_heads=kv_heads, head_dim=head_dim, bytes_per_number=number)

    def exchange(group: Group, node_size: int) -> tuple[str, int]:
        """Return the type of most layers of a group, and how many members exchange heads under it (1: it does not)."""
        types = (group.cp_comm_type,) if isinstance(group.cp_comm_type, str) else group.cp_comm_type
        kind, sizes = max(types, key=types.count), group.hierarchical_context_parallel_sizes
        if kind == "auto":
            price = machine.fastest_type(group, call, node_size=node_size)
            kind, sizes = price.cp_comm_type, price.sizes
        return kind, {"a2a": group.degree, "a2a+p2p": sizes[0] if sizes else 2}.get(kind, 1)

    def load(plan: Plan, batch: MicroBatch, slot: int, *, later: bool) -> SlotLoad:
        """Return what one slot works on. Zigzag gives a slot two runs of each document; a slot has a row at least."""
        rows = exchanged = ring = gathered = runs = longest = 0
        members = 1
        for _, group in batch.groups_of(slot):
            here = group.rows_per_slot
            rows += here
            runs += len(group.lengths) * (2 if group.degree > 1 and group.partition == "zigzag" else 1)
            if group.degree == 1 or not heads:
                continue
            kind, exchanging = exchange(group, plan.node_size)
            if exchanging > 1:
                exchanged += here
                longest, members = max((longest, members), (here, exchanging))
            if kind == "all_gather":
                gathered = max(gathered, here * group.degree)
            elif group.degree > exchanging:  # a block of the ring has the rows of all members that exchange
                ring = max(ring, here * exchanging)
        rows = -(-max(rows, 1) // plan.row_multiple) * plan.row_multiple
        return SlotLoad(rows, exchanged, members, ring, gathered, max(1, runs), later)

    loads = {
        load(plan, batch, slot, later=index > 0)
        for plan in plans
        for index, batch in enumerate(plan.micro_batches)
        for slot in range(plan.slots)
    }
    largest: list[SlotLoad] = []
    for one in sorted(loads, reverse=True):  # a load that covers another comes before it
        if not any(larger.covers(one) for larger in largest):
            largest.append(one)
    return tuple(largest) or (SlotLoad(1),)
