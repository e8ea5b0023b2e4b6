"""Plans in free mode, where only slots that share a group wait for each other: documents are given to lanes.

A lane is a run of slots inside a block that works through micro-batches of its own; only its total time counts. A
document that fits no lane, or would make one end late, is worked on by several lanes together (a *gang*). Gangs come
first, in one order, so that lanes wait for each other as little as possible; then every lane is on its own.
"""

import numpy as np

from longspan.plan.dynamic.lockstep import Bins, Candidate, LeastLoaded, LongDocument, divide_bins, make_micro_batches
from longspan.plan.dynamic.problem import Floats, Ints, Parts, Problem
from longspan.plan.micro_batch import MicroBatch
from longspan.plan.planners.fixed import pack_first_fit

GOALS = (1.003, 1.01, 1.02)  # when lanes should end, against the mean work of a slot
FEW_SLOTS = 1024  # up to which all goals are tried; else the one in the middle
FILLED = 0.9  # of the rows of a lane's micro-batches, on average
LARGE = 0.03  # share of the step on a lane, above which an item may become a gang
MOST_LANES = 16  # in a gang that is made to end earlier


def plan_free(problem: Problem) -> list[MicroBatch]:
    mean = problem.mean_slot_seconds + problem.least_micro_batches * problem.request.cost.micro_batch_seconds
    goals = GOALS if problem.request.slots <= FEW_SLOTS else GOALS[1:2]
    plans = (_fill_lanes(problem, goal * mean).make_candidate() for goal in goals)
    _, candidate, division = min(plans, key=lambda plan: plan[0])
    return make_micro_batches(candidate, division)


def _fill_lanes(problem: Problem, goal: float) -> "_Lanes":
    """Documents that no lane holds come first, then large items, which not every lane holds or which take much of the
    step: for these many lanes must still be free. Small items come last, and make lanes end together.
    """
    lanes = _Lanes(problem)
    width = lanes.width[lanes.usable]
    gangs = problem.tokens > width.max() * problem.cap
    large = ~gangs & ((problem.work / width.max() > LARGE * goal) | (problem.tokens > width.min() * problem.cap))
    for item in np.flatnonzero(gangs).tolist():
        lanes.place_gang(item)
    for item in np.flatnonzero(large).tolist():
        lanes.place_large_item(item, goal)
    lanes.place_small_items(np.flatnonzero(~gangs & ~large).tolist())
    return lanes


