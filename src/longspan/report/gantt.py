"""The picture of a plan as SVG for the HTML pages, and as a Chrome trace.

`gantt_svg` needs the page's style sheet (`page.css`); `page.js` adds hover and keyboard to it.
"""

import json
from collections.abc import Sequence
from html import escape

from longspan.plan import Cost, Plan
from longspan.report.bars import Bar, Panel, PlanBars, Summary, Unit, group_times, plan_bars
from longspan.report.series import ticks, write_number, write_ranges, write_seconds

WIDTH = 1120
_LEFT, _TOP, _BOTTOM, _RIGHT = 54, 26, 40, 12
_COLORS = 16  # fills in page.css: eight hues, each in two shades


def row_height(slots: int) -> float:
    """Pixels a slot: tall rows for few slots, and never a picture taller than a screen."""
    return min(30.0, max(14.0, 240 / slots)) if slots <= 24 else min(14.0, 620 / slots)


def gantt_svg(plan: Plan, cost: Cost | None = None, *, unit: Unit = "seconds", limit: int = 2400) -> str:
    """An SVG of slots × time (or × rows of each micro-batch's cap), coloured by document, at most `limit` bars.

    >>> svg = gantt_svg(plan, unit="rows")
    """
    picture = plan_bars(plan, cost, unit)
    height = row_height(plan.slots)
    x_scale = (WIDTH - _LEFT - _RIGHT) / (picture.end or 1.0)
    bars, summaries = picture.thinned(x_scale, height, limit)
    canvas = _Canvas(picture, x_scale, height)
    label = (
        f"{plan.slots} slots over {'time' if unit == 'seconds' else 'rows'}, {len(plan.micro_batches)} micro-batches"
    )
    data = escape(
        json.dumps(_hover_data(plan, bars, plan.cost if cost is None else cost), separators=(",", ":")), quote=True
    )
    body = [canvas.panels(), *(canvas.summary(s) for s in summaries), *(canvas.bar(b) for b in bars)]
    return (
        f'<svg class="gantt" viewBox="0 0 {WIDTH} {_TOP + height * plan.slots + _BOTTOM:.0f}" tabindex="0" role="img" '
        f'aria-label="{escape(label, quote=True)}. Arrow keys read the documents." data-plan="{data}">'
        f"{''.join(body)}{canvas.axes()}</svg>"
    )


# Once a page: what is drawn where a slot has nothing to do.
HATCH = (
    '<svg class="defs" width="0" height="0" aria-hidden="true"><defs>'
    '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="hatch" d="M0 0V6"/></pattern></defs></svg>'
)


