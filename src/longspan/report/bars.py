"""What a picture of a plan shows: bars of documents, with their colours, and summaries of those too small to draw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longspan.plan import Cost, MicroBatch, Plan
from longspan.plan.step_times import GroupTable

# Paul Tol's light scheme, told apart with any colour vision, and a shade darker: those of page.css.
FILLS = (
    *("#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#99ddff", "#bbcc33", "#c9a6d9"),
    *("#5f93c8", "#d8714e", "#35a384", "#d6c46a", "#ea8ea2", "#7cc6ec", "#a3b322", "#b28cc5"),
)
HUES = 8  # colours of the light scheme; its shades follow in the same order
MOST_COLORED = 2400  # bars, the largest ones, whose neighbours have other colours
# Bars of the same slots that are this share of the whole time apart are neighbours.
NEAR = 0.02


class Bar(NamedTuple):
    """A document on `slots` neighbouring slots from `slot` on, from `start` to `stop`, in seconds as priced."""

    micro_batch: int
    document: int
    slot: int
    slots: int
    start: float
    stop: float

    @property
    def area(self) -> float:
        return (self.stop - self.start) * self.slots


class Summary(NamedTuple):
    """Documents too small to draw, on neighbouring slots that are busy with them until `stop` on average."""

    micro_batch: int
    slot: int
    slots: int
    documents: int
    tokens: int
    start: float
    stop: float


class Panel(NamedTuple):
    """The stretch of the x axis that belongs to a micro-batch; `work` is where its fixed launch time ends."""

    start: float
    work: float
    stop: float


@dataclass(frozen=True)
class PlanBars:
    """Every bar of a plan, and the micro-batches' panels (one for all micro-batches in free mode)."""

    plan: Plan
    panels: tuple[Panel, ...]
    bars: tuple[Bar, ...]

    @property
    def end(self) -> float:
        return max((panel.stop for panel in self.panels), default=0.0)

    @cached_property
    def color_by_document(self) -> dict[int, int]:
        """The index in FILLS of each document's colour; documents that have none of the largest bars take the hues in
        turn.
        """
        largest_bars = sorted(self.bars, key=lambda bar: -bar.area)[:MOST_COLORED]
        return {i: i % HUES for i in range(len(self.plan.lengths))} | _document_colors(largest_bars)

    def select_bars(self, x_scale: float, y_scale: float, limit: int = 2400) -> tuple[list[Bar], list[Summary]]:
        """Select at most `limit` bars that are large enough to see at these scales (pixels a unit, pixels a slot): 1.2
        pixels wide and 3 high. All other bars are returned as summaries, each over at most as many slots as make 3
        pixels of height.
        """
        sizes = [((b.stop - b.start) * x_scale, b.slots * y_scale) for b in self.bars]
        large_enough = [i for i, (width, height) in enumerate(sizes) if width >= 1.2 and height >= 3]
        drawn = set(sorted(large_enough, key=lambda i: -sizes[i][0] * sizes[i][1])[:limit])
        small_bars = [b for i, b in enumerate(self.bars) if i not in drawn]
        most_slots = max(1, round(3 / y_scale))
        return [self.bars[i] for i in sorted(drawn)], list(
            _summarize_bars(small_bars, self.plan, most_slots, x_scale)
        )


def plan_bars(plan: Plan, cost: Cost | None = None) -> PlanBars:
    """Lay a plan out as bars, in seconds under its own cost or another.

    In free mode slots are in different micro-batches at the same time.
    """
    cost = cost or plan.cost
    timeline = plan.timeline(cost)
    group_seconds = group_times(plan, cost)
    bars: list[Bar] = []
    for index, micro_batch in enumerate(plan.micro_batches):
        begin = timeline.start[index] + cost.micro_batch_seconds
        bars += _stack_groups(index, micro_batch, begin, group_seconds[index], cost)
    if plan.mode == "free":
        return PlanBars(plan, (Panel(0.0, 0.0, timeline.step_seconds),), tuple(bars))
    starts = timeline.start.min(axis=1).tolist()
    ends = timeline.end.max(axis=1).tolist()
    panels = (Panel(start, start + cost.micro_batch_seconds, end) for start, end in zip(starts, ends, strict=True))
    return PlanBars(plan, tuple(panels), tuple(bars))


