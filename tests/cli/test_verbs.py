"""Verbs that start no ranks: examples, report, train --show and the list of benches."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.begun import open_record

from longspan.bench.benches import BENCHES, write_record
from longspan.cli import examples, show
from longspan.cli.examples import examples_folder
from longspan.cli.main import main
from longspan.cli.processes import print_note
from longspan.corpus.rows.sample import Row, Sample
from longspan.errors import ConfigError
from longspan.run.progress import ProgressDisplay
from tests.corpus.rows.families import encoding_of, write_folder
from tests.corpus.test_formats import rows_as
from tests.report.pages import parts_of, value_of
from tests.report.runs import mixed_plan, write_run

ROOT = Path(__file__).parents[2]


def test_every_example_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    names = capsys.readouterr().out.splitlines()
    shipped = {path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.*")}
    assert {*names} >= {name for name in shipped if name.endswith((".toml", ".py", ".sh"))}
    assert names[0] == "distill.py" and not any("__pycache__" in name for name in names)
    assert main(["examples", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"examples": names}


def test_copied_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "first.toml"]) == 0
    assert capsys.readouterr().out == "examples/first.toml\n"
    assert (tmp_path / "examples/first.toml").read_bytes() == (ROOT / "examples/first.toml").read_bytes()
    assert main(["examples", "examples/vlm/", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": ["mine/vlm/data.py", "mine/vlm/vlm_accuracy.py"]}
    (tmp_path / "examples/first.toml").write_text("changed")
    assert main(["examples", "all"]) == 2
    error = "examples/first.toml is there; name another folder, or replace files with --overwrite"
    assert error in capsys.readouterr().err and not (tmp_path / "examples/dpo.py").exists()
    assert main(["examples", "all", "--overwrite"]) == 0
    copied = {path.relative_to(tmp_path / "examples") for path in (tmp_path / "examples").rglob("*") if path.is_file()}
    shipped = {path.relative_to(ROOT / "examples") for path in (ROOT / "examples").rglob("*") if path.is_file()}
    assert copied == {path for path in shipped if "__pycache__" not in path.parts}
    assert (tmp_path / "examples/first.toml").read_text() != "changed"


NO_EXAMPLES = {
    "frist.toml": "longspan has no example 'frist.toml': did you mean 'first.toml'?",
    "../Makefile": "longspan has no example '../Makefile': ",
    ".": "longspan has no example '.': ",
    "nope": "longspan has no example 'nope': the nearest are ",
    "first.toml file": "cannot copy examples to file: ",
    "first.toml a b": "longspan examples does not know what 'b' is for: it takes [NAME] and [FOLDER], and flags",
}


def test_refused_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for words, message in NO_EXAMPLES.items():
        assert main(["examples", *words.split()]) == 2
        assert f"error: {message}" in capsys.readouterr().err


def test_an_installed_wheel_has_them_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examples_folder() == ROOT / "examples"
    package = tmp_path / "longspan"
    (package / "_examples").mkdir(parents=True)
    monkeypatch.setattr(examples.longspan, "__file__", str(package / "__init__.py"))
    with pytest.raises(ConfigError, match="there are no examples with the longspan in"):
        examples_folder()
    (package / "_examples" / "first.toml").touch()
    assert examples_folder() == package / "_examples"


def test_the_verb_writes_the_page_of_a_run_and_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan, other = write_run(tmp_path / "first"), tmp_path / "plan.json", tmp_path / "other.html"
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path / "report.html")
    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(path / "report.html")}
    plan.write_text(mixed_plan(4).to_json())
    assert main(["report", str(plan)]) == 0
    (plans,) = parts_of(value_of(plan.with_suffix(".html").read_text()), "plans")
    assert len(plans["plans"][0]["pictures"]) == 2
    assert main(["report", str(plan), "--out", str(other)]) == 0
    assert other.is_file() and capsys.readouterr().out.endswith("other.html\n")


def test_refused_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nowhere = "nowhere is not the folder of a run: no such folder"
    errors = {"nowhere": nowhere, ".": "is not the folder of a run", ". --out x.html": "--out is for plans"}
    bad_plans = {"bad.json": "{", "list.json": "[]", "nan.json": "NaN", "deep.json": "[" * 9999, "empty.json": ""}
    for name, text in bad_plans.items():
        Path(name).write_text(text)
    errors |= {name: f"cannot make a report of {name}: a plan must be JSON as" for name in bad_plans}
    for words, message in errors.items():
        assert main(["report", *words.split()]) == 2
        assert message in capsys.readouterr().err


ROWS = [
    {"messages": [{"role": "user", "content": f"Why {i}?"}, {"role": "assistant", "content": "ß 天.\nSo."}]}
    for i in range(4)
]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model", "phi3")
    rows_as("jsonl", tmp_path / "rows", ROWS)
    return ["train", "--data.path", "rows", "--data.tokenizer", "model"]


def test_first_rows_with_their_targets(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main([*words, "--show", "2"]) == 0
    assert sorted(tmp_path.rglob("*")) == before
    kinds, legend, _, *lines = capsys.readouterr().out.splitlines()
    assert kinds.startswith("rows hold messages (chat): ") and legend.endswith("targets ⟦so⟧")
    (sample,) = encoding_of(tmp_path / "model").encode([Row("", ROWS[0])])
    assert isinstance(sample, Sample) and sample.labels is not None
    counts = f"{len(sample.ids)} tokens, {(sample.labels >= 0).sum()} targets"
    assert [line for line in lines if "tokens" in line] == [f"rows.jsonl, line {i}: {counts}" for i in (1, 2)]
    assert "\n".join(lines[1:6]).replace("·", "").replace("⏎", "") == (
        "<|user|>\nWhy 0?<|end|>\n<|assistant|>\n⟦ß 天.\nSo.<|end|>⟧"
    )
    assert "⟦ß· ·天·" in lines[4]  # bytes of one character stand together


def test_keys_of_rows_that_are_read_are_shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Those of LLaMA-Factory's pairs in a .json, which become the documents of the same pair in messages."""
    answers = {"chosen": "So.", "rejected": "No."}
    other = {"instruction": "Why", "input": "0?", "history": [], "system": "Be brief.", **answers, "id": 7}
    messages = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why\n0?"}],
        **answers,
    }
    outputs = list[str]()
    for name, row in (("pairs", other), ("messages", messages)):
        Path(f"{name}.json").write_text(json.dumps([row, row]))
        data = ["--data.path", f"{name}.json", "--data.tokenizer", "model", "--train.loss", "orpo"]
        assert main(["train", *data, "--show", "1"]) == 0
        outputs.append(capsys.readouterr().out.replace(f"{name}.json", "rows"))
    (shown, keys), (same, keys_of_messages) = (output.split("\nkeys that are read: ") for output in outputs)
    assert shown == same and "\nrows, row 1: " in shown
    assert keys == "instruction, input, system, chosen, rejected\nkeys that nothing reads: id (100 % of rows)\n"
    assert keys_of_messages == "messages, chosen, rejected\n"


