"""Sound random plans and lists of lengths, for the properties that every plan must have."""

from hypothesis import settings
from hypothesis import strategies as st

from longspan.plan import Group, MicroBatch, Plan, slot_rows

bounded = settings(derandomize=True, deadline=None, max_examples=50)

lengths = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=40)


@st.composite
def plans(draw: st.DrawFn, mode: str = "lockstep") -> Plan:
    """A plan whose groups have any slots, overlap, and leave slots out; its cap is the rows of its fullest slot."""
    slots, count = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    drawn = draw(lengths)
    batches: list[list[Group]] = [[] for _ in range(count)]
    ids = list(range(len(drawn)))
    while ids:
        shared = draw(st.integers(1, 4))
        mine, ids = ids[:shared], ids[shared:]
        members = draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=slots, unique=True))
        pad = draw(st.sampled_from([None, None, max(drawn)]))
        rows, partition = tuple(drawn[d] for d in mine), draw(st.sampled_from(["zigzag", "contiguous"]))
        group = Group(tuple(members), tuple(mine), rows, partition=partition, pad_to=pad)
        batches[draw(st.integers(0, count - 1))].append(group)
    micro_batches = tuple(MicroBatch(tuple(groups)) for groups in batches)
    multiple, node = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 8]))
    cap = int(slot_rows(micro_batches, slots, multiple).max())
    targets = sum(drawn) - len(drawn)
    return Plan(slots, tuple(drawn), micro_batches, targets, mode, cap, node, multiple)
