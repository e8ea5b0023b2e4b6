"""A page: a JSON value, and the style and script that draw it; curves as values.

The value has `title`, `head` and `sections`, each with `title` and `parts`. A part has one key: note, facts, cards,
charts, table, text, details or plans, whose drawing is the method of that name in page.js.
"""

import base64
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from longspan import __version__
from longspan.files import json_safe_values

Part = dict[str, Any]


def page_head(title: str, *lines: str, story: str = "", **others: object) -> Part:
    """Return the head of a page: its title, a sentence (`story`), and lines, of which empty ones are left out; `others`
    are further values that page.js draws.
    """
    return {"title": title, "version": __version__, "story": story, "lines": [*filter(None, lines)], **others}


def section(title: str, *parts: Part, key: str = "") -> Part:
    """Return a section; `key` names it where the title changes while a run is followed."""
    return {"title": title, "key": key or title, "parts": [*parts]}


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> Part:
    """Return a table under the `names` of columns; a cell is text, or [text, "good" or "bad"]."""
    return {"table": {"names": [*names], "rows": [[*row] for row in rows]}}


def page(title: str, value: Mapping[str, Any], *, live: bool = False) -> str:
    """Return the page that draws a value; a `live` one asks its server for newer ones. What the page shows is in it.
    The JSON holds no `<`, so that no text in it ends its element or begins another.
    """
    data = json.dumps(json_safe_values({"name": title, "live": live, **value}), separators=(",", ":"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{content_policy(live=live)}">'
        f"<title>{escape(title)}</title><style>\n{read_report_file('page.css')}</style></head>\n<body>{PATTERNS}<main></main>"
        "<noscript>A script in this page draws it; let the browser run scripts.</noscript>"
        '<div id="tip" role="status" aria-live="polite" hidden></div>'
        f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>'
        f"<script>{read_report_file('page.js')}</script></body></html>\n"
    )


def content_policy(*, live: bool) -> str:
    """Return what a page allows a browser: its one script, known by its hash, and no request but one to its server."""
    digest = base64.b64encode(sha256(read_report_file("page.js").encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    return f"{policy}base-uri 'none'; form-action 'none'" + ("; connect-src 'self'" if live else "")


def read_report_file(name: str) -> str:
    """Return the text of page.css or page.js, which lie in this folder."""
    return files("longspan.report").joinpath(name).read_text(encoding="utf-8")


PATTERNS = (
    '<svg class="defs" width="0" height="0" aria-hidden="true">'
    '<pattern id="many" width="3" height="3" patternUnits="userSpaceOnUse">'
    '<rect class="many-base" x="0" y="0" width="3" height="3"/><path class="many-line" d="M0 0.5H3"/></pattern>'
    '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="panel" x="0" y="0" width="6" height="6"/><path class="hatch" d="M0 0V6"/></pattern></svg>'
)


# page.css has this many colours.
COLORS = 6
# A curve has at most this many points.
MAX_POINTS = 900


def finite_values(values: np.ndarray) -> np.ndarray:
    """Return the values that are neither NaN nor infinite; a step without a value has NaN."""
    return values[np.isfinite(values)]


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the `window` values around each one, fewer at the ends, without those that are not finite."""
    is_finite = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(is_finite, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(is_finite)))
    index = np.arange(len(values))
    start = np.maximum(index - window // 2, 0)
    stop = np.minimum(index + (window + 1) // 2, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[stop] - total[start]) / (count[stop] - count[start])


def thin_curve(x: np.ndarray, y: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `limit` points of a curve: first, last, and the least and greatest value of each stretch between,
    so that spikes survive. Values that are not finite are dropped.
    """
    is_finite = np.isfinite(y)
    finite_x, finite_y = x[is_finite], y[is_finite]
    if len(finite_x) <= limit:
        return finite_x, finite_y
    edges = np.linspace(1, len(finite_x) - 1, max(2, limit // 2)).astype(int)
    keep = {0, len(finite_x) - 1}
    for start, stop in itertools.pairwise(edges):
        if stop > start:
            stretch = finite_y[start:stop]
            keep |= {start + int(np.argmin(stretch)), start + int(np.argmax(stretch))}
    index = np.array(sorted(keep))
    return finite_x[index], finite_y[index]


def curve(name: str, x: Iterable[float], y: Iterable[float], color: int = 0, kind: str = "line") -> Part:
    """Return a curve; its kind is "line", "faint" for raw data behind averages, or "marks" for few points."""
    points = thin_curve(np.array([*x], float), np.array([*y], float), MAX_POINTS)
    x_values, y_values = (
        [int(value) if value == int(value) else float(f"{value:.7g}") for value in values.tolist()]
        for values in points
    )
    return {"name": name, "x": x_values, "y": y_values, "color": color % COLORS, "kind": kind}


def chart(title: str, unit: str, *curves: Part, format: str = "number", **options: Any) -> Part:
    """Return a chart of curves whose values are written as a "number", "loss", "percent" or "bytes". Options: `zero`
    puts 0 on the y axis, `log` makes it logarithmic, `tall` gives the chart a row of its own; `references` are
    horizontal lines [y, words], `events` vertical ones [x, words]; `x_label` is "step" if not given, and `x_names` name
    the places 0, 1, 2 and so on of the x axis.
    """
    return {"title": title, "unit": unit, "series": [*curves], "format": format} | options
