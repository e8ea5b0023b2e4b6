"""HTML and SVG elements as strings, escaped in one place."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files


def tag(element: str, *content: str, **attributes: object) -> str:
    """Return one element. `content` is markup (callers put plain text through `text`); attribute values are escaped.

    >>> tag("rect", class_="bar", x=1.25, data_d=3, hidden=None)
    '<rect class="bar" x="1.2" data-d="3"></rect>'

    Underscores in names become hyphens, a trailing one is dropped; floats are written with one decimal; None leaves an
    attribute out and True writes it without a value.
    """
    return f"<{element}{''.join(_attribute_text(*item) for item in attributes.items())}>{''.join(content)}</{element}>"


def _attribute_text(name: str, value: object) -> str:
    name = name.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{value:.1f}"' if isinstance(value, float) else f' {name}="{escape(str(value), quote=True)}"'


def text(value: object) -> str:
    """Return plain text as markup, with <, > and & escaped."""
    return escape(str(value))


def style_sheet() -> str:
    """Return the style of pages, for a drawing outside a page."""
    return room_text("page.css")


def section(title: str, *content: str) -> str:
    """Return a part of a page under its title; `content` is markup."""
    return tag("section", tag("h2", text(title)), *content)


def scrolling_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of plain text under the `names` of its columns, which scrolls sideways on a narrow page."""
    head = tag("thead", tag("tr", *(tag("th", text(name)) for name in names)))
    body = (tag("tr", *(tag("td", text(cell)) for cell in row)) for row in rows)
    return tag("div", tag("table", head, tag("tbody", *body)), class_="scroll")


def key(*shapes: str) -> str:
    """Return the small drawing of a legend's entry, 22 by 12."""
    return tag("svg", *shapes, class_="key", viewBox="0 0 22 12", aria_hidden="true")


def label(words: str, x: float, y: float, anchor: str, css_class: str = "label") -> str:
    """Return words in a drawing at (x, y), which is where they start, end or have their middle, as `anchor` says."""
    return tag("text", text(words), class_=css_class, x=float(x), y=float(y), text_anchor=anchor)


_MANY = (tag("rect", class_="many-base", x=0, y=0, width=3, height=3), tag("path", class_="many-line", d="M0 0.5H3"))
_IDLE = tag("path", class_="hatch", d="M0 0V6")
_ACROSS = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
PATTERNS = tag(
    "svg",
    tag("pattern", *_MANY, id="many", width=3, height=3, patternUnits="userSpaceOnUse"),
    tag("pattern", _IDLE, id="idle", width=6, height=6, **_ACROSS),
    class_="defs",
    width=0,
    height=0,
    aria_hidden="true",
)


# The policy makes the browser refuse any request: what the page shows, its images too, is in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'"
_META = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
_TIP = tag("div", id="tip", role="status", aria_live="polite", hidden=True)


def page(title: str, body: Sequence[str], *, style: str = "", script: str = "", nonce: str = "") -> str:
    """Return the page of the parts `body`, with the style and the script of all pages and those given here.

    With a `nonce`, which the script then carries, the page has no policy: the server that sends it sends one. Without,
    the page is a file and carries POLICY.
    """
    policy = "" if nonce else f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    head = _META + policy + tag("title", text(title)) + tag("style", f"\n{style_sheet()}{style}")
    program = f"\n{room_text('page.js')}{script}"
    body = [
        PATTERNS,
        tag("main", *(f"\n{element}" for element in body)),
        _TIP,
        tag("script", program, nonce=nonce or None),
    ]
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}</body></html>\n'


def room_text(name: str) -> str:
    """Return the text of a style sheet or a script of this room."""
    return files("longspan.report").joinpath(name).read_text(encoding="utf-8")
