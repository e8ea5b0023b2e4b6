"""The picture of a plan as PNG, with matplotlib (the `viz` extra)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError, plural
from longspan.plan import Cost, Plan
from longspan.report.pictures.bars import FILLS, Bar, PlanBars, Unit, plan_bars

MANY, IDLE = "#93a5bf", "#f3f3f0"
LETTER_WIDTH, LABEL_HEIGHT = 7, 11  # pixels


def write_png(plan: Plan, path: str | Path, cost: Cost | None = None, *, unit: Unit = "seconds") -> Path:
    """Write the picture of a plan, slots × time, as a PNG file. Raises ConfigError without matplotlib.

    >>> write_png(plan, "plan.png")

    Panels are micro-batches, dotted lines the borders of hosts. Of many bars the largest are drawn, and those too small
    to see are drawn together, as summaries in one colour. The scales are pixels a second or row, and pixels a slot.
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

    picture = plan_bars(plan, cost, unit)
    inches = min(9.0, max(3.0, 0.5 * plan.slots) + 1.4)
    figure = Figure(figsize=(14, inches), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # at matplotlib's 100 pixels an inch: of 14 inches 13 are axes, of the height all but 1.4
    x_scale, y_scale = 1300 / (picture.end or 1.0), 100 * (inches - 1.4) / plan.slots
    bars, summaries = picture.select_bars(x_scale, y_scale, limit=6000)
    for panel in picture.panels:
        axes.axvspan(panel.start, panel.stop, facecolor=IDLE, edgecolor="none", zorder=0)
        axes.axvline(panel.stop, color="#555555", linewidth=0.8, zorder=3)
    for host in range(plan.node_size, plan.slots, plan.node_size):
        axes.axhline(host, color="#555555", linewidth=1.0, linestyle=(0, (1, 3)), zorder=3)
    fills = [FILLS[picture.color_of[b.document]] for b in bars]
    boxes, summary_boxes = (
        [Rectangle((b.start, b.slot), b.stop - b.start, b.slots) for b in group] for group in (bars, summaries)
    )
    axes.add_collection(PatchCollection(summary_boxes, facecolor=MANY, edgecolor="none", zorder=1))
    axes.add_collection(PatchCollection(boxes, facecolor=fills, edgecolor="white", linewidth=0.5, zorder=2))
    _name_bars(axes, picture, bars, x_scale, y_scale)
    patches = [
        Rectangle((0, 0), 1, 1, facecolor=fill, edgecolor="#999999", label=name) for fill, name in _legend_entries(unit)
    ]
    figure.legend(handles=patches, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    _label_axes(axes, picture, timed=bool((cost or plan.cost).source))
    figure.savefig(path, dpi=150, facecolor="white")
    return Path(path)


def _name_bars(axes: Any, picture: PlanBars, bars: Sequence[Bar], x_scale: float, y_scale: float) -> None:
    """Where only the number has room, that is written; else nothing. Scales are pixels a second or row, and a slot."""
    for b in bars:
        width, height = (b.stop - b.start) * x_scale, b.slots * y_scale
        names = f"{b.document} · {picture.plan.lengths[b.document]:,}", f"{b.document}"
        upright = width < LETTER_WIDTH * len(names[1]) + 4
        across, along = (width, height) if upright else (height, width)
        name = next((name for name in names if along >= LETTER_WIDTH * len(name) + 4), "")
        if name and across >= LABEL_HEIGHT:
            middle = ((b.start + b.stop) / 2, b.slot + b.slots / 2)
            color = FILLS[picture.color_of[b.document]]
            ground = {"facecolor": color, "edgecolor": "none", "pad": 0.5}  # covers host lines
            look = {"fontsize": 8, "color": "#222222", "zorder": 4, "bbox": ground, "rotation": 90 if upright else 0}
            axes.text(*middle, name, ha="center", va="center", **look)


def _legend_entries(unit: Unit) -> tuple[tuple[str, str], ...]:
    idle = "nothing to do" if unit == "rows" else "nothing to do, or the fixed time of a micro-batch"
    document = "a document: one block over the slots that share it, in another colour than its neighbours"
    return (FILLS[0], document), (MANY, "busy with documents too short to draw apart"), (IDLE, idle)


def _label_axes(axes: Any, picture: PlanBars, *, timed: bool) -> None:
    """Up to 24 slots have numbers. Times are in seconds if `timed`, which they are under the cost of a machine."""
    slots, seconds = picture.plan.slots, "predicted seconds" if timed else "predicted time, of no machine"
    axes.set(xlim=(0, picture.end or 1.0), ylim=(slots, 0), ylabel="slot")
    axes.set_xlabel(seconds if picture.unit == "seconds" else "rows of a slot, micro-batch after micro-batch")
    axes.set_title(_picture_title(picture.plan), loc="left", fontsize=11, pad=18)
    if picture.plan.mode == "lockstep":
        _name_panels(axes, picture)
    if slots <= 24:
        axes.set_yticks([slot + 0.5 for slot in range(slots)], [str(slot) for slot in range(slots)])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _name_panels(axes: Any, picture: PlanBars) -> None:
    """A number needs 2% of the axis, a name four times that; a panel gets none that would cover the last one."""
    last_middle, room = -math.inf, 0.02 * (picture.end or 1.0)
    for index, panel in enumerate(picture.panels):
        middle = (panel.start + panel.stop) / 2
        if middle - last_middle >= room:
            name = f"micro-batch {index}" if panel.stop - panel.start >= 4 * room else f"{index}"
            axes.annotate(
                name, (middle, 0), (0, 4), textcoords="offset points", ha="center", fontsize=8, color="#555555"
            )
            last_middle = middle


def _picture_title(plan: Plan) -> str:
    """Return the title: planner, documents, slots, micro-batches, predicted seconds and their ratio to the bound."""
    ratio = plan.predicted_seconds / plan.lower_bound_seconds if plan.lower_bound_seconds else 0.0
    bound = f" · {ratio:.3f} × the lower bound" if ratio else ""
    seconds = f" · {plan.predicted_seconds:.3g} s" if plan.cost.source else ""
    return (
        f"{plan.planner} plan · {plural(len(plan.lengths), 'document')}, {plural(plan.tokens, 'token')} on "
        f"{plural(plan.slots, 'slot')} · "
        f"{plural(len(plan.micro_batches), 'micro-batch', 'es')}{seconds}{bound}"
    )