class _Lanes:
    """Lanes while they are being filled.

    Columns by lane: `parts` its slots, `width` how many they are, `gang_end` when its last gang ends, `end` when all of
    its work does, `next_micro_batch` its first one after gangs, and `items` those that it works on alone. A micro-batch
    on the widest lane waits for its launch and for messages; its rows, `FILLED` of the cap, share these seconds.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        cost = problem.request.cost
        self.parts = [part for block in problem.blocks for part in problem.split_into_runs(block)]
        self.width = np.array([width for _, width in self.parts], dtype=np.int64)
        self.usable = np.array([width in problem.degrees for _, width in self.parts])  # others only work in gangs
        self.launch = cost.micro_batch_seconds  # what a micro-batch costs in addition to its work
        self.gang_end: Floats = np.zeros(len(self.parts))
        self.end: Floats = np.zeros(len(self.parts))
        self.next_micro_batch: list[int] = [0] * len(self.parts)
        self.items: list[list[int]] = [[] for _ in self.parts]
        self.gangs: list[LongDocument] = []
        fixed_seconds = self.launch + float(cost.latency_seconds(int(self.width.max())))  # of a micro-batch
        self.work = problem.work + fixed_seconds / (FILLED * problem.cap) * problem.tokens  # seconds on one slot

    def place_gang(self, item: int) -> None:
        """More and more lanes are tried, until they take 1.5 times as many slot seconds as the best number of lanes."""
        order = np.argsort(self.end, kind="stable")
        best, chosen = (np.inf, np.inf), order
        least_degree = max(1, -(-int(self.problem.tokens[item]) // self.problem.cap))
        for count in range(1, len(order) + 1):
            lanes = order[:count]
            degree = self._gang_degree(lanes)
            is_last_idle = int(self.width[lanes[:-1]].sum()) >= degree
            if is_last_idle or degree < least_degree:  # the last lane gives no slot, or the document is over the cap
                continue
            seconds = self._gang_seconds(item, lanes)
            score = (degree * seconds, seconds)
            if score < best:
                best, chosen = score, lanes
            if degree == self.problem.max_cp or degree * seconds > 1.5 * best[0]:
                break
        self._make_gang(item, chosen)

    def place_large_item(self, item: int, goal: float) -> None:
        """Give an item to the lane that ends earliest with it, or, past the goal, to several that end earlier."""
        fits = (self.width * self.problem.cap >= self.problem.tokens[item]) & self.usable
        ends = np.where(fits, self.end + self.work[item] / self.width, np.inf)
        lane = int(ends.argmin())
        gang, end = self._choose_lanes(item, goal) if ends[lane] > goal else (None, np.inf)
        if gang is not None and end < ends[lane]:
            self._make_gang(item, gang)
        else:
            self.end[lane] = ends[lane]
            self.items[lane].append(item)

    def _choose_lanes(self, item: int, goal: float) -> tuple[Ints | None, float]:
        """The fewest lanes that end a document by the goal, or those that end it earliest; also returns when. A gang
        follows the last gang of its lanes, and what a lane works on alone comes after its gangs. None for a pack of
        documents, since `_gang_seconds` prices one document, and where no number of lanes makes a degree.
        """
        best, earliest = None, np.inf
        order = np.argsort(self.end, kind="stable")[:MOST_LANES]
        if len(self.problem.documents[item]) > 1:
            return None, earliest
        for count in range(2, len(order) + 1):
            lanes = order[:count]
            if int(self.width[lanes].sum()) not in self.problem.degrees:
                continue
            gang_end = self.gang_end[lanes].max() + self._gang_seconds(item, lanes)
            end = float((self.end[lanes] - self.gang_end[lanes]).max() + gang_end)
            if end < earliest:
                best, earliest = lanes, end
            if end <= goal:
                break
        return best, earliest

    def _gang_degree(self, lanes: Ints) -> int:
        return self.problem.widest_degree(int(self.width[lanes].sum()))

    def _gang_seconds(self, item: int, lanes: Ints) -> float:
        tokens = int(self.problem.tokens[item])
        degree = self._gang_degree(lanes)
        seconds = self.problem.request.cost.group_seconds(tokens, tokens * tokens, degree, inside=False)
        return self.launch + float(seconds)

    def _make_gang(self, item: int, lanes: Ints) -> None:
        """A gang begins when the last of its lanes has ended its earlier gangs; each lane works on its own items after
        all its gangs. The last lane gives only as many slots as the degree needs.
        """
        seconds = self._gang_seconds(item, lanes)
        local = self.end[lanes] - self.gang_end[lanes]
        self.gang_end[lanes] = self.gang_end[lanes].max() + seconds
        self.end[lanes] = self.gang_end[lanes] + local
        members: list[int] = lanes.tolist()
        micro_batch = max(self.next_micro_batch[lane] for lane in members)
        degree = self._gang_degree(lanes)
        parts = Parts()
        for lane in members:
            self.next_micro_batch[lane] = micro_batch + 1
            start, width = self.parts[lane]
            parts.append((start, min(width, degree - sum(count for _, count in parts))))
        rows = -(-int(self.problem.tokens[item]) // degree)
        self.gangs.append(LongDocument(micro_batch, item, parts, rows, seconds - self.launch))

    def place_small_items(self, items: list[int]) -> None:
        """A lane is one bin here, with room for all rows. All bins are in one micro-batch of 0 seconds: how late they
        end is then when they end.
        """
        bins = Bins()
        for part, end in zip(self.parts, self.end.tolist(), strict=True):
            bins.add_bin(0, part, long=-1, seconds=end, rows=int(self.problem.tokens.sum()))
        LeastLoaded(bins, [0.0], self.problem).place_items(items, 0, self.problem.tokens.tolist(), self.work.tolist())
        for lane_items, short in zip(self.items, bins.short, strict=True):
            lane_items.extend(short)

    def make_candidate(self) -> tuple[float, Candidate, list[list[int]]]:
        """A lane's micro-batches take as many items, longest first, as its slots have rows for. The candidate's
        durations are 0: in free mode no lane waits for the end of a micro-batch.
        """
        bins = Bins()
        lane_of_bin = list[int]()
        for lane, part in enumerate(self.parts):
            items = sorted(self.items[lane])
            first = len(bins.seconds)
            places = pack_first_fit(self.problem.tokens[items].tolist(), part[1] * self.problem.cap) if items else []
            for m in range(max(places, default=-1) + 1):
                bins.add_bin(self.next_micro_batch[lane] + m, part, long=-1, seconds=0.0, rows=self.problem.cap)
                lane_of_bin.append(lane)
            for item, place in zip(items, places, strict=True):
                bins.short[first + place].append(item)
        count = 1 + max([-1, *bins.micro_batch, *(gang.micro_batch for gang in self.gangs)])
        candidate = Candidate(self.problem, np.zeros(count), self.gangs, bins)
        seconds, division = divide_bins(candidate, level=False)
        end = self.gang_end.copy()
        np.add.at(end, np.array(lane_of_bin, dtype=np.int64), seconds + self.launch)
        return float(end.max()), candidate, division