def _document_colors(bars: Sequence[Bar]) -> dict[int, int]:
    """A document gets a colour that no neighbour has, if there is one, and of these one whose hue no neighbour has;
    among equals the colour with the least area so far. Neighbours touch the same slots, or adjacent ones, at the same
    time or within NEAR times the picture's length."""
    slot, slots, start, stop = (
        np.array([getattr(bar, name) for bar in bars]) for name in ("slot", "slots", "start", "stop")
    )
    near = NEAR * float(stop.max(initial=0.0))
    color_of_bar = np.full(len(bars), -1)
    areas = np.zeros(len(FILLS))
    colors = dict[int, int]()
    for index, bar in enumerate(bars):
        if bar.document not in colors:
            is_near = (slot <= bar.slot + bar.slots) & (bar.slot <= slot + slots)
            is_near &= (start <= bar.stop + near) & (bar.start <= stop + near)
            used = set(color_of_bar[is_near].tolist()) - {-1}
            hues = {color % HUES for color in used}
            colors[bar.document] = min(range(len(FILLS)), key=lambda c: (c in used, c % HUES in hues, areas[c], c))
            areas[colors[bar.document]] += bar.area
        color_of_bar[index] = colors[bar.document]
    return colors


def group_times(plan: Plan, cost: Cost) -> list[np.ndarray]:
    """Return for each micro-batch the seconds that each of its groups takes of its slots, without the launches."""
    table = GroupTable(plan.micro_batches)
    seconds = table.group_seconds(cost, plan.node_size)
    return np.split(seconds, np.cumsum([len(m.groups) for m in plan.micro_batches])[:-1])


def _stack_groups(
    index: int, micro_batch: MicroBatch, begin: np.ndarray, seconds_of_groups: np.ndarray, cost: Cost
) -> Iterator[Bar]:
    """Groups of most slots come first. One over slots that are no neighbours, or that begin at different times, is
    drawn anew on each run of slots."""
    clock = begin.copy()  # (slots,)
    for group, seconds in sorted(
        zip(micro_batch.groups, seconds_of_groups.tolist(), strict=True), key=lambda pair: -pair[0].degree
    ):
        slots = np.sort(np.asarray(group.slots, np.int64))
        rows = np.asarray(group.laid_out, float)
        # rows of a branch see those of its prefixes
        work = cost.linear_seconds * rows + cost.attention_seconds * rows * (rows + 2 * np.asarray(group.bases))
        shares = (work / (float(work.sum()) or 1.0)).tolist()
        breaks = np.flatnonzero((np.diff(slots) != 1) | (np.abs(np.diff(clock[slots])) > 1e-9)) + 1
        for run in np.split(slots, breaks):
            start = float(clock[run[0]])
            documents = [*zip(group.documents, shares, strict=True)]
            if group.parents is None:  # a family stays together, its prefixes first
                documents.sort(key=lambda pair: -pair[1])
            for document, share in documents:
                yield Bar(index, document, int(run[0]), len(run), start, start + share * seconds)
                start += share * seconds
        clock[slots] += seconds


def _summarize_bars(small_bars: Sequence[Bar], plan: Plan, most_slots: int, x_scale: float) -> Iterator[Summary]:
    """`x_scale` is in pixels per second. A document over several slots is counted on its first one only."""
    by_micro_batch: dict[int, list[Bar]] = {}
    for bar in small_bars:
        by_micro_batch.setdefault(bar.micro_batch, []).append(bar)
    for index, bars in by_micro_batch.items():
        first = np.full(plan.slots, np.inf)
        last = np.full(plan.slots, -np.inf)
        documents, tokens = (np.zeros(plan.slots, np.int64) for _ in range(2))
        for bar in bars:
            slots = slice(bar.slot, bar.slot + bar.slots)
            first[slots] = np.minimum(first[slots], bar.start)
            last[slots] = np.maximum(last[slots], bar.stop)
            documents[bar.slot] += 1
            tokens[bar.slot] += plan.lengths[bar.document]
        busy = np.flatnonzero(np.isfinite(first))  # slots with a small bar
        # Beginnings count in steps of 4 pixels: neighbours that begin alike are one block.
        begin = np.round(first[busy] * x_scale / 4)
        for neighbours in np.split(busy, np.flatnonzero((np.diff(busy) != 1) | (np.diff(begin) != 0)) + 1):
            for i in range(0, len(neighbours), most_slots):
                run = neighbours[i : i + most_slots]
                counts = (documents[run].sum(), tokens[run].sum())
                times = (first[run].min(), last[run].mean())
                yield Summary(index, int(run[0]), len(run), *map(int, counts), *map(float, times))
