"""The picture of a plan as PNG, with matplotlib (the `viz` extra)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError, counted
from longspan.plan import Cost, Plan
from longspan.report.plan_pictures.bars import Bar, PlanBars, Unit, plan_bars

# Paul Tol's light scheme: told apart with any colour vision, dark labels readable on all. The same as in page.css.
FILLS = ("#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#99ddff", "#bbcc33", "#c9a6d9")

MANY, IDLE = "#93a5bf", "#f3f3f0"


def write_png(plan: Plan, path: str | Path, cost: Cost | None = None, *, unit: Unit = "seconds") -> Path:
    """Write the picture of a plan, slots × time, as a PNG file. Raises ConfigError without matplotlib.

    >>> write_png(plan, "plan.png")
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
    inches = min(9.0, max(2.4, 0.3 * plan.slots + 1.2))
    figure = Figure(figsize=(14, inches), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    x_scale, y_scale = 1300 / (picture.end or 1.0), 100 * (inches - 1.2) / plan.slots
    bars, summaries = picture.thinned(x_scale, y_scale, limit=6000)
    for panel in picture.panels:
        axes.axvspan(panel.start, panel.stop, facecolor=IDLE, edgecolor="none", zorder=0)
        axes.axvline(panel.stop, color="#555555", linewidth=0.8, zorder=3)
    fills = [FILLS[picture.color_of[b.document] % len(FILLS)] for b in bars]
    boxes, small = ([Rectangle((b.start, b.slot), b.stop - b.start, b.slots) for b in of] for of in (bars, summaries))
    axes.add_collection(PatchCollection(small, facecolor=MANY, edgecolor="none", zorder=1))
    axes.add_collection(PatchCollection(boxes, facecolor=fills, edgecolor="white", linewidth=0.5, zorder=2))
    _name_bars(axes, plan, bars, x_scale, y_scale)
    patches = [Rectangle((0, 0), 1, 1, facecolor=fill, edgecolor="#999999", label=name) for fill, name in _legend(unit)]
    figure.legend(handles=patches, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    _label_axes(axes, picture, timed=bool((cost or plan.cost).source))
    figure.savefig(path, dpi=150, facecolor="white")
    return Path(path)


def _name_bars(axes: Any, plan: Plan, bars: Sequence[Bar], x_scale: float, y_scale: float) -> None:
    """Write the number of its document, and where there is room its length, into each bar; scales are pixels a unit."""
    for b in bars:
        width = (b.stop - b.start) * x_scale
        if b.slots * y_scale >= 13 and width >= 46:
            name = f"{b.document} · {plan.lengths[b.document]:,}" if width >= 90 else f"{b.document}"
            middle = ((b.start + b.stop) / 2, b.slot + b.slots / 2)
            axes.text(*middle, name, ha="center", va="center", fontsize=8, color="#222222", zorder=4)


def _legend(unit: Unit) -> tuple[tuple[str, str], ...]:
    """(colour, what it means) of each entry of the legend."""
    idle = "nothing to do" if unit == "rows" else "nothing to do, or the fixed time of a micro-batch"
    document = "a document: one colour, one block over the slots that share it"
    return (FILLS[0], document), (MANY, "busy with documents too short to draw apart"), (IDLE, idle)


def _label_axes(axes: Any, picture: PlanBars, *, timed: bool) -> None:
    slots, seconds = picture.plan.slots, "predicted seconds" if timed else "predicted time, of no machine"
    axes.set(xlim=(0, picture.end or 1.0), ylim=(slots, 0), ylabel="slot")
    axes.set_xlabel(seconds if picture.unit == "seconds" else "rows of a slot, micro-batch after micro-batch")
    axes.set_title(_title(picture.plan), loc="left", fontsize=11)
    if slots <= 24:
        axes.set_yticks([slot + 0.5 for slot in range(slots)], [str(slot) for slot in range(slots)])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _title(plan: Plan) -> str:
    ratio = plan.predicted_seconds / plan.lower_bound_seconds if plan.lower_bound_seconds else 0.0
    bound = f" · {ratio:.3f} × the lower bound" if ratio else ""
    seconds = f" · {plan.predicted_seconds:.3g} s" if plan.cost.source else ""
    return (
        f"{plan.planner} plan · {counted(len(plan.lengths), 'document')}, {counted(plan.tokens, 'token')} on "
        f"{counted(plan.slots, 'slot')} · "
        f"{counted(len(plan.micro_batches), 'micro-batch', 'es')}{seconds}{bound}"
    )