class _Canvas:
    """Turns bars into SVG elements at one scale."""

    def __init__(self, picture: PlanBars, x_scale: float, height: float) -> None:
        self.picture, self.plan, self.x_scale, self.height = picture, picture.plan, x_scale, height
        self.bottom = _TOP + height * picture.plan.slots

    def x(self, value: float) -> float:
        return _LEFT + value * self.x_scale

    def panels(self) -> str:
        parts = []
        for panel in self.picture.panels:
            left, right = self.x(panel.start), self.x(panel.stop)
            box = f'y="{_TOP}" height="{self.bottom - _TOP:.1f}"'
            parts.append(f'<rect class="panel" x="{left:.1f}" width="{right - left:.1f}" {box}/>')
            parts.append(f'<rect fill="url(#idle)" x="{left:.1f}" width="{right - left:.1f}" {box}/>')
            if panel.work > panel.start:
                width = (panel.work - panel.start) * self.x_scale
                parts.append(f'<rect class="launch" x="{left:.1f}" width="{width:.1f}" {box}/>')
        return "".join(parts)

    def bar(self, bar: Bar) -> str:
        x, width = self.x(bar.start), (bar.stop - bar.start) * self.x_scale
        y, tall = _TOP + bar.slot * self.height, bar.slots * self.height
        inset = 0.5 if self.height >= 5 else 0.0
        color = self.picture.color_of[bar.document] % _COLORS
        shape = f'x="{x:.1f}" y="{y + inset:.1f}" width="{max(width - 0.6, 0.6):.1f}" height="{max(tall - 2 * inset, 0.8):.1f}"'
        rect = f'<rect class="b k{color}" data-d="{bar.document}" {shape}/>'
        return rect + self._bar_label(bar, x, y, width, tall)

    def _bar_label(self, bar: Bar, x: float, y: float, width: float, tall: float) -> str:
        length = self.plan.lengths[bar.document]
        texts = (f"document {bar.document} · {length:,}", f"{bar.document} · {write_number(length)}", f"{bar.document}")
        text = next((t for t in texts if width >= 6.4 * len(t) + 6), "")
        if tall < 12 or not text:
            return ""
        return f'<text class="name" x="{x + width / 2:.1f}" y="{y + tall / 2 + 3.8:.1f}">{text}</text>'

    def summary(self, part: Summary) -> str:
        x, width = self.x(part.start), (part.stop - part.start) * self.x_scale
        y, tall = _TOP + part.slot * self.height, part.slots * self.height
        slots = write_ranges(range(part.slot, part.slot + part.slots))
        info = f"{part.documents} short documents|{part.tokens:,} tokens|micro-batch {part.micro_batch}, slots {slots}"
        if part.slots > 1 and self.picture.unit == "seconds":
            info += f"|busy until {write_seconds(part.least)} to {write_seconds(part.most)}"
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{max(tall, 0.8):.1f}"'
        return f'<rect class="many" data-info="{escape(info, quote=True)}" {shape}/>'

    def axes(self) -> str:
        return self._slot_axis() + self._value_axis() + self._panel_names()

    def _slot_axis(self) -> str:
        slots, parts = self.plan.slots, []
        every = next(
            e for e in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if e * self.height >= 13 or e >= 2048
        )
        for slot in range(0, slots, every):
            y = _TOP + (slot + (0.5 if every == 1 else 0)) * self.height
            parts.append(
                f'<text class="tick" x="{_LEFT - 8}" y="{y + (3.5 if every == 1 else 9):.1f}" text-anchor="end">{slot}</text>'
            )
        nodes = range(self.plan.node_size, slots, self.plan.node_size)
        if nodes and self.plan.node_size * self.height >= 6:
            lines = "".join(f"M{_LEFT} {_TOP + n * self.height:.1f}H{WIDTH - _RIGHT}" for n in nodes)
            parts.append(f'<path class="node" d="{lines}"/>')
        return f'{"".join(parts)}<text class="label" x="{_LEFT - 8}" y="{_TOP - 9}" text-anchor="end">slot</text>'

    def _value_axis(self) -> str:
        parts = []
        seconds = self.picture.unit == "seconds"
        for start, value in self._tick_values():
            x = self.x(start + value)
            parts.append(f'<path class="grid short" d="M{x:.1f} {self.bottom:.1f}v4"/>')
            text = f"{value:g}" if seconds else write_number(value)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{self.bottom + 16:.1f}" text-anchor="middle">{text}</text>'
            )
        label = "predicted seconds" if seconds else "rows of a slot, to the cap of each micro-batch"
        parts.append(
            f'<text class="label" x="{WIDTH - _RIGHT}" y="{self.bottom + 32:.1f}" text-anchor="end">{label}</text>'
        )
        return "".join(parts)

    def _tick_values(self) -> list[tuple[float, float]]:
        if self.picture.unit == "seconds":
            return [(0.0, value) for value in ticks(0, self.picture.end, 9)]
        panels = self.picture.panels
        cap = panels[0].stop - panels[0].start if panels else 1.0
        each = cap * self.x_scale
        return [
            (p.start, value) for p in panels for value in ((0.0, cap) if each >= 90 else (cap,) if each >= 44 else ())
        ]

    def _panel_names(self) -> str:
        parts, last = [], -100.0
        for index, panel in enumerate(self.picture.panels):
            middle = (self.x(panel.start) + self.x(panel.stop)) / 2
            edge = self.x(panel.stop)
            parts.append(f'<path class="barrier" d="M{edge:.1f} {_TOP - 5}V{self.bottom + 4:.1f}"/>')
            text = self._panel_name(index, panel)
            if middle - last >= 6.2 * len(text) + 8 and self.picture.plan.mode == "lockstep":
                parts.append(f'<text class="label" x="{middle:.1f}" y="{_TOP - 9}" text-anchor="middle">{text}</text>')
                last = middle
        return "".join(parts)

    def _panel_name(self, index: int, panel: Panel) -> str:
        return f"micro-batch {index}" if (panel.stop - panel.start) * self.x_scale >= 90 else str(index)


def _hover_data(plan: Plan, bars: Sequence[Bar], cost: Cost) -> dict[str, object]:
    """What the tooltip says: for each drawn document its group, and for each such group its slots and rows."""
    times = group_times(plan, cost)
    documents: dict[int, list[int]] = {}
    groups: dict[tuple[int, int], int] = {}
    described: list[list[object]] = []
    for bar in bars:
        key = (bar.micro_batch, bar.group)
        if key not in groups:
            groups[key] = len(groups)
            group = plan.micro_batches[bar.micro_batch].groups[bar.group]
            comm = (
                group.cp_comm_type
                if isinstance(group.cp_comm_type, str)
                else "/".join(dict.fromkeys(group.cp_comm_type))
            )
            seconds = write_seconds(float(times[bar.micro_batch][bar.group]))
            padded = f", each padded to {group.pad_to:,}" if group.pad_to else ""
            described.append(
                [
                    bar.micro_batch,
                    write_ranges(group.slots),
                    group.degree,
                    comm,
                    len(group.documents),
                    group.rows_per_slot,
                    seconds,
                    padded,
                ]
            )
        documents[bar.document] = [plan.lengths[bar.document], groups[key]]
    return {"documents": documents, "groups": described}


def chrome_trace(plan: Plan, cost: Cost | None = None) -> str:
    """The plan as Chrome-trace JSON (chrome://tracing, Perfetto): one thread a slot, one event a document."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"longspan plan of {plan.slots} slots"}}
    ]
    for slot in range(plan.slots):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": slot, "args": {"name": f"slot {slot}"}})
    for bar in plan_bars(plan, cost).bars:
        group = plan.micro_batches[bar.micro_batch].groups[bar.group]
        args = {
            "tokens": plan.lengths[bar.document],
            "degree": group.degree,
            "micro_batch": bar.micro_batch,
            "cp_comm_type": group.cp_comm_type,
        }
        event = {
            "ph": "X",
            "name": f"document {bar.document}",
            "cat": f"micro-batch {bar.micro_batch}",
            "pid": 0,
            "ts": round(1e6 * bar.start, 3),
            "dur": round(1e6 * (bar.stop - bar.start), 3),
            "args": args,
        }
        events += [event | {"tid": slot} for slot in range(bar.slot, bar.slot + bar.slots)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
