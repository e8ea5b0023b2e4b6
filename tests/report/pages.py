"""What a page holds, and what a browser would draw of it."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from longspan.report import write_report

PROGRAM = Path(__file__).with_name("draw_page.mjs")


def value_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">([^<]*)</script>', page)
    return json.loads(text)


def report_of(run: Path) -> dict[str, Any]:
    return value_of(write_report(run).read_text(encoding="utf-8"))


def words_of(value: Any) -> str:
    """Every text of a value, one a line, without the pictures of plans."""
    if isinstance(value, dict):
        return "\n".join(words_of(inner) for key, inner in value.items() if key != "pictures")
    return "\n".join(map(words_of, value)) if isinstance(value, list) else str(value)


def parts_of(value: dict[str, Any], kind: str) -> list[Any]:
    return [part[kind] for section in value["sections"] for part in section["parts"] if kind in part]


def charts_of(value: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {chart["title"]: chart for charts in parts_of(value, "charts") for chart in charts}


def draw(page: Path, width: int) -> dict[str, Any]:
    """What the script of a page made, without a browser; skips the test where there is no node."""
    if (node := shutil.which("node")) is None:
        pytest.skip("no node to run the script of a page")
    return json.loads(subprocess.check_output([node, PROGRAM, page, str(width)], text=True))
