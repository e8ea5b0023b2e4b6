"""Inputs of the geometry's property tests, the same examples on every run and machine; and, in plain loops, sums of the
gradients of all copies of rows, and how few can bring them about.
"""

import numpy as np
from hypothesis import settings, strategies as st

examples = settings(derandomize=True, max_examples=50, deadline=None, database=None)

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


@st.composite
def feedings(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Rows that ranks have, rows that they need, and slots of ranks that carry the same gradient.

    Rows are had by tensor-parallel replicas, by one rank, or by some, in one or several orders; a slot needs rows of
    its own and some that other slots need too, on all its ranks alike, or each rank its part of them.
    """
    degree = draw(st.integers(1, 8))
    tp = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if degree % n == 0]))
    slots = [list(range(first, first + tp)) for first in range(0, degree, tp)]
    runs = draw(st.lists(st.integers(1, 9), max_size=6))  # items: each has its rows on the same ranks
    have: list[list[int]] = [[] for _ in range(degree)]
    stride, row = draw(st.sampled_from([1, 1, 2**40])), 0
    for rows in runs:
        holders = draw(st.lists(st.integers(0, degree - 1), min_size=1, max_size=degree, unique=True))
        for rank in holders:
            have[rank] += [stride * i for i in range(row, row + rows)]
        row += rows
    need: list[list[int]] = [[] for _ in range(degree)]
    known = st.integers(0, row - 1).map(lambda i: stride * i) if row else st.nothing()
    for slot in slots:
        uses = draw(st.lists(known, max_size=12)) if row else []
        parts = draw(st.sampled_from(["alike", "split", "first"]))
        once = list(dict.fromkeys(uses))
        for index, rank in enumerate(slot):
            if parts == "alike":
                need[rank] = draw(st.permutations(uses))
            elif parts == "split":
                need[rank] = once[index::tp]
            elif index == 0:
                need[rank] = uses
    return have, need, slots


def random_gradients(need, seed_of):
    gradients = []
    for rank, rows in enumerate(need):
        seeds = [seed_of(rank, row, rows[:place].count(row)) for place, row in enumerate(rows)]
        gradients.append(np.array([np.random.default_rng(seed).normal() for seed in seeds]))
    return gradients


def summed(have, need, gradients, groups):
    totals = {}
    for group in groups:
        of_group = {}
        for rank in group:
            of_rank = {}
            for row, gradient in zip(need[rank], gradients[rank].tolist(), strict=True):
                of_rank[row] = of_rank[row] + gradient if row in of_rank else gradient
            of_group = of_rank | of_group
        for row, gradient in of_group.items():
            totals[row] = totals[row] + gradient if row in totals else gradient
    return [[totals.get(row, 0.0) for row in rows] for rows in have]


def lacking(have, need, groups, rank):
    rows, count = set(have[rank]), 0
    for group in groups:
        needed = rows & {row for member in group for row in need[member]}
        count += len(needed - set(need[rank])) if rank in group else len(needed)
    return count
