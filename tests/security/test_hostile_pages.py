"""Pages and pictures show what a run's folder says as text: no tag, attribute or script of its own comes into them."""

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from longspan.cli.main import main
from longspan.cli.report import main as report
from longspan.errors import ConfigError, LongspanError
from longspan.plan import Plan
from longspan.plan.plan_rows import plan_row
from longspan.report import plan_document, plan_page, write_report
from longspan.report.evaluation_page import eval_page
from longspan.report.follow import LiveRun, live_page
from longspan.report.page import page as draw_page
from longspan.report.run_folder import RunFolder
from tests.report.pages import draw, parts_of, words_of
from tests.report.runs import DIFFERENCE, FACTS, RECORD, ROW, mixed_plan, train_row, write_run

TAIL = (
    "\"'><x-hostile onclick=alert(1)>\u2028</script></style></title></textarea>--><svg/onload=alert(2)>`${3}&quot;a.b"
)


class Elements(HTMLParser):
    """The tags of a page, and of the pictures in its JSON, with the names of their attributes; and its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found = set[tuple[str, str]]()
        self.scripts = list[str]()
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found |= {(name, "")} | {(name, attribute) for attribute, _ in attributes}
        self._inside = "json" if ("type", "application/json") in attributes else name

    def handle_endtag(self, name: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.scripts.append(data)
        if self._inside == "json":
            for part in parts_of(json.loads(data), "plans"):
                for picture in (svg for plan in part["plans"] for svg in plan["pictures"]):
                    self.found |= Elements(picture).found


def hostile(value: Any, whole: bool) -> Any:
    """A value of a record with hostile text behind each string in it, or in its place; keys of it too."""
    if isinstance(value, str):
        return TAIL if whole else value + TAIL
    if isinstance(value, dict):
        return {key: hostile(inner, whole) for key, inner in value.items()}
    return [hostile(inner, whole) for inner in value] if isinstance(value, list) else value


def with_keys(row: dict[str, Any]) -> dict[str, Any]:
    return row | {f"{name}{TAIL}": 1.5 for name in ("eval_", "mtp_loss_", "")}


def run_in(folder: Path, change: Callable[[Any], Any]) -> Path:
    """A run's folder with everything that the page shows, changed."""
    path = write_run(folder)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    names = [(name, step) for name in ("a", "b") for step in (1, 60)]
    rows += [rows[-1] | {"eval_name": name, "planner": "my.planner", "step": step} for name, step in names]
    buckets = [[0, 127, 3.5, 100, 2], [128, 255, 3.0, 158, 1]]
    rows += [rows[-1] | {"by_position": buckets, "by_length": buckets, "eval_own": 2.0} for n in (1, 60)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    memory = {
        "checkpoint_policies": ["full", "own"],
        "device": {"total": 9e9, "weights": 5e9, "kept": 1e9, "own": 3},
        "host": {},
    }
    (path / "run.json").write_text(json.dumps(change(FACTS | {"memory": memory, "mtp": "m", "rows": "r"})))
    summary = json.loads((path / "summary.json").read_text()) | {"stopped": "s", "step": 1, "steps": 2}
    (path / "summary.json").write_text(json.dumps(change(summary)))
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(config.replace('"a<b>&c"', json.dumps(change("a<b>&c"), ensure_ascii=False)))
    (path / "plans" / f"evaluation{change('') and TAIL.replace('/', '!')}.json").write_text("damaged")
    for file in [*(path / "plans").glob("*.json")]:
        if file.read_text() == "damaged":
            continue
        plan = json.loads(file.read_text())
        plan["cost"]["source"], plan["planner"] = change("a machine"), change("fixed")
        file.write_text(json.dumps(plan))
    (path / "plans" / "step-000060.json").rename(path / "plans" / f"x{change('') and TAIL.replace('/', '!')}-60.json")
    return path


def pages(folder: Path, change: Callable[[Any], Any], tail: str) -> Iterator[str]:
    run = run_in(folder / f"run{tail.replace('/', '!')}", change)
    yield write_report(run).read_text(encoding="utf-8")
    (run / "run.lock").write_text(tail)
    (run / "plans.jsonl").write_text(plan_row(60, Plan.from_json((run / "plans/step-000001.json").read_bytes())) + "\n")
    yield draw_page(*live_page(LiveRun.read(run)), live=True)
    other = change({**RECORD, "target": "base", "kind": "folder"}) | {"differences": [change(DIFFERENCE)]}
    sets = [change(ROW | {"eval_name": "set", "cp_comm_type": ["p2p"], "eval_own": 1.0, f"eval_x{tail}": 2.0})] * 2
    yield eval_page(
        {**change(RECORD), "kind": change("run"), "evaluations": sets, "compare": other | {"evaluations": sets}}
    )
    plan = Plan.from_json(json.dumps(json.loads(mixed_plan(8).to_json()) | {"planner": change("dynamic")}))
    yield plan_page(plan, title=f"plan{tail}")
    yield plan_document(plan, title=f"plan{tail}")


def test_pages_hold_no_element_of_a_record(tmp_path: Path) -> None:
    plain = [Elements(page) for page in pages(tmp_path / "plain", lambda value: value, "")]
    for number, whole in enumerate((False, True)):

        def change(value: Any, whole: bool = whole) -> Any:
            changed = hostile(value, whole)
            return with_keys(changed) if isinstance(value, dict) and {"loss", "eval_loss"} & value.keys() else changed

        made = [*pages(tmp_path / str(number), change, TAIL)]
        assert sum(page.count("x-hostile") for page in made) > 40
        for page, expected in zip(made, plain, strict=True):
            elements = Elements(page)
            assert not elements.found - expected.found
            assert not any(name.startswith("on") for _, name in elements.found)
            assert elements.scripts == expected.scripts


def test_hostile_texts_are_drawn_as_text(tmp_path: Path) -> None:
    page = write_report(run_in(tmp_path / "run", lambda value: hostile(value, False)))
    drawn = draw(page, 1200)
    names = {element["name"] for element in drawn["elements"]}
    assert "script" not in names and "x-hostile" not in names and TAIL in words_of(drawn)


BAD_ROWS = [
    '{"step": 1' + "0" * 300 + ', "loss": 1.0}',
    '{"step": 2, "loss": 1' + "0" * 4000 + "}",
    '{"step": 3, "loss": 1' + "0" * 9000 + "}",
    '{"step": 4, "loss": NaN, "seconds": Infinity, "tokens": -Infinity}',
    '{"step": 5, "loss": ' + "[" * 100_000 + "}",
    '{"step": 6, "loss": 2.0, "deep": ' + "[" * 900 + "]" * 900 + "}",
    '{"step": -7, "loss": 1e308, "seconds": -1e308, "grad_norm": 1e-308}',
    '{"step": 8, "loss": "x", "seconds": {}, "tokens": [], "mtp_loss_1": "y"}',
    '{"step": 9, "loss": 1e308, "seconds": 5e-324, "grad_norm": 1e308, "memory_bytes": 1e300}',
    '{"step": 9007199254740991, "loss": -1e29, "memory_bytes": 1e29, "tokens_per_second": 1e29, "seconds": -1e29}',
    '{"step": 10, "eval_loss": 1.0, "eval_tokens": 1e300, "cp": 1e29, "eval_documents": 1, "planner": 7, '
    '"by_position": [[1e300, 0, 1, 1, 1], [0, 0, null, 0, 0]], "by_length": {"a": 1}, "eval_activation_bytes": "x"}',
    '{"step": 11, "eval_loss": -1e29, "eval_tokens": 1, "cp": 1, "eval_documents": 1, "planner": [], "by_position": 1, '
    '"by_length": [[1, 2, 1e29, 3, 4], [5, 6, -1e29, 7, 8]]}',
    "\x00\xff", "[]", "7", '"text"',
]  # fmt: skip


def test_hostile_metrics_make_a_report_or_a_named_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [json.dumps(train_row(step)) for step in range(1, 30)]
    for number, row in enumerate([*BAD_ROWS, "\n".join(BAD_ROWS)]):
        run = write_run(tmp_path / str(number))
        (run / "metrics.jsonl").write_bytes("\n".join([*good, row, ""]).encode("latin-1"))
        assert main(["report", str(run)]) == 0, row[:80]
    (run / "metrics.jsonl").write_text("\n".join([good[0], '{"step": 2, "loss": "' + "x" * (65 << 20) + '"}', good[2]]))
    assert RunFolder.read(run).step.tolist() == [1, 3]
    capsys.readouterr()


@pytest.mark.parametrize("file", ["run.json", "summary.json", "config.toml", "plans/step-000001.json"])
def test_damaged_files_of_a_run_are_left_out_or_named(tmp_path: Path, file: str) -> None:
    run = run_in(tmp_path / "run", lambda value: value)
    text = (run / file).read_text()
    number, begins = r"(?<=[:=\[,] )[0-9][0-9.]*", r"(?<=[:=\[,] )"
    texts = [re.sub(number, value, text) for value in ("9" * 5000, "9" * 400, "-1e308", "[]")]
    texts += [re.sub(begins + r'"[^"]*"', "{}", text), re.sub(begins + r"[\[{].*", "null}", text)]
    for damaged in [*texts, text[: len(text) // 2], "[" * 100_000, "a = " + "[" * 5000, "{}", "[]"]:
        (run / file).write_text(damaged)
        try:
            write_report(run)
        except ConfigError as error:
            assert "make no report" in str(error)


def test_a_hostile_plan_is_a_named_error(tmp_path: Path) -> None:
    text = mixed_plan(4).to_json()
    for change in ("[" * 100_000, text[:99], text.replace("4", "9" * 5000), text.replace("4", "9" * 200), "null"):
        (tmp_path / "plan.json").write_text(change)
        with pytest.raises(LongspanError):
            report([str(tmp_path / "plan.json")])
