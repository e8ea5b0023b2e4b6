"""Tables for a terminal or a log: columns lined up, nothing else."""

from collections.abc import Sequence


def text_table(names: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Rows under their names; the first `left` columns start at the left, the others end at the right.

    >>> print(text_table(("cp", "seconds"), (("1", "0.5"), ("16", "12.0"))))
    cp  seconds
    1       0.5
    16     12.0
    """
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    return "\n".join(
        "  ".join(_pad(cell, widths[i], i < left) for i, cell in enumerate(row)).rstrip() for row in (names, *rows)
    )


def _pad(cell: str, width: int, left: bool) -> str:
    return cell.ljust(width) if left else cell.rjust(width)


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
