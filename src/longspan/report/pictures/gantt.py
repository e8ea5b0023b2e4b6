"""The picture of a plan as SVG for the HTML pages, and as a Chrome trace.

`gantt_svg` needs the page's style sheet (`page.css`); `page.js` adds hover and keyboard to it.
"""

import json
import math
from collections.abc import Callable, Sequence

from longspan.errors import plural
from longspan.plain_text import number_text, ranges_text, seconds_text
from longspan.plan import Cost, Group, Plan
from longspan.report.chart import ticks
from longspan.report.markup import label, tag
from longspan.report.pictures.bars import Bar, PlanBars, Summary, Unit, group_times, plan_bars

WIDTH, NARROW = 1120, 400  # of the picture on a page, and on a page of a telephone
_LEFT, _TOP, _BOTTOM, _RIGHT = 54, 26, 40, 12


def slot_height(slots: int) -> float:
    """Return the height of a slot in pixels: tall for few slots, and never a picture taller than a screen."""
    return min(30.0, max(14.0, 240 / slots)) if slots <= 24 else min(14.0, 620 / slots)


def gantt_svg(
    plan: Plan, cost: Cost | None = None, *, unit: Unit = "seconds", limit: int = 2400, width: int = WIDTH
) -> str:
    """Return an SVG of slots × time (or × rows of each micro-batch's cap), coloured by document, at most `limit` bars.

    It is `width` pixels wide, with as many words as have room there.

    >>> svg = gantt_svg(plan, unit="rows")
    """
    picture = plan_bars(plan, cost, unit)
    height = slot_height(plan.slots)
    x_scale = (width - _LEFT - _RIGHT) / (picture.end or 1.0)
    bars, summaries = picture.select_bars(x_scale, height, limit)
    cost = plan.cost if cost is None else cost
    canvas = _Canvas(picture, x_scale, height, cost, width)
    axis = "time" if unit == "seconds" else "rows"
    return tag(
        "svg",
        canvas.panels(),
        *(canvas.summary(summary) for summary in summaries),
        *(canvas.bar(bar) for bar in bars),
        canvas.axes(),
        class_=f"gantt {'narrow' if width < WIDTH else 'wide'}",
        viewBox=f"0 0 {width} {canvas.bottom + _BOTTOM:.0f}",
        tabindex=0,
        role="img",
        aria_label=f"{plural(plan.slots, 'slot')} over {axis}. Arrow keys read the documents.",
        data_plan=json.dumps(_tooltip_data(plan, bars, cost), separators=(",", ":")),
    )


def time_format(cost: Cost, step_seconds: float) -> Callable[[float], str]:
    """Return a function that writes times under a cost.

    Times are written as durations, or as shares of the step if the cost is of no machine.
    """
    if cost.source:
        return seconds_text
    return lambda seconds: f"{100 * seconds / (step_seconds or 1.0):.0f}% of the step"


