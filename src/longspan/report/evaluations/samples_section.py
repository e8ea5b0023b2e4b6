"""Samples of documents with images in the report of a run: what was shown, what was to be said, and what was said."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longspan.errors import counted
from longspan.report.markup import section, tag, text
from longspan.run.metrics_log import rows_and_damage

_KEYS = ("name", "text", "answer", "predicted", "images")


def samples_of(file: Path, notes: list[str]) -> tuple[dict[str, Any], ...]:
    """The rows of samples.jsonl; none where there is no such file. What cannot be read is noted."""
    rows, damaged = rows_and_damage(file) if file.is_file() else ([], 0)
    if damaged:
        notes.append(f"{counted(damaged, 'line')} of {file.name} could not be read and left out")
    return tuple(row for row in rows if all(key in row for key in _KEYS))


def samples_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The section of the page: for each set a table of its samples, with their images."""
    names = dict.fromkeys(str(row["name"]) for row in rows)
    tables = (_table(name, [row for row in rows if row["name"] == name]) for name in names)
    said = "Each token of an answer is predicted with the true ones before it."
    return section("Samples", tag("p", text(said), class_="note"), *tables)


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    right = sum(row["answer"] == row["predicted"] for row in rows)
    caption = tag("p", text(f"{name or 'held-out documents'}: {right} of {len(rows)} answers are right"), class_="note")
    head = tag("tr", *(tag("th", text(word)) for word in ("images", "text", "answer", "predicted")))
    return caption + tag("div", tag("table", head, *map(_row, rows), class_="samples"), class_="scroll")


def _row(row: Mapping[str, Any]) -> str:
    right = row["answer"] == row["predicted"]
    cells = [tag("td", *_images(row["images"])), tag("td", text(row["text"])), tag("td", text(row["answer"]))]
    return tag("tr", *cells, tag("td", text(row["predicted"]), class_="good" if right else "bad"))


def _images(pictures: Sequence[str]) -> Iterator[str]:
    for i, picture in enumerate(pictures, 1):
        source = f"data:image/png;base64,{picture}"
        yield f'<img src="{source}" alt="image {i}" class="sample">' if _is_base64(picture) else ""


def _is_base64(picture: object) -> bool:
    return isinstance(picture, str) and picture.replace("+", "").replace("/", "").rstrip("=").isalnum()
