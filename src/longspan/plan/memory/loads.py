"""The rows that a slot works on in a micro-batch, and what of them a communication type moves."""

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.plan.cost.cost import kv_copies
from longspan.plan.cost.machine import Machine
from longspan.plan.cost.type_price import AttentionCall
from longspan.plan.head_split import head_split
from longspan.plan.memory.bytes import count_exchange_slices
from longspan.plan.memory.settings import MemorySettings
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.plan import Plan
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.layers import attention_widths, key_value_heads


@dataclass(frozen=True, order=True)
class SlotLoad:
    """The rows of one slot in one micro-batch.

    `exchanged_rows` of them are in groups that exchange heads, with key/value heads for `exchanged_key_rows` (more,
    where members need copies of a head). A ring's blocks have at most `ring_rows`; `gathered_rows` are all rows of a
    group whose keys and values are gathered. `runs` counts the runs of documents on the slot. A `later` micro-batch is
    not the first of its step: gradients of earlier ones are there. Of the longest group that exchanges heads, queries
    travel in so many `exchange_slices`, and keys and values in `exchange_kv_slices`.
    """

    rows: int
    exchanged_rows: int = 0
    exchanged_key_rows: float = 0.0
    ring_rows: int = 0
    gathered_rows: int = 0
    runs: int = 1
    later: bool = False
    exchange_slices: int = 1
    exchange_kv_slices: int = 1

    def covers(self, other: "SlotLoad") -> bool:
        """Return whether no number of `other` is larger than this load's, so that `other` needs no more memory.

        A load in other slices may need more.
        """
        slices = self.exchange_slices, self.exchange_kv_slices
        return slices == (other.exchange_slices, other.exchange_kv_slices) and all(
            a >= b for a, b in zip(_load_numbers(self), _load_numbers(other), strict=True)
        )


def _load_numbers(load: SlotLoad) -> tuple[float, ...]:
    """Return the fields of a load as numbers, of which more never take less memory."""
    return (
        load.rows,
        load.exchanged_rows,
        load.exchanged_key_rows,
        load.ring_rows,
        load.gathered_rows,
        load.runs,
        float(load.later),
    )


def slot_loads(
    plans: Sequence[Plan], read: ConfigReader, settings: MemorySettings, machine: Machine, tp: int = 1
) -> tuple[SlotLoad, ...]:
    """Return the loads of all slots in all micro-batches of these plans, without loads that another load covers.

    Plans without micro-batches have one load of one row.
    """
    loads: set[SlotLoad] = set()
    for plan in plans:
        for index, batch in enumerate(plan.micro_batches):
            for slot in range(plan.slots):
                loads.add(_slot_load(plan, batch, slot, later=index > 0, model=(read, settings, machine, tp)))
    largest: list[SlotLoad] = []
    for load in sorted(loads, reverse=True):  # a load that covers another comes before it
        if not any(larger.covers(load) for larger in largest):
            largest.append(load)
    return tuple(largest) or (SlotLoad(1),)


def _slot_load(
    plan: Plan,
    batch: MicroBatch,
    slot: int,
    *,
    later: bool,
    model: tuple[ConfigReader, MemorySettings, Machine, int],
) -> SlotLoad:
    """Return what one slot works on in one micro-batch: its rows, and those that are exchanged, travel or are gathered.

    `model` is a configuration, its settings, a machine and `tp`. `later` as in SlotLoad. Rows of a group of one slot,
    or of a model without attention heads, do not move. A slot without rows counts one, the padding row that a model
    gets there; the slot's rows are rounded up as the plan pads them. Zigzag gives a slot two runs of each document.
    """
    rows = exchanged_rows = ring_rows = gathered_rows = runs = longest = 0
    slices = 1, 1
    exchanged_key_rows = 0.0
    read, settings, machine, tp = model
    heads, kv_heads = read.count("num_attention_heads") // tp, max(1, key_value_heads(read) // tp)
    for _, group in batch.groups_of(slot):
        group_rows = group.rows_per_slot
        rows += group_rows
        runs += len(group.lengths) * (2 if group.degree > 1 and group.partition == "zigzag" else 1)
        if group.degree == 1 or not heads:
            continue
        kind, members = group_exchange(group, read, settings, machine, plan.node_size, tp)
        if members > 1:
            exchanged_rows += group_rows
            exchanged_key_rows += group_rows * float(kv_copies(heads, kv_heads, members))
            if group_rows > longest:
                longest, slices = group_rows, _count_slices(group_rows, members, read, settings, tp)
        if kind == "all_gather":
            gathered_rows = max(gathered_rows, group_rows * group.degree)
        elif group.degree > members:  # a block of the ring has the rows of all members that exchange
            ring_rows = max(ring_rows, group_rows * members)
    rows = -(-max(rows, 1) // plan.row_multiple) * plan.row_multiple
    runs = max(1, runs)
    return SlotLoad(rows, exchanged_rows, exchanged_key_rows, ring_rows, gathered_rows, runs, later, *slices)


def _count_slices(rows: int, members: int, read: ConfigReader, settings: MemorySettings, tp: int) -> tuple[int, int]:
    """Return in how many slices members of so many rows exchange query heads, and key/value heads.

    Both are 1 where the members cannot share the heads out.
    """
    heads, kv_heads = read.count("num_attention_heads") // tp, max(1, key_value_heads(read) // tp)
    if heads % members or heads % kv_heads:
        return 1, 1
    split, query_numbers = head_split(heads, kv_heads, members), rows * attention_widths(read).query // tp
    slices = count_exchange_slices(split, int(query_numbers), settings.compute_bytes)
    return slices, slices // split.slices_per_kv_head(slices)


def group_exchange(
    group: Group, read: ConfigReader, settings: MemorySettings, machine: Machine, node_size: int, tp: int
) -> tuple[str, int]:
    """Return the communication type of most layers of a group, and how many members exchange heads under it.

    "auto" is the type that the settings name, or else the type that the machine expects to be fastest. Under a type
    that exchanges no heads the number is 1; "a2a+p2p" without sizes exchanges between 2.
    """
    types = (group.cp_comm_type,) if isinstance(group.cp_comm_type, str) else group.cp_comm_type  # one for each layer
    kind, sizes = max(types, key=types.count), group.hierarchical_context_parallel_sizes
    if kind == "auto" and settings.cp_comm_type:
        kind = settings.cp_comm_type
    if kind == "auto":
        call = attention_call(read, settings, tp)
        price = machine.fastest_type(group, call, node_size=node_size)
        return price.cp_comm_type, price.sizes[0] if "a2a" in price.cp_comm_type else 1
    members = {"a2a": group.degree, "a2a+p2p": sizes[0] if sizes else 2}
    return kind, members.get(kind, 1)


def attention_call(read: ConfigReader, settings: MemorySettings, tp: int) -> AttentionCall:
    """Return the sizes of one layer's full attention on a rank, by which a machine prices it.

    A model without attention heads counts one head.
    """
    heads = read.count("num_attention_heads")
    head_dim = read.count("head_dim", "attention_head_dim") or read.count("hidden_size") // max(1, heads)
    return AttentionCall(
        heads=max(1, heads // tp),
        kv_heads=max(1, key_value_heads(read) // tp),
        head_dim=head_dim,
        bytes_per_number=settings.compute_bytes,
    )
