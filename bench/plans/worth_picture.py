"""The picture of `worth.py`: gains by slots, a panel for each network."""

import math
from collections.abc import Iterator

from worth_cases import NAMES, NETWORKS, SLOTS
from worth_page import Row, select, usual

from longspan.report.page import label, tag, text

# The colours of page.css, for light and for dark pages.
STYLE = """
svg{--card:#fff;--ink:#1d2126;--soft:#5d6670;--grid:#ecece8;--axis:#9aa4af;
--c0:#2f6fb3;--c1:#d1495b;--c2:#228833;--c3:#aa3377}
@media (prefers-color-scheme: dark){svg{--card:#1b1f25;--ink:#e8eaed;--soft:#9aa4af;--grid:#2c323a;--axis:#77808a;
--c0:#6aaeff;--c1:#ff8090;--c2:#5fcf73;--c3:#e083bd}}
text{font:12px system-ui,sans-serif;fill:var(--soft)}.title,.strong{font-weight:600;fill:var(--ink)}
.tick{font-size:11px}.paper{fill:var(--card)}
.grid{stroke:var(--grid);fill:none}.grid.short,.axis{stroke:var(--axis);fill:none}
.reference{stroke:var(--soft);stroke-dasharray:4 3;fill:none}
.halo{paint-order:stroke;stroke:var(--card);stroke-width:4px}.mark{stroke:var(--card);stroke-width:1.2}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}.curve.faint{opacity:.38}
.curve.c0{stroke:var(--c0)}.curve.c1{stroke:var(--c1)}.curve.c2{stroke:var(--c2)}.curve.c3{stroke:var(--c3)}
.mark.c0{fill:var(--c0)}.mark.c1{fill:var(--c1)}.mark.c2{fill:var(--c2)}.mark.c3{fill:var(--c3)}
"""
PANEL, HEIGHT, LEFT, TOP, PLOT = 225, 300, 44, 78, 170
COLORS = dict(zip(NAMES, range(len(NAMES)), strict=True))
WORDS = {"lognorm": "lognormal", "bimodal": "bimodal: 90 % of 2K, 10 % of 64K", "files": "source files"}


def picture(record: Row) -> str:
    """Gains by slots, a panel for each network, as the text of an .svg file."""
    most = max(row["gain"] for row in select(record, **usual()) if row["lengths"] in NAMES and row["slots"] in SLOTS)
    width = PANEL * len(NETWORKS) + 20
    heading = "Predicted gain of dynamic plans over the best plan of one degree and type (1.0: one degree is as good)"
    legend = [
        part
        for i, name in enumerate(NAMES)
        for part in (_mark(60 + 240 * i, 46, COLORS[name]), label(WORDS[name], 70 + 240 * i, 50, "start"))
    ]
    panels = [part for i, gbps in enumerate(NETWORKS) for part in _panel(record, gbps, 10.0 + PANEL * i, most)]
    footer = "GPUs (H200, hosts of 8; 32 query and 8 key/value heads, 8K tokens a slot, 32K tokens a GPU and step)"
    return (
        tag(
            "svg",
            tag("title", text(heading)),
            tag("style", STYLE),
            tag("rect", class_="paper", width=width, height=HEIGHT),
            label(heading, 12, 22, "start", "title"),
            *legend,
            *panels,
            label(footer, LEFT, HEIGHT - 10.0, "start"),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {HEIGHT}",
            role="img",
        )
        + "\n"
    )


def _panel(record: Row, gbps: float, left: float, most: float) -> Iterator[str]:
    start, end, bottom = left + LEFT, left + PANEL - 14, TOP + PLOT
    top_value = most * 1.06

    def up(gain: float) -> float:
        return bottom - math.log(max(gain, 0.97) / 0.97) / math.log(top_value / 0.97) * PLOT

    def across(slots: int) -> float:
        return start + 10 + SLOTS.index(slots) / (len(SLOTS) - 1) * (end - start - 20)

    yield label(f"{gbps:g} GB/s between hosts", start, TOP - 10.0, "start", "strong")
    for gain in (value for value in (1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0) if value <= top_value):
        kind = "reference" if gain == 1.0 else "grid"
        yield tag("path", class_=kind, d=f"M{start:.1f} {up(gain):.1f}H{end:.1f}")
        yield label(f"{gain:g}", start - 6, up(gain) + 4, "end", "tick")
    for slots in SLOTS:
        yield label(f"{slots:,}", across(slots), bottom + 18.0, "middle", "tick")
    for name in NAMES:
        rows = [row for row in select(record, **usual(lengths=name, gbps=gbps)) if row["slots"] in SLOTS]
        points = [(across(row["slots"]), up(row["gain"])) for row in sorted(rows, key=lambda row: row["slots"])]
        yield tag("path", class_=f"curve c{COLORS[name]}", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points))
        yield from (_mark(x, y, COLORS[name]) for x, y in points)


def _mark(x: float, y: float, color: int) -> str:
    return tag("circle", class_=f"mark c{color}", cx=f"{x:.1f}", cy=f"{y:.1f}", r=4)
