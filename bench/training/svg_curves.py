"""What the figures of `convergence.py` and `precision.py` are drawn with: panels 470 wide, curves from x 60 to 454."""

from collections.abc import Sequence

# Colours of light and of dark pages.
INK = "var(--ink)"
SOFT = "var(--soft)"
GRID = "var(--grid)"
RED = "var(--red)"
BLUE = "var(--blue)"
STYLE = """<style>svg{--ink:#222;--soft:#666;--grid:#e3e3e3;--red:#c1121f;--blue:#1f6feb;--paper:#fff}
@media (prefers-color-scheme: dark){svg{--ink:#e8eaed;--soft:#a5aeb8;--grid:#3a414b;--red:#ff7a72;--blue:#6aaeff;
--paper:#1b1f25}}</style>"""


def document(size: str, title: str, parts: Sequence[str]) -> str:
    """A drawing of "width height", in the colours of a light or a dark page."""
    width, height = size.split()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="system-ui, sans-serif" '
        f'font-size="12" role="img"><title>{title}</title>{STYLE}'
        f'<rect width="{width}" height="{height}" fill="var(--paper)"/>' + "".join(parts) + "</svg>\n"
    )


def across(count: int) -> list[float]:
    return [60 + 394 * i / max(1, count - 1) for i in range(count)]


def curve(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'


def line(y: float, colour: str) -> str:
    return f'<path d="M60 {y:.1f}H454" stroke="{colour}"/>'


def text(words: str, x: float, y: float, anchor: str, fill: str = INK, weight: str = "400") -> str:
    return f'<text x="{x}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{words}</text>'
