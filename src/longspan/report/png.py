"""The picture of a plan as a PNG file: its SVG document, painted by matplotlib."""

import re
from pathlib import Path
from xml.etree import ElementTree

from longspan.errors import ConfigError
from longspan.plan import Plan
from longspan.report.bars import FILLS
from longspan.report.gantt import HEAD, plan_document

COLORS = {  # of the shapes' classes, as in page.css
    **{f"k{i}": fill for i, fill in enumerate(FILLS)},
    "many": "#93a5bf",
    "idle": "#f1f1ed",
    "launch": "#dcdcd4",
}
LINE = re.compile(r"M([\d.]+) ([\d.]+)([HVv])([\d.]+)")  # of a path: from a point to an x, to a y, or so far down
ALIGNMENTS = {"start": "left", "middle": "center", "end": "right"}


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
    for parent, top in (*((part, HEAD) for part in document.iterfind("{*}g/{*}svg")), (document, 0)):
        for shape in parent:
            x = float(shape.get("x", 0))
            y = float(shape.get("y", 0)) + top
            name = shape.get("class", "").removeprefix("b ")
            if shape.tag.endswith("rect") and name in COLORS:
                size = (float(shape.attrib[side]) for side in ("width", "height"))
                axes.add_patch(Rectangle((x, y), *size, facecolor=COLORS[name], edgecolor="white", linewidth=0.3))
            elif shape.tag.endswith("text"):
                align = ALIGNMENTS[shape.get("text-anchor", "middle" if name == "name" else "start")]
                points = 10 if "style" in shape.attrib else 7.2  # a title has a style
                axes.text(x, y, shape.text or "", ha=align, fontsize=points, color="#333a41", parse_math=False)
            for *begin, direction, end in LINE.findall(shape.get("d", "")):
                x, y, to = map(float, (*begin, end))
                end_x, end_y = {"H": (to, y), "V": (x, to), "v": (x, y + to)}[direction]
                dots = ":" if name == "node" else "-"
                axes.plot((x, end_x), (y + top, end_y + top), dots, color="#8b9199", linewidth=0.8)
    figure.savefig(path, dpi=192, facecolor="white")
    return Path(path)
