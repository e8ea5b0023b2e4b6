"""The picture of a plan: bars of which slots are busy with which document, as SVG, which matplotlib paints as PNG.

On a page, page.js adds hover and keyboard. A slot's wide groups come first inside a micro-batch, whatever the order in
which it runs them, so that a long document that spans slots is one block.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from xml.etree import ElementTree

from longspan.errors import ConfigError, plural
from longspan.plain_text import number_text, ranges_text, seconds_text
from longspan.plan import Cost, Plan
from longspan.plan.micro_batch import comm_type_text
from longspan.plan.plan import group_counts
from longspan.report.bars import FILLS, Bar, PlanBars, Summary, group_times, plan_bars
from longspan.report.page import PATTERNS, Part, page, page_head, read_report_file, section
from longspan.run.facts import time_and_command

# A page shows the picture this wide.
WIDTH = 1120
# A page on a telephone shows the picture this wide.
NARROW = 400
LEGEND = (
    ("b k0", "a document: one block over the slots that share it, in another colour than its neighbours"),
    ("many", "busy with documents too short to draw apart"),
    ("launch", "fixed time of a micro-batch"),
    ("idle", "nothing to do"),
)
_LEFT = 54
_TOP = 26
_BOTTOM = 40
_RIGHT = 12
# The title and facts take this height above the drawing.
HEAD = 68
# The legend takes this height below the drawing.
_FOOT = 44
# page.css gives the shapes' classes the same colours.
_SHAPE_COLORS = {
    **{f"k{i}": fill for i, fill in enumerate(FILLS)},
    "many": "#93a5bf",
    "idle": "#f1f1ed",
    "launch": "#dcdcd4",
}
# A line of a path goes from a point to an x, to a y, or so far down.
LINE = re.compile(r"M([\d.]+) ([\d.]+)([HVv])([\d.]+)")
ALIGNMENTS = {"start": "left", "middle": "center", "end": "right"}
PICTURE_NOTE = (
    "Times of a picture are those of the plan's cost model, not measured. Within a micro-batch the documents of the "
    "widest groups come first here, whatever a slot's own order."
)


def plan_part(plan: Plan, name: str, seconds: float | None, *, measured: bool) -> Part:
    """Return the facts of a plan and its picture, for a wide and for a narrow page. `seconds` are those that its step
    took. `measured` says whether the machine that prices it was measured: without that, times only compare, and none is
    shown.
    """
    groups = list[str]()
    for row in group_counts(plan):
        slots = f"{row['degree']} slots, by {row['cp_comm_type']}" if row["degree"] > 1 else "one slot"
        groups.append(f"{plural(row['count'], 'group')} of {slots}")
    facts = [*plan_facts(plan, seconds, measured=measured), ("groups", "; ".join(groups))]
    cost = plan.cost if measured else replace(plan.cost, source="")
    pictures = [gantt_svg(plan, cost, width=width) for width in (WIDTH, NARROW)]
    shown = {int(number) for number in re.findall(r'data-d="(\d+)"', str(pictures))}
    documents = _document_facts(plan, cost, shown)
    legend = picture_legend(pictures[0])
    return {"name": name, "facts": facts, "pictures": pictures, "documents": documents, "legend": legend}


def picture_legend(picture: str) -> list[tuple[str, str]]:
    """Return the entries of LEGEND whose shapes a picture has."""
    return [(kind, words) for kind, words in LEGEND if f'class="{kind.partition(" ")[0]}' in picture]


def plan_facts(plan: Plan, seconds: float | None = None, *, measured: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the facts of a plan as name and text; `seconds` and `measured` as of `plan_part`."""
    degrees = sorted({group.degree for group in plan.groups})
    source = plan.cost.source or ""
    yield "planner", f"{plan.planner}, {plan.mode}"
    yield "documents", f"{len(plan.lengths):,}, longest {max(plan.lengths, default=0):,}"
    yield "tokens", f"{plan.tokens:,}"
    if plan.parents is not None:
        prefixes = len(plan.lengths) - len(plan.whole_documents)
        yield "shared", f"{plural(prefixes, 'prefix', 'es')}, {plan.spared_rows:,} rows fewer"
    yield "micro-batches", f"{len(plan.micro_batches)} on {plural(plan.slots, 'slot')}"
    if degrees:
        yield "degrees", ", ".join(map(str, degrees)) if len(degrees) <= 6 else f"{degrees[0]} to {degrees[-1]}"
    yield "rows used", f"{100 * plan.efficiency:.0f}% of the fullest slot's"
    if source and measured:
        yield "predicted", seconds_text(plan.predicted_seconds)
    if seconds is not None:
        yield "measured", seconds_text(seconds)
    unmeasured = f"{source}, not measured here: times only compare" if source else "no machine: times only compare"
    yield ("priced for", source if source and measured else unmeasured)
    if plan.cost.closing_seconds and measured:
        yield (
            "of these, closing",
            f"{seconds_text(plan.cost.closing_seconds)}: parameters gathered, gradients summed",
        )
    if plan.lower_bound_seconds:
        yield "over the lower bound", f"× {number_text(plan.ratio, 4)}"


