"""How values are written for people: numbers, bytes, durations, and lists, of which the first few stand for many."""

import difflib
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence

LogLine = Callable[[str], None]  # takes a line of output


def escape_controls(text: str) -> str:
    """Return a text in which what would steer a terminal is written as an escape: it may quote a name, or a file, of
    somebody else.

    >>> escape_controls("a" + chr(27) + "[2J.jsonl")
    'a\\\\x1b[2J.jsonl'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def text_table(names: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return rows under the names of columns; the first `left` columns start at the left, the others end at the right.

    >>> print(text_table(("cp", "seconds"), (("1", "0.5"), ("16", "12.0"))))
    cp  seconds
    1       0.5
    16     12.0
    """
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    lines = list[str]()
    for row in (names, *rows):
        cells = (c.ljust(widths[i]) if i < left else c.rjust(widths[i]) for i, c in enumerate(row))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under the names of columns as a Markdown table; a `|` in a cell gets a backslash (character 92)."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def number_text(value: float, digits: int = 3) -> str:
    """Return a number for people: 1234567 → '1.23M', 0.25 → '0.25', 1e-7 → '1e-07', 1024 → '1,024'.

    `digits` are significant ones. From 10,000 on a unit follows. Below, integers are written out, and other numbers
    from 100 on are rounded to integers unless more than 3 digits are asked for. Below 0.001 and from 10^15 on numbers
    have an exponent.
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e15):
        return f"{value:.{digits}g}"
    for unit, scale, least in (("T", 1e12, 1e12), ("G", 1e9, 1e9), ("M", 1e6, 1e6), ("K", 1e3, 1e4)):
        if size >= least:
            return f"{value / scale:.{digits}g}{unit}"
    if value == int(value) or (size >= 100 and digits <= 3):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def bytes_text(value: float) -> str:
    """Return bytes in binary units: 3 * 2**30 → '3 GiB'."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.0f} B"


def gib_text(value: float) -> str:
    """Return bytes in GiB, whatever their size, so that they compare: 3 * 2**30 → '3.0 GiB'."""
    return f"{value / 2**30:,.1f} GiB"


def seconds_text(value: float) -> str:
    """Return a duration: '1 h 02 min', '3 min 05 s' (from 2 minutes on), '12.3 s', '45 ms', '80 µs'."""
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60):02d} min"
    if value >= 120:
        return f"{int(value // 60)} min {int(value % 60):02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.2g} s"  # 0, or less than a microsecond


def excerpt(values: Sequence[object]) -> str:
    """Return values in round brackets, of many the first eight.

    >>> excerpt([2, 0, 1]), excerpt(range(12))
    ('(2, 0, 1)', '(0, 1, 2, 3, 4, 5, 6, 7, … 12 in all)')
    """
    head = ", ".join(map(repr, values[:8]))
    return f"({head}, … {len(values)} in all)" if len(values) > 8 else f"({head})"


def items_text(items: Sequence[object], count: int = 0) -> str:
    """Return items as in a sentence; of more than six the first six, and how many there are: `count`, 0: `len(items)`.

    >>> items_text(["q_proj", "k_proj"]), items_text(range(9))
    ('q_proj, k_proj', '0, 1, 2, 3, 4, 5, … (9 in all)')
    """
    head = ", ".join(map(str, items[:6]))
    return f"{head}, … ({count or len(items)} in all)" if len(items) > 6 else head


def ranges_text(numbers: Sequence[int]) -> str:
    """Return integers as ranges, of many the first six.

    >>> ranges_text((0, 1, 2, 5))
    '0–2, 5'
    """
    ranges = list[list[int]]()
    for n in sorted(numbers):
        if ranges and ranges[-1][1] == n - 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    return items_text([str(first) if first == last else f"{first}–{last}" for first, last in ranges], len(numbers))


def short_text(value: object) -> str:
    """Return a value as a message shows it, on one line: a long list ends after six elements, a long text has a gap.

    >>> short_text([7] * 100)
    '[7, 7, 7, 7, 7, 7, ...]'
    """
    return " ".join(_SHORT.repr(value).split())


# One of two words may be meant by the other from this share on: 2 x letters in common / all letters.
_NEAR = 0.6
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 80


def nearest_name(name: str, names: Iterable[str], *, prefix: str = "") -> str | None:
    """Return the nearest of the known `names`, None where none is near. A `prefix` of all names is not compared; such
    names are flags, of which section and key must both be near.

    >>> nearest_name("--trian.stpes", ["--train.steps"], prefix="--"), nearest_name("dist", ["data"])
    ('--train.steps', None)
    """

    def words(text: str) -> Sequence[str]:
        section, _, key = text.removeprefix(prefix).rpartition(".")
        return (key, section) if prefix and section else (key,) if prefix else (text,)

    def likeness(known: str) -> tuple[float, float]:
        pairs = zip(words(name), words(known), strict=False)
        ratios = [difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs]
        return min(ratios), sum(ratios)

    nearest = max(names, key=likeness, default=None)
    return nearest if nearest is not None and likeness(nearest)[0] >= _NEAR else None


def nearest_hint(name: str, names: Iterable[str], *, prefix: str = "") -> str:
    """Suggest the nearest of the known `names`, or say all where none is near; `prefix` as of `nearest_name`."""
    names = tuple(names)
    nearest = nearest_name(name, names, prefix=prefix)
    return f"known: {', '.join(names)}" if nearest is None else f"did you mean {nearest!r}?"
