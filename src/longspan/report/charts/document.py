"""A chart as an SVG document of its own, for pages that are not ours: title, legend, curves and colours in one file."""

from longspan.report.charts.chart import Chart, Series, chart_svg, mark
from longspan.report.markup import label, tag, text

HEAD = 42  # above the drawing, beside the lines of the title: unit and legend
LINE = 17
# The light colours of page.css; a document shows the same on a dark page, on its own white ground.
STYLE = """
text{font:12px system-ui,sans-serif;fill:#5d6670}.title,.strong{font-weight:600;fill:#1d2126}.tick{font-size:11px}
.grid{stroke:#ecece8;fill:none}.grid.short,.axis{stroke:#9aa4af;fill:none}
.reference{stroke:#5d6670;stroke-dasharray:4 3;fill:none}.halo{paint-order:stroke;stroke:#fff;stroke-width:4px}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}.curve.faint{opacity:.38}.mark{stroke:#fff;stroke-width:1.2}
.curve.c0{stroke:#2f6fb3}.curve.c1{stroke:#d1495b}.curve.c2{stroke:#228833}.curve.c3{stroke:#aa3377}
.mark.c0{fill:#2f6fb3}.mark.c1{fill:#d1495b}.mark.c2{fill:#228833}.mark.c3{fill:#aa3377}
"""


def chart_document(chart: Chart) -> str:
    """The chart as the text of an .svg file.

    >>> Path("degrees.svg").write_text(chart_document(chart))
    """
    titles = chart.title.splitlines()
    head = HEAD + LINE * len(titles)
    width, height, x, legend = chart.width, chart.height + head, 52.0, list[str]()
    for series in chart.series:
        legend.append(_key(series, x, head - 14.0) + label(series.name, x + 14, head - 10.0, "start"))
        x += 34 + 6.6 * len(series.name)
    return (
        tag(
            "svg",
            tag("title", text(f"{'; '.join(titles)}: {chart.y_label} over {chart.x_label}")),
            tag("style", STYLE),
            tag("rect", width=width, height=height, fill="#fff"),
            *(label(line, 12, 18 + LINE * i, "start", "" if i else "title") for i, line in enumerate(titles)),
            *legend,
            label(chart.y_label, width - 14.0, head - 10.0, "end"),
            tag("svg", chart_svg(chart), y=head, width=width, height=chart.height),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {height}",
            role="img",
        )
        + "\n"
    )


def _key(series: Series, x: float, y: float) -> str:
    """What a curve is drawn by, before its name in the legend."""
    if series.kind == "marks":
        return mark(series.color, x + 4, y, 4.0)
    return tag("path", class_=f"curve {series.kind} c{series.color}", d=f"M{x - 4:.1f} {y:.1f}h14")
