"""Plans in free mode, where only slots that share a group wait for each other: documents are given to queues.

A queue is a run of slots inside a block that works through micro-batches of its own; only its total time counts. A
document that fits no queue, or would make one end late, is worked on by several queues together (a *long group*). Long
groups come first, in one order, so that queues wait for each other as little as possible; then every queue is on its
own. The constants were chosen by the step over its bound, which others around them change by less than 0.1 %
(bench/records/planner-sweep.md).
"""

import numpy as np

from longspan.layout import Floats, Integers
from longspan.plan.dynamic.lockstep import (
    Bins,
    Candidate,
    LeastLoaded,
    LongDocument,
    divide_bins,
    make_micro_batches,
)
from longspan.plan.dynamic.problem import Parts, Problem
from longspan.plan.micro_batch import MicroBatch
from longspan.plan.planners.fixed import pack_first_fit

GOALS = (1.003, 1.01, 1.02)  # when queues should end, against the mean work of a slot
# Up to so many slots all goals are tried; else the one in the middle.
FEW_SLOTS = 1024
FILLED = 0.9  # share of the rows of a queue's micro-batches, on average
LARGE = 0.03  # share of the step on a queue, above which an item may become a long group
# A long group that is made to end earlier has at most so many queues.
MOST_QUEUES = 16
WORTH_TRYING = 1.5  # slot seconds against those of the best number of queues, up to which a group tries more queues


def plan_free(problem: Problem) -> list[MicroBatch]:
    """Plan a step in free mode: for each of GOALS the queues are filled anew, to end by that time, and the plan that
    ends first is taken.
    """
    mean = problem.mean_slot_seconds + problem.least_micro_batches * problem.request.cost.micro_batch_seconds
    goals = GOALS if problem.request.slots <= FEW_SLOTS else GOALS[1:2]
    plans = list[tuple[float, Candidate, list[list[int]]]]()
    for share in goals:
        goal = share * mean
        queues = _Queues(problem)
        width = queues.width[queues.usable]
        # Documents that no queue holds come first, then large items, which not every queue holds or which take much of
        # the step: for these many queues must still be free. Small items come last, and make queues end together.
        spread = problem.tokens > width.max() * problem.cap
        takes_long = problem.work / width.max() > LARGE * goal
        large = ~spread & (takes_long | (problem.tokens > width.min() * problem.cap))
        for item in np.flatnonzero(spread).tolist():
            queues.place_in_group(item)
        for item in np.flatnonzero(large).tolist():
            queues.place_large_item(item, goal)
        queues.place_small_items(np.flatnonzero(~spread & ~large).tolist())
        plans.append(queues.make_candidate())
    _, candidate, division = min(plans, key=lambda plan: plan[0])
    return make_micro_batches(candidate, division)


