"""Gradients of all copies of rows, their dense sums, and how few can bring them about."""

import numpy as np


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
