"""Pages that open anywhere: one file, no network, light and dark, readable without a script and on paper."""

from collections.abc import Sequence
from importlib.resources import files

from longspan.report.markup import style_sheet, tag, text
from longspan.report.plan_pictures.gantt import PATTERNS

# The policy makes the browser refuse any request: what the page shows is in the page.
_META = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)
_TIP = tag("div", id="tip", role="status", aria_live="polite", hidden=True)


def page(title: str, body: Sequence[str]) -> str:
    """The page of these parts, with its style and script."""
    script = files("longspan.report").joinpath("page.js").read_text(encoding="utf-8")
    head = tag("title", text(title)) + tag("style", f"\n{style_sheet()}")
    body = [PATTERNS, tag("main", *(f"\n{part}" for part in body)), _TIP, tag("script", f"\n{script}")]
    return f'<!doctype html>\n<html lang="en"><head>{_META}{head}</head>\n<body>{"".join(body)}</body></html>\n'