class _Canvas:
    """Turns bars into SVG elements at one scale."""

    def __init__(self, picture: PlanBars, x_scale: float, slot_height: float, cost: Cost, width: int) -> None:
        self.write_time = time_format(cost, picture.end)
        self.timed = bool(cost.source)  # whether times are seconds of a machine; else they are shares of the step
        self.picture, self.plan, self.x_scale, self.slot_height = picture, picture.plan, x_scale, slot_height
        self.bottom, self.right = _TOP + slot_height * picture.plan.slots, width - _RIGHT

    def x(self, value: float) -> float:
        return _LEFT + value * self.x_scale

    def panels(self) -> str:
        """Return the background of each micro-batch, hatched as idle, with a box for the time of its launch."""
        parts = []
        for panel in self.picture.panels:
            x, width = self.x(panel.start), (panel.stop - panel.start) * self.x_scale
            box = {"x": x, "y": _TOP, "height": self.bottom - _TOP}
            parts.append(tag("rect", class_="panel", width=width, **box))
            parts.append(tag("rect", fill="url(#idle)", width=width, **box))
            if panel.work > panel.start:
                parts.append(tag("rect", class_="launch", width=(panel.work - panel.start) * self.x_scale, **box))
        return "".join(parts)

    def bar(self, bar: Bar) -> str:
        """Rectangles are smaller than their place by a gap, but never too small to be seen."""
        x, width = self.x(bar.start), (bar.stop - bar.start) * self.x_scale
        y, height = _TOP + bar.slot * self.slot_height, bar.slots * self.slot_height
        inset = 0.5 if self.slot_height >= 5 else 0.0
        rect = tag(
            "rect",
            class_=f"b k{self.picture.color_of[bar.document]}",
            data_d=bar.document,
            x=x,
            y=y + inset,
            width=max(width - 0.6, 0.6),
            height=max(height - 2 * inset, 0.8),
        )
        return rect + self._bar_label(bar, x + width / 2, y + height / 2 + 3.8, width, height)

    def _bar_label(self, bar: Bar, x: float, y: float, width: float, height: float) -> str:
        length = self.plan.lengths[bar.document]
        names = (f"document {bar.document} · {length:,}", f"{bar.document} · {number_text(length)}", f"{bar.document}")
        name = next((n for n in names if width >= 6.4 * len(n) + 6), "")  # pixels of a character, and of both margins
        return tag("text", name, class_="name", x=x, y=y) if name and height >= 12 else ""

    def summary(self, part: Summary) -> str:
        """Return the rectangle of documents that are too small to draw, with words for a pointer over it."""
        slots = ranges_text(range(part.slot, part.slot + part.slots))
        info = [plural(part.documents, "short document"), plural(part.tokens, "token")]
        info.append(f"micro-batch {part.micro_batch}, slots {slots}")
        if part.slots > 1 and self.picture.unit == "seconds":
            info.append(f"busy until {self.write_time(part.least)} to {self.write_time(part.most)}")
        return tag(
            "rect",
            class_="many",
            data_info="|".join(info),
            x=self.x(part.start),
            y=_TOP + part.slot * self.slot_height,
            width=max((part.stop - part.start) * self.x_scale, 0.6),
            height=max(part.slots * self.slot_height, 0.8),
        )

    def axes(self) -> str:
        return self._slot_axis() + self._value_axis() + self._panel_ends_and_names()

    def _slot_axis(self) -> str:
        """Every 2^n-th slot is numbered, so that numbers are at least 13 pixels apart: at its middle if all are (n =
        0), else at its top.
        """
        slots, parts = self.plan.slots, [label("slot", _LEFT - 8, _TOP - 9, "end")]
        slot_step = 1 << math.ceil(math.log2(max(1.0, 13 / self.slot_height)))
        for slot in range(0, slots, slot_step):
            y = _TOP + slot * self.slot_height + (self.slot_height / 2 + 3.5 if slot_step == 1 else 9)
            parts.append(label(str(slot), _LEFT - 8, y, "end", "tick"))
        nodes = range(self.plan.node_size, slots, self.plan.node_size)
        if nodes and self.plan.node_size * self.slot_height >= 6:
            lines = "".join(f"M{_LEFT} {_TOP + n * self.slot_height:.1f}H{self.right}" for n in nodes)
            parts.append(tag("path", class_="node", d=lines))
        return "".join(parts)

    def _value_axis(self) -> str:
        """Return the ticks of the x axis, in seconds or rows, and its title."""
        parts = []
        seconds = self.picture.unit == "seconds"
        for start, value in self._tick_values():
            x = self.x(start + value)
            parts.append(tag("path", class_="grid short", d=f"M{x:.1f} {self.bottom:.1f}v4"))
            parts.append(label(self._tick(value), x, self.bottom + 16, "middle", "tick"))
        time_title = "predicted seconds" if self.timed else "share of the step, as predicted"
        words = time_title if seconds else "rows of a slot, to the cap of each micro-batch"
        return "".join(parts) + label(words, self.right, self.bottom + 32, "end")

    def _tick(self, value: float) -> str:
        if self.picture.unit == "rows":
            return number_text(value)
        return f"{value:g}" if self.timed else self.write_time(value)

    def _tick_values(self) -> list[tuple[float, float]]:
        """Seconds go on over all panels, from 0. Rows begin anew in each micro-batch's panel, which has ticks at 0 and
        at the cap, only at the cap in a narrow one, and none in a narrower one.
        """
        if self.picture.unit == "seconds":
            return [(0.0, value) for value in ticks(0, self.picture.end, 9 if self.right > 900 else 4)]
        panels = self.picture.panels
        cap = panels[0].stop - panels[0].start if panels else 1.0
        width = cap * self.x_scale
        values = (0.0, cap) if width >= 90 else (cap,) if width >= 44 else ()
        return [(panel.start, value) for panel in panels for value in values]

    def _panel_ends_and_names(self) -> str:
        """In free mode the only panel is that of all micro-batches, and has no name."""
        parts, last_name_x = [], -100.0
        for index, panel in enumerate(self.picture.panels):
            middle, edge = self.x((panel.start + panel.stop) / 2), self.x(panel.stop)
            parts.append(tag("path", class_="barrier", d=f"M{edge:.1f} {_TOP - 5}V{self.bottom + 4:.1f}"))
            name = f"micro-batch {index}" if (panel.stop - panel.start) * self.x_scale >= 90 else str(index)
            # 6.2 pixels a character, and 8 between names
            if middle - last_name_x >= 6.2 * len(name) + 8 and self.plan.mode == "lockstep":
                parts.append(label(name, middle, _TOP - 9, "middle"))
                last_name_x = middle
        return "".join(parts)


def _tooltip_data(plan: Plan, bars: Sequence[Bar], cost: Cost) -> dict[str, object]:
    """Each drawn document has [its length, the number of its group], and each of these groups, in the order of their
    numbers, has the list of its facts.
    """
    times, write_time = group_times(plan, cost), time_format(cost, plan.timeline(cost).step_seconds)
    drawn_groups = dict.fromkeys((bar.micro_batch, bar.group) for bar in bars)
    group_numbers = {indices: number for number, indices in enumerate(drawn_groups)}
    documents = {bar.document: [plan.lengths[bar.document], group_numbers[bar.micro_batch, bar.group]] for bar in bars}
    facts = [
        _group_facts(
            plan.micro_batches[micro_batch].groups[group], micro_batch, write_time(float(times[micro_batch][group]))
        )
        for micro_batch, group in drawn_groups
    ]
    return {"documents": documents, "groups": facts}


def _group_facts(group: Group, micro_batch: int, seconds: str) -> list[object]:
    """Return what the tooltip says of a group, in the order that `page.js` reads.

    That is micro-batch, slots, degree, communication, number of documents, rows of a slot, time and padding; `seconds`
    is the time as written.
    """
    comm = group.cp_comm_type if isinstance(group.cp_comm_type, str) else "/".join(dict.fromkeys(group.cp_comm_type))
    padded = f", each padded to {group.pad_to:,}" if group.pad_to else ""
    rows = group.rows_per_slot
    return [micro_batch, ranges_text(group.slots), group.degree, comm, len(group.documents), rows, seconds, padded]
