"""What the figures of `convergence.py` and `precision.py` are drawn with: panels 470 wide, curves from x 60 to 454."""

from collections.abc import Sequence


def document(size: str, title: str, parts: Sequence[str]) -> str:
    """A drawing of "width height" on white."""
    width, height = size.split()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="system-ui, sans-serif" '
        f'font-size="12" role="img"><title>{title}</title><rect width="{width}" height="{height}" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def across(count: int) -> list[float]:
    """The places of so many steps."""
    return [60 + 394 * i / max(1, count - 1) for i in range(count)]


def curve(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'


def line(y: float, colour: str) -> str:
    """A line across a panel."""
    return f'<path d="M60 {y:.1f}H454" stroke="{colour}"/>'


def text(words: str, x: float, y: float, anchor: str, fill: str = "#222", weight: str = "400") -> str:
    """Words at a point."""
    return f'<text x="{x}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{words}</text>'
