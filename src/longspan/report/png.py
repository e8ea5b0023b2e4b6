"""The picture of a plan as a PNG file, drawn by matplotlib."""

import math
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError
from longspan.plan import Plan
from longspan.report.bars import FILLS, PlanBars, plan_bars
from longspan.report.gantt import LEGEND, plan_fact_lines

MANY = "#93a5bf"
IDLE = "#f3f3f0"
LETTER_WIDTH = 7  # pixels
LABEL_HEIGHT = 11


def write_png(plan: Plan, path: str | Path) -> Path:
    """Write the picture of a plan, slots × time, as a PNG file. Raises ConfigError without matplotlib.

    >>> write_png(plan, "plan.png")  # doctest: +SKIP

    Panels are micro-batches, dotted lines the borders of hosts. Of many bars the largest are drawn, and those too small
    to see are drawn together, as summaries in one colour.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ConfigError(
            f"a PNG needs matplotlib, which is not installed ({error}); pip install 'longspan[viz]'"
        ) from None

    picture = plan_bars(plan)
    inches = min(9.0, max(3.0, 0.5 * plan.slots) + 1.4)
    figure = Figure(figsize=(14, inches), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # at matplotlib's 100 pixels an inch: of 14 inches 13 are axes, of the height all but 1.4
    x_scale = 1300 / (picture.end or 1.0)  # pixels a second or row
    y_scale = 100 * (inches - 1.4) / plan.slots  # pixels a slot
    bars, summaries = picture.select_bars(x_scale, y_scale, limit=6000)
    for panel in picture.panels:
        axes.axvspan(panel.start, panel.stop, facecolor=IDLE, edgecolor="none", zorder=0)
        axes.axvline(panel.stop, color="#555555", linewidth=0.8, zorder=3)
    for host in range(plan.node_size, plan.slots, plan.node_size):
        axes.axhline(host, color="#555555", linewidth=1.0, linestyle=(0, (1, 3)), zorder=3)
    fills = [FILLS[picture.color_by_document[b.document]] for b in bars]
    boxes, summary_boxes = (
        [Rectangle((b.start, b.slot), b.stop - b.start, b.slots) for b in group] for group in (bars, summaries)
    )
    axes.add_collection(PatchCollection(summary_boxes, facecolor=MANY, edgecolor="none", zorder=1))
    axes.add_collection(PatchCollection(boxes, facecolor=fills, edgecolor="white", linewidth=0.5, zorder=2))
    for b in bars:
        width = (b.stop - b.start) * x_scale
        height = b.slots * y_scale
        names = f"{b.document} · {plan.lengths[b.document]:,}", f"{b.document}"
        upright = width < LETTER_WIDTH * len(names[1]) + 4
        across, along = (width, height) if upright else (height, width)
        name = next((name for name in names if along >= LETTER_WIDTH * len(name) + 4), "")
        if name and across >= LABEL_HEIGHT:
            fill = FILLS[picture.color_by_document[b.document]]
            axes.text(
                (b.start + b.stop) / 2,
                b.slot + b.slots / 2,
                name,
                ha="center",
                va="center",
                fontsize=8,
                color="#222222",
                zorder=4,
                bbox={"facecolor": fill, "edgecolor": "none", "pad": 0.5},  # hides lines
                rotation=90 if upright else 0,
            )
    entries = (
        (FILLS[0], LEGEND[0][1]),
        (MANY, LEGEND[1][1]),
        (IDLE, "nothing to do, or the fixed time of a micro-batch"),
    )
    patches = [Rectangle((0, 0), 1, 1, facecolor=fill, edgecolor="#999999", label=name) for fill, name in entries]
    figure.legend(handles=patches, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    _label_axes(axes, picture, timed=bool(plan.cost.source))
    figure.savefig(path, dpi=150, facecolor="white")
    return Path(path)


def _label_axes(axes: Any, picture: PlanBars, *, timed: bool) -> None:
    """Up to 24 slots have numbers. A panel's number needs 2% of the axis, its name four times that; a panel gets none
    that would cover the last one.
    """
    plan = picture.plan
    seconds = "predicted seconds" if timed else "time as priced, of no machine"
    axes.set(xlim=(0, picture.end or 1.0), ylim=(plan.slots, 0), ylabel="slot")
    axes.set_xlabel(seconds)
    axes.set_title("\n".join(plan_fact_lines(plan)), loc="left", fontsize=9, pad=18)
    last_middle = -math.inf
    room = 0.02 * (picture.end or 1.0)
    for index, panel in enumerate(picture.panels if plan.mode == "lockstep" else ()):
        middle = (panel.start + panel.stop) / 2
        if middle - last_middle >= room:
            name = f"micro-batch {index}" if panel.stop - panel.start >= 4 * room else f"{index}"
            axes.annotate(
                name, (middle, 0), (0, 4), textcoords="offset points", ha="center", fontsize=8, color="#555555"
            )
            last_middle = middle
    if plan.slots <= 24:
        axes.set_yticks([slot + 0.5 for slot in range(plan.slots)], [str(slot) for slot in range(plan.slots)])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
