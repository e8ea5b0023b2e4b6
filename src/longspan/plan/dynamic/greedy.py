"""Micro-batches one after another, longest documents first: the usual way to schedule, with power-of-two degrees.

It never looks ahead, so that short documents are left for the end. For a handful of documents that can be the best
there is, and it is where `bundles.py` begins from besides its own deals.
"""

import numpy as np

from longspan.plan.dynamic.problem import Ints, Problem

Bundled = list[tuple[list[int], int]]  # the items of each group of a micro-batch, and its degree


def greedy_deal(problem: Problem, patience: float) -> list[Bundled]:
    """Micro-batches that may last `patience` times as long as their longest document makes them."""
    todo, batches = list(range(len(problem.tokens))), list[Bundled]()
    powers = {d for p in range(problem.max_cp.bit_length()) if (d := 1 << p) in problem.degrees}
    degrees = np.array(sorted(powers | {problem.max_cp}), dtype=np.int64)
    while todo:
        batch = _Batch(problem, degrees)
        rest = [item for item in todo if not batch.add(item, patience)]
        if len(rest) == len(todo):
            return []
        batch.widen()
        batches.append(list(zip(batch.items, batch.degree.tolist(), strict=True)))
        todo = rest
    return batches


class _Batch:
    """One micro-batch while it is being filled: the rows, squares and degree of each group."""

    def __init__(self, problem: Problem, degrees: Ints) -> None:
        self.problem, self.degrees, self.limit = problem, degrees, np.inf
        self.items: list[list[int]] = []
        self.tokens, self.squares, self.degree = np.zeros((3, 0), dtype=np.int64)

    def _seconds(self, tokens: Ints, squares: Ints, degree: Ints) -> np.ndarray:
        inside = (degree <= self.problem.widest_block) & self.problem.blocks_inside
        return self.problem.request.cost.group_seconds(tokens, squares, degree, inside)

    def add(self, item: int, patience: float) -> bool:
        """Put an item where the micro-batch ends earliest with it; False where it would end after its limit."""
        problem, count = self.problem, len(self.items)
        free = problem.request.slots - int(self.degree.sum())
        tokens = np.append(self.tokens, np.zeros_like(self.degrees)) + problem.tokens[item]
        squares = np.append(self.squares, np.zeros_like(self.degrees)) + problem.squares[item]
        degree = np.append(self.degree, self.degrees)
        now = float(self._seconds(self.tokens, self.squares, self.degree).max(initial=0.0))
        ends = np.maximum(self._seconds(tokens, squares, degree), now)
        new = np.arange(len(degree)) >= count
        fits = (tokens <= degree * problem.cap) & (~new | (degree <= free))
        ends = np.where(fits, ends, np.inf)
        chosen = int(np.lexsort((degree, ends))[0])
        if not ends[chosen] <= self.limit or not fits[chosen]:
            return False
        if not self.items:
            self.limit = float(ends[chosen]) * patience
        if chosen < count:
            self.items[chosen].append(item)
            self.tokens[chosen], self.squares[chosen] = tokens[chosen], squares[chosen]
        else:
            self.items.append([item])
            self.tokens = np.append(self.tokens, tokens[chosen])
            self.squares = np.append(self.squares, squares[chosen])
            self.degree = np.append(self.degree, degree[chosen])
        return True

    def widen(self) -> None:
        """Double the slowest group as long as there are slots and it gets faster."""
        while True:
            seconds = self._seconds(self.tokens, self.squares, self.degree)
            g = int(seconds.argmax())
            width = int(self.degree[g])
            wider = self._seconds(self.tokens[g : g + 1], self.squares[g : g + 1], self.degree[g : g + 1] * 2)
            room = int(self.degree.sum()) + width <= self.problem.request.slots and 2 * width in self.problem.degrees
            if not room or wider[0] >= seconds[g]:
                return
            self.degree[g] *= 2
