"""Samples with images in the report of a run: right and wrong answers, images inline, nothing of what is damaged."""

import json
from pathlib import Path
from typing import Any

from longspan.report import write_report
from tests.report.runs import train_row, write_run


def row(answer: str, predicted: str, name: str = "held-out", **more: Any) -> dict[str, Any]:
    made = {"step": 4, "name": name, "text": "<image> & who?", "answer": answer, "predicted": predicted}
    return made | {"images": ["aGVsbG8="]} | more


def report_of(folder: Path, lines: list[str]) -> str:
    run = write_run(folder / "run", rows=[train_row(1)])
    (run / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return write_report(run).read_text()


def test_samples_stand_with_their_images(tmp_path: Path) -> None:
    rows = [row("3", "3"), row("4", "1"), row("5", "5", "shuffled")]
    html = report_of(tmp_path, [json.dumps(one) for one in rows])
    assert html.count('src="data:image/png;base64,aGVsbG8="') == 3
    assert "held-out: 1 of 2 answers are right" in html and "shuffled: 1 of 1 answers are right" in html
    assert "&lt;image&gt; &amp; who?" in html and '<td class="bad">1</td>' in html


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    html = report_of(tmp_path, [json.dumps(row("3", "3", images=['"><script>'])), json.dumps({"step": 1})])
    assert "<script>" not in html.split("<h2>Samples</h2>")[1].split("</section>")[0]
    assert "samples.jsonl could not be read" in report_of(tmp_path / "torn", ['{"step": 4'])


def test_a_run_without_them_has_no_section(tmp_path: Path) -> None:
    assert "<h2>Samples</h2>" not in write_report(write_run(tmp_path / "run", rows=[train_row(1)])).read_text()
