"""`longspan train --show N`: rows as tokens with their targets marked; nothing is trained and nothing is left."""

import json
import sys
from pathlib import Path

import pytest

from longspan.cli import show
from longspan.cli.main import main
from longspan.corpus.rows.sample import Row, Sample
from tests.corpus.rows.families import encoding_of, write_folder
from tests.corpus.test_formats import rows_as

ROWS = [
    {"messages": [{"role": "user", "content": f"Why {i}?"}, {"role": "assistant", "content": "ß 天.\nSo."}]}
    for i in range(4)
]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model", "phi3")
    rows_as("jsonl", tmp_path / "rows", ROWS)
    return ["train", "--data.path", "rows", "--data.tokenizer", "model", "--data.cache", str(tmp_path / "cache")]


def test_the_first_rows_with_their_targets(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_bad_rows_are_errors_or_shown_as_left_out(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "rows" / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [], "id": 1}) + "\n")
    assert main([*words, "--show", "9"]) == 2
    assert 'rows.jsonl, line 5: "messages" is empty' in capsys.readouterr().err
    assert main([*words, "--show", "9", "--data.on_bad", "skip"]) == 0
    assert 'line 5: left out, "messages" is empty' in capsys.readouterr().out
    assert main([*words, "--show", "-1"]) == 2