def test_a_terminal_has_colours_and_long_rows_are_cut(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "_SHOWN_TOKENS", 6)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([*words, "--show", "1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[30;42m" in out and "\x1b[0m" in out and "⟦" not in out
    assert "… 18 tokens …" in out and "assistant" not in out.splitlines()[-1]


def test_a_text_is_all_targets_but_its_first_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rows_as("jsonl", tmp_path / "rows", [{"text": "a\x1b[1m b"}])
    assert main(["train", "--data.path", str(path), "--show", "1", "--run.dir", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith("a·⟦") and shown.endswith("<|endoftext|>⟧") and "\\x1b" in shown
    assert not (tmp_path / "run").exists()


FAMILY = """\
prefix, {0} tokens
├─ shown as 1, {1} tokens
├─ prefix, 300 tokens
│  ├─ shown as 2, {1} tokens
│  └─ prefix, 300 tokens
│     ├─ shown as 3, {1} tokens
│     └─ shown as 4, {1} tokens
└─ prefix, 300 tokens
   ├─ shown as 5, {1} tokens
   └─ shown as 6, {1} tokens
"""


@pytest.mark.parametrize("depths", [0, 2])
def test_generations_of_a_family_are_drawn(depths: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = [[1], [4, 2], [4, 3, 3], [4, 3, 4], [2, 2], [2, 3]]
    rows = [[*[9] * 300, *(token for part in way[:-1] for token in [part] * 300), way[-1], 5, 6] for way in ways]
    labels = [[-100] * (len(ids) - 2) + [5, 6] for ids in rows]
    values = [{"input_ids": ids, "labels": learnt} for ids, learnt in zip(rows, labels, strict=True)]
    path = rows_as("jsonl", tmp_path / "rows", values)
    words = ["train", "--data.path", str(path), "--mtp.num_layers", str(depths), "--run.dir", str(tmp_path / "run")]
    assert main([*words, "--show", "6"]) == 0
    *_, tree = capsys.readouterr().out.partition("(data.share_prefixes):\n")
    assert tree == FAMILY.format(300 - depths, 3 + depths)  # depths read tokens behind a prefix


def test_bad_rows_are_errors_or_left_out(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "rows" / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [], "id": 1}) + "\n")
    assert main([*words, "--show", "9"]) == 2
    assert 'rows.jsonl, line 5: "messages" is empty' in capsys.readouterr().err
    assert main([*words, "--show", "9", "--data.on_bad_row", "skip"]) == 0
    assert 'line 5: left out, "messages" is empty' in capsys.readouterr().out
    assert main([*words, "--show", "-1"]) == 2


def test_the_list_of_benches(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        assert main(["bench", *words]) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out for name in BENCHES) and list(BENCHES) == ["calibrate", "step"]
    assert main(["bench", "stp"]) == 2
    assert "longspan bench has no 'stp'; it has calibrate, step" in capsys.readouterr().err


def test_a_record_goes_on_with_figures_of_its_own_kind_alone(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    begun = open_record("some", out, "gloo", tmp_path, ranks=4)
    write_record(begun, out)
    assert open_record("some", out, "gloo", tmp_path, ranks=4) == begun
    with pytest.raises(ConfigError, match="figures of ranks 4, asked for 2: give another --out"):
        open_record("some", out, "gloo", tmp_path, ranks=2)


def test_an_error_shows_control_characters_and_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "no\x1bwhere\nruns", "folder"]) == 2
    assert "no\\x1bwhere\nruns" in capsys.readouterr().err


def test_output_that_takes_nothing_is_an_error_in_a_line(tmp_path: Path) -> None:
    program = "import sys; from longspan.cli.main import main; sys.exit(main())"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (["--help"], ["plan", "--help-all"]):
        command = [sys.executable, "-c", program, *words]
        with Path("/dev/full").open("w") as full:
            refused = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
        assert "error: standard output does not take the result (No space left on device)" in refused.stderr
        done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and not done.stderr and "usage" in done.stdout.lower()
    with Path("/dev/full").open("w") as full:
        refused = subprocess.run([sys.executable, "-c", program, "no-verb"], stdout=full, stderr=full, check=False)
    assert refused.returncode == 2


def test_lines_escape_names() -> None:
    out = io.StringIO()
    ProgressDisplay(1, out).log("a\x1b[2J.jsonl\n\tb…")
    print_note("c\x9b2J", out)
    assert out.getvalue() == "a\\x1b[2J.jsonl\n\tb…\nc\\x9b2J\n"