class _Queues:
    """Queues while they are being filled.

    Columns by queue: `parts` its slots, `width` how many they are, `group_end` when its last long group ends, `end`
    when all of its work does, `next_micro_batch` its first one after long groups, and `items` those that it works on
    alone. A micro-batch on the widest queue waits for its launch and for messages; its rows, `FILLED` of the cap, share
    these seconds.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        cost = problem.request.cost
        self.parts = [part for block in problem.blocks for part in problem.split_into_runs(block)]
        self.width = np.array([width for _, width in self.parts], dtype=np.int64)
        # whether a queue can be a group by itself; others only work in long groups
        self.usable = np.array([width in problem.degrees for _, width in self.parts])
        # A micro-batch costs this in addition to its work.
        self.launch = cost.micro_batch_seconds
        self.group_end: Floats = np.zeros(len(self.parts))
        self.end: Floats = np.zeros(len(self.parts))
        self.next_micro_batch: list[int] = [0] * len(self.parts)
        self.items: list[list[int]] = [[] for _ in self.parts]
        self.long_groups: list[LongDocument] = []
        # These are the seconds of a micro-batch.
        fixed_seconds = self.launch + float(cost.latency_seconds(int(self.width.max())))
        self.work = problem.work + fixed_seconds / (FILLED * problem.cap) * problem.tokens  # seconds on one slot

    def place_in_group(self, item: int) -> None:
        """Give an item to a long group of the queues that end first. Their number is the one with which the group takes
        the least slot seconds; higher numbers are tried until one takes `WORTH_TRYING` times as many.
        """
        order = np.argsort(self.end, kind="stable")
        best = (np.inf, np.inf)  # slot seconds, seconds
        chosen = order
        least_degree = max(1, -(-int(self.problem.tokens[item]) // self.problem.cap))
        for count in range(1, len(order) + 1):
            queues = order[:count]
            degree = self._group_degree(queues)
            last_gives_no_slot = int(self.width[queues[:-1]].sum()) >= degree
            # Below the least degree slots hold more than the cap.
            if last_gives_no_slot or degree < least_degree:
                continue
            seconds = self._group_seconds(item, queues)
            score = (degree * seconds, seconds)
            if score < best:
                best = score
                chosen = queues
            if degree == self.problem.max_cp or degree * seconds > WORTH_TRYING * best[0]:
                break
        self._make_group(item, chosen)

    def place_large_item(self, item: int, goal: float) -> None:
        """Give an item to the queue that ends earliest with it. If that is past the goal, a long group of the 2 to
        MOST_QUEUES queues that end first may end earlier: then the item goes to the fewest that end by the goal, or, if
        none do, to those that end earliest. A long group follows the earlier ones of its queues, and moves what they
        work on alone to a later time.
        """
        fits = (self.width * self.problem.cap >= self.problem.tokens[item]) & self.usable
        ends = np.where(fits, self.end + self.work[item] / self.width, np.inf)
        queue = int(ends.argmin())
        is_pack = len(self.problem.documents[item]) > 1 and not self.problem.trees[item]
        may_be_shared = ends[queue] > goal and not is_pack
        order = np.argsort(self.end, kind="stable")[: MOST_QUEUES if may_be_shared else 0]
        best = None
        earliest = float(ends[queue])
        for count in range(2, len(order) + 1):
            queues = order[:count]
            if int(self.width[queues].sum()) not in self.problem.degrees:
                continue
            group_end = self.group_end[queues].max() + self._group_seconds(item, queues)
            end = float((self.end[queues] - self.group_end[queues]).max() + group_end)
            if end < earliest:
                best = queues
                earliest = end
            if end <= goal:
                break
        if best is not None:
            self._make_group(item, best)
        else:
            self.end[queue] = ends[queue]
            self.items[queue].append(item)

    def _group_degree(self, queues: Integers) -> int:
        return self.problem.widest_degree(int(self.width[queues].sum()))

    def _group_seconds(self, item: int, queues: Integers) -> float:
        """With the launch of its micro-batch; the group counts as one across nodes."""
        tokens = int(self.problem.tokens[item])
        degree = self._group_degree(queues)
        squares = int(self.problem.squares[item])
        seconds = self.problem.request.cost.group_seconds(tokens, squares, degree, inside=False)
        return self.launch + float(seconds)

    def _make_group(self, item: int, queues: Integers) -> None:
        """A long group begins when the last of its queues has ended its earlier ones; each queue works on its own
        items after all its long groups. The last queue gives only as many slots as the degree needs."""
        seconds = self._group_seconds(item, queues)
        local = self.end[queues] - self.group_end[queues]
        self.group_end[queues] = self.group_end[queues].max() + seconds
        self.end[queues] = self.group_end[queues] + local
        members: list[int] = queues.tolist()
        micro_batch = max(self.next_micro_batch[queue] for queue in members)
        degree = self._group_degree(queues)
        parts = Parts()
        for queue in members:
            self.next_micro_batch[queue] = micro_batch + 1
            start, width = self.parts[queue]
            parts.append((start, min(width, degree - sum(count for _, count in parts))))
        rows = -(-int(self.problem.tokens[item]) // degree)
        self.long_groups.append(LongDocument(micro_batch, item, parts, rows, seconds - self.launch))

    def place_small_items(self, items: list[int]) -> None:
        """Give items, longest first, to the queues that end earliest with them. A queue is one bin here, with room for
        all tokens. All bins are in one micro-batch of 0 seconds: how late they end is then when they end.
        """
        bins = Bins()
        for part, end in zip(self.parts, self.end.tolist(), strict=True):
            bins.add_bin(0, part, long=-1, seconds=end, rows=int(self.problem.tokens.sum()))
        LeastLoaded(bins, [0.0], self.problem).fill_bins(items, 0, self.problem.tokens.tolist(), self.work.tolist())
        for queue_items, short in zip(self.items, bins.short, strict=True):
            queue_items.extend(short)

    def make_candidate(self) -> tuple[float, Candidate, list[list[int]]]:
        """Return when the step ends, the candidate, and how the slots of each bin share its items (`divide_bins`). A
        queue's micro-batches take as many items, longest first, as its slots have rows for; each is a bin. The
        candidate's durations are 0: in free mode no queue waits for the end of a micro-batch.
        """
        bins = Bins()
        queue_of_bin = list[int]()
        for queue, part in enumerate(self.parts):
            items = sorted(self.items[queue])
            first_bin = len(bins.seconds)
            places = (
                pack_first_fit(self.problem.tokens[items].tolist(), part[1] * self.problem.cap) if items else []
            )
            for m in range(max(places, default=-1) + 1):
                bins.add_bin(self.next_micro_batch[queue] + m, part, long=-1, seconds=0.0, rows=self.problem.cap)
                queue_of_bin.append(queue)
            for item, place in zip(items, places, strict=True):
                bins.short[first_bin + place].append(item)
        count = 1 + max([-1, *bins.micro_batch, *(group.micro_batch for group in self.long_groups)])
        candidate = Candidate(self.problem, np.zeros(count), self.long_groups, bins)
        seconds, division = divide_bins(candidate, level=False)
        end = self.group_end.copy()
        np.add.at(end, np.array(queue_of_bin, dtype=np.int64), seconds + self.launch)
        return float(end.max()), candidate, division
