"""Inputs of the geometry's property tests: the same examples on every run and machine."""

from hypothesis import settings
from hypothesis import strategies as st

examples = settings(derandomize=True, max_examples=100, deadline=None, database=None)

degrees = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31, 64])

# Mostly documents about as long as a group is wide, where tails are ragged and members are left out; some long ones.
lengths = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 700)), max_size=12)


@st.composite
def holdings(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Rows that members have and rows that they need: any order, shared, repeated, or none; ids need not be dense."""
    degree = draw(st.integers(1, 6))
    stride, base = draw(st.sampled_from([1, 2, 64])), draw(st.sampled_from([0, 1000, 2**40]))
    row = st.integers(0, 30).map(lambda i: base + stride * i)
    have = [draw(st.lists(row, max_size=20)) for _ in range(degree)]
    known = sorted({row for rows in have for row in rows})
    need = [draw(st.lists(st.sampled_from(known), max_size=20)) if known else [] for _ in range(degree)]
    return have, need