def plan_document(plan: Plan, *, title: str = "plan") -> str:
    """Return the picture of one plan in time as the text of an .svg file, with its title and its legend."""
    height = slot_height(plan.slots) * plan.slots + _TOP + _BOTTOM
    picture = gantt_svg(plan)
    facts = [f"{name} {value}" for name, value in plan_facts(plan)]
    # As one line the facts would be wider than the picture.
    fact_lines = (" · ".join(facts[:5]), " · ".join(facts[5:]))
    size = {"width": WIDTH, "height": round(HEAD + height + _FOOT)}
    entries = list[str]()
    for i, (kind, words) in enumerate(picture_legend(picture)):  # two in a row
        x = 54 + 540 * (i % 2)
        y = round(HEAD + height) + 4 + 18 * (i // 2)
        entries.append(svg_element("rect", class_=kind, x=x, y=y, width=22, height=12))
        entries.append(svg_text(words, x + 28, y + 10, "start"))
    picture = picture.replace("<svg", f'<svg width="{WIDTH}" height="{height:g}"', 1)
    return svg_element(
        "svg",
        svg_element("style", read_report_file("page.css")),
        PATTERNS,
        svg_element("rect", fill="var(--card)", **size),
        svg_element("text", escape(title), x=12, y=22, style="font-size: 15px; font-weight: 600; fill: var(--ink)"),
        *(svg_text(line, 12, 42 + 16 * i, "start") for i, line in enumerate(fact_lines)),
        svg_element("g", picture, transform=f"translate(0 {HEAD})"),
        *entries,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {size['width']} {size['height']}",
    )


def plan_page(plan: Plan, *, title: str = "plan") -> str:
    """Return a page with the picture of one plan."""
    part = plan_part(plan, title, None, measured=bool(plan.cost.source))
    plans = section("Plan of a step", {"plans": {"plans": [part], "first": 0}}, {"note": PICTURE_NOTE})
    return page(
        f"{title} · longspan", {"head": page_head(title, " · ".join(time_and_command())), "sections": [plans]}
    )


def slot_height(slots: int) -> float:
    """Return the height of a slot in pixels: tall for few slots, and never a picture taller than a screen."""
    return min(30.0, max(14.0, 240 / slots)) if slots <= 24 else min(14.0, 620 / slots)


def gantt_svg(plan: Plan, cost: Cost | None = None, *, width: int = WIDTH) -> str:
    """Return an SVG of slots × time, coloured by document."""
    cost = plan.cost if cost is None else cost
    canvas = _Canvas(plan_bars(plan, cost), cost, width)
    bars, summaries = canvas.picture.select_bars(canvas.x_scale, canvas.slot_height)
    drawn = *map(canvas.summary, summaries), *map(canvas.bar, bars), *canvas.slot_axis(), *canvas.value_axis()
    return svg_element(
        "svg",
        *canvas.panels(),
        *drawn,
        *canvas.panel_ends_and_names(),
        class_="gantt",
        viewBox=f"0 0 {width} {canvas.bottom + _BOTTOM:.0f}",
        tabindex=0,
        role="img",
        aria_label=f"{plural(plan.slots, 'slot')} over time. Arrow keys read the documents.",
    )


def axis_ticks(end: float, count: int) -> list[float]:
    """List multiples of a round number (1, 2, 2.5 or 5 times a power of ten) from 0 to `end`, at most about `count`."""
    if not end > 0:
        return [0]
    least_step = end / count
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= least_step * (1 - 1e-9))  # forgives rounding
    return [k * step for k in range(math.floor(end / step + 1e-9) + 1)]


class _Canvas:
    """Draws the parts of one picture as SVG elements; x is in seconds, or shares of the step, y in slots."""

    def __init__(self, picture: PlanBars, cost: Cost, width: int) -> None:
        self.picture = picture
        self.plan = picture.plan
        self.timed = bool(cost.source)
        self.x_scale = (width - _LEFT - _RIGHT) / (picture.end or 1.0)
        self.slot_height = slot_height(picture.plan.slots)
        self.bottom = _TOP + self.slot_height * picture.plan.slots
        self.right = width - _RIGHT

    def x(self, value: float) -> float:
        return _LEFT + value * self.x_scale

    def panels(self) -> Iterator[str]:
        """Yield what lies behind the bars of each micro-batch: where slots are idle, and its fixed launch time."""
        panel_area = sum((panel.stop - panel.work) * self.plan.slots for panel in self.picture.panels)
        # Areas are equal only up to rounding.
        has_idle_slots = sum(bar.area for bar in self.picture.bars) < 0.999 * panel_area
        for panel in self.picture.panels:
            box = {"x": self.x(panel.start), "y": _TOP, "height": self.bottom - _TOP}
            if has_idle_slots:
                yield svg_element("rect", class_="idle", width=(panel.stop - panel.start) * self.x_scale, **box)
            if panel.work > panel.start:
                yield svg_element("rect", class_="launch", width=(panel.work - panel.start) * self.x_scale, **box)

    def bar(self, bar: Bar) -> str:
        """Return the rectangle of a bar, with the document's name where that has room.

        Rectangles are smaller than their place by a gap, but never too small to be seen.
        """
        x = self.x(bar.start)
        width = (bar.stop - bar.start) * self.x_scale
        y = _TOP + bar.slot * self.slot_height
        height = bar.slots * self.slot_height
        inset = 0.5 if self.slot_height >= 5 else 0.0
        size = {"width": max(width - 0.6, 0.6), "height": max(height - 2 * inset, 0.8)}
        css = f"b k{self.picture.color_by_document[bar.document]}"
        rect = svg_element("rect", class_=css, data_d=bar.document, x=x, y=y + inset, **size)
        length = self.plan.lengths[bar.document]
        word = "prefix" if bar.document in (self.plan.parents or ()) else "document"
        names = (
            f"{word} {bar.document} · {length:,}",
            f"{bar.document} · {number_text(length)}",
            f"{bar.document}",
        )
        # pixels of a character, and of both margins
        name = next((n for n in names if width >= 6.4 * len(n) + 6), "")
        if not name or height < 12:
            return rect
        return rect + svg_element("text", name, class_="name", x=x + width / 2, y=y + height / 2 + 3.8)

    def summary(self, part: Summary) -> str:
        """Return the hatched rectangle of documents too small to draw; its words show where it is pointed at."""
        slots = ranges_text(range(part.slot, part.slot + part.slots))
        words = f"micro-batch {part.micro_batch}, slots {slots}"
        info = f"{plural(part.documents, 'short document')}|{plural(part.tokens, 'token')}|{words}"
        place = {"x": self.x(part.start), "y": _TOP + part.slot * self.slot_height}
        return svg_element(
            "rect",
            class_="many",
            data_info=info,
            **place,
            width=max((part.stop - part.start) * self.x_scale, 0.6),
            height=max(part.slots * self.slot_height, 0.8),
        )

    def slot_axis(self) -> Iterator[str]:
        """Yield the numbers of slots, and lines between hosts. Every 2^n-th slot is numbered, so that numbers are at
        least 13 pixels apart: at its middle if all are (n = 0), else at its top.
        """
        yield svg_text("slot", _LEFT - 8, _TOP - 9, "end")
        slot_step = 1 << math.ceil(math.log2(max(1.0, 13 / self.slot_height)))
        for slot in range(0, self.plan.slots, slot_step):
            y = _TOP + slot * self.slot_height + (self.slot_height / 2 + 3.5 if slot_step == 1 else 9)
            yield svg_text(str(slot), _LEFT - 8, y, "end", "tick")
        nodes = range(self.plan.node_size, self.plan.slots, self.plan.node_size)
        if nodes and self.plan.node_size * self.slot_height >= 6:
            lines = "".join(f"M{_LEFT} {_TOP + n * self.slot_height:.1f}H{self.right}" for n in nodes)
            yield svg_element("path", class_="node", d=lines)

    def value_axis(self) -> Iterator[str]:
        """Yield the ticks below the picture: seconds of a machine, or shares of the step where none is named."""
        places = [(value, f"{value:g}") for value in axis_ticks(self.picture.end, 9 if self.right > 900 else 4)]
        if not self.timed:
            places = [(share * self.picture.end, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
        words = "predicted seconds" if self.timed else "share of the step, as priced"
        for value, name in places:
            yield svg_element("path", class_="grid short", d=f"M{self.x(value):.1f} {self.bottom:.1f}v4")
            yield svg_text(name, self.x(value), self.bottom + 16, "middle", "tick")
        yield svg_text(words, self.right, self.bottom + 32, "end")

    def panel_ends_and_names(self) -> Iterator[str]:
        """Yield a line at the end of each micro-batch, and in lockstep its name above, as far as names have room."""
        last_name_x = -100.0
        for index, panel in enumerate(self.picture.panels):
            middle = self.x((panel.start + panel.stop) / 2)
            edge = self.x(panel.stop)
            yield svg_element("path", class_="barrier", d=f"M{edge:.1f} {_TOP - 5}V{self.bottom + 4:.1f}")
            name = f"micro-batch {index}" if (panel.stop - panel.start) * self.x_scale >= 90 else str(index)
            # 6.2 pixels a character, and 8 between names
            if middle - last_name_x >= 6.2 * len(name) + 8 and self.plan.mode == "lockstep":
                yield svg_text(name, middle, _TOP - 9, "middle")
                last_name_x = middle


def _document_facts(plan: Plan, cost: Cost, shown: set[int]) -> dict[int, list[tuple[str, str]]]:
    times = group_times(plan, cost)
    step_seconds = plan.timeline(cost).step_seconds or 1.0
    facts = dict[int, list[tuple[str, str]]]()
    for batch, micro_batch in enumerate(plan.micro_batches):
        for group, seconds in zip(micro_batch.groups, times[batch].tolist(), strict=True):
            count = len(group.documents)
            types = comm_type_text(group.cp_comm_type)
            padded = f", each padded to {group.pad_to:,}" if group.pad_to else ""
            rows_name = f"group{f' of {count} documents' if count > 1 else ''}{padded}: rows on a slot"
            group_facts = [("micro-batch", str(batch))]
            group_facts.append(("slots" if group.degree > 1 else "slot", ranges_text(group.slots)))
            group_facts.append(("degree", f"{group.degree}, {types}" if group.degree > 1 else "1"))
            time = seconds_text(seconds) if cost.source else f"{100 * seconds / step_seconds:.0f}% of the step"
            group_facts += [(rows_name, f"{group.rows_per_slot:,}"), ("group: time as priced", time)]
            for document in shown.intersection(group.documents):
                document_facts = [("tokens", f"{plan.lengths[document]:,}")]
                if plan.parents is not None and (parent := plan.parents[document]) >= 0:
                    before = f"{plan.bases[document]:,} tokens, up to the end of prefix {parent}"
                    document_facts.append(("after", before))
                elif branches := (plan.parents or ()).count(document):
                    document_facts.append(("computed once for", plural(branches, "document")))
                facts[document] = document_facts + group_facts
    return facts


def write_png(plan: Plan, path: str | Path, *, title: str = "plan") -> Path:
    """Write what `plan_document` draws as a PNG file. Raises ConfigError without matplotlib.

    >>> write_png(plan, "plan.png")  # doctest: +SKIP
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ConfigError(
            f"a PNG needs matplotlib, which is not installed ({error}); pip install 'longspan[viz]'"
        ) from None

    document = ElementTree.fromstring(plan_document(plan, title=title))
    width, height = (float(size) for size in document.attrib["viewBox"].split()[2:])
    figure = Figure(figsize=(width / 100, height / 100))  # a pixel of the document is a hundredth of an inch
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    # the picture is a drawing within the document, `top` pixels down; the rest stands in the document itself
    for parent, top in (*((part, HEAD) for part in document.iterfind("{*}g/{*}svg")), (document, 0)):
        for shape in parent:
            x = float(shape.get("x", 0))
            y = float(shape.get("y", 0)) + top
            name = shape.get("class", "").removeprefix("b ")
            if shape.tag.endswith("rect") and name in _SHAPE_COLORS:
                size = (float(shape.attrib[side]) for side in ("width", "height"))
                axes.add_patch(
                    Rectangle((x, y), *size, facecolor=_SHAPE_COLORS[name], edgecolor="white", linewidth=0.3)
                )
            elif shape.tag.endswith("text"):
                align = ALIGNMENTS[shape.get("text-anchor", "middle" if name == "name" else "start")]
                points = 10 if "style" in shape.attrib else 7.2  # a title has a style
                axes.text(x, y, shape.text or "", ha=align, fontsize=points, color="#333a41", parse_math=False)
            for *begin, direction, end in LINE.findall(shape.get("d", "")):
                start_x, start_y, to = map(float, (*begin, end))  # y without `top`
                end_x, end_y = {"H": (to, start_y), "V": (start_x, to), "v": (start_x, start_y + to)}[direction]
                dots = ":" if name == "node" else "-"
                axes.plot((start_x, end_x), (start_y + top, end_y + top), dots, color="#8b9199", linewidth=0.8)
    figure.savefig(path, dpi=192, facecolor="white")
    return Path(path)


def svg_element(element: str, *content: str, **attributes: object) -> str:
    """Return one element. `content` is markup, plain words by `svg_text`; attribute values are escaped.

    >>> svg_element("rect", class_="bar", x=1.25, data_d=3, hidden=None)
    '<rect class="bar" x="1.2" data-d="3"></rect>'

    Underscores in names become hyphens, a trailing one is dropped; floats have one decimal; None is left out.
    """
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    written = (
        f' {name}="{value:.1f}"' if isinstance(value, float) else f' {name}="{escape(str(value), quote=True)}"'
        for name, value in named
    )
    return f"<{element}{''.join(written)}>{''.join(content)}</{element}>"


def svg_text(words: str, x: float, y: float, anchor: str, css_class: str = "label") -> str:
    """Return words in a drawing at (x, y), which is where they start, end or have their middle, as `anchor` says."""
    return svg_element("text", escape(words), class_=css_class, x=float(x), y=float(y), text_anchor=anchor)
