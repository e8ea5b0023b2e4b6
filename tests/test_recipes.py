"""Benches: recipes are answered by a dry run as is written next to them; runs that need GPUs go on."""

import json
from pathlib import Path

import pytest
from bench.on_gpus import RUNS, GpuRun, choose_runs, take_runs
from bench.plans import recipes

from longspan.config.file import load_config

NAMES = sorted(path.stem for path in recipes.FOLDER.glob("*.toml"))
WRITTEN = recipes.read_rows(recipes.PAGE.read_text(encoding="utf-8"))
PLACES = [(gpu, count) for gpu, _ in recipes.GPUS for count in recipes.COUNTS]


def test_recipes_say_what_their_names_say() -> None:
    assert WRITTEN.keys() == set(NAMES) and len(NAMES) == 20
    for name in NAMES:
        config, (family, kind, size) = load_config(recipes.FOLDER / f"{name}.toml"), name.rsplit("-", 2)
        assert bool(config.lora.rank) == (kind == "lora") and config.run.dir == f"runs/{name}"
        assert config.data.max_document_tokens == recipes.MADE[size][1]
        assert config.model.path in [*recipes.FAMILIES, "Qwen3-8B"]
        assert family in ("gemma-3-12b", "gpt-oss-20b", "llama-3.1-8b", "qwen3-8b", "qwen3-vl-8b")
    for name, row in WRITTEN.items():
        cells = row.split("|")[2:-1]
        assert len(cells) == len(PLACES) and any("GiB" in cell for cell in cells), name


def test_an_answer_is_that_of_a_dry_run() -> None:
    name, gpu, count = "gpt-oss-20b-lora-32k", "h200", 1
    with recipes.made_folder() as folder:  # make recipes-check compares all answers
        cell = recipes.cell(recipes.answer_of(name, folder, gpu, count))
    assert cell == WRITTEN[name].split("|")[2 + PLACES.index((gpu, count))].strip()


ROOT = Path(__file__).parents[1]


def test_commands_name_files_that_are_there(tmp_path: Path) -> None:
    for words in (run.words(tmp_path) for run in RUNS):
        assert not any("{" in word for word in words), words
        assert all((ROOT / word).is_file() for word in words if word.startswith("bench/")), words
    with pytest.raises(SystemExit, match=r"step-33k; runs are first-steps"):
        choose_runs("first-steps,step-33k")


def test_runs_go_on_where_they_were_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = GpuRun("good", 20, "{python} -c \"print('fine')\"")
    bad = GpuRun("bad", 20, '{python} -c "raise SystemExit(3)"')
    slow = GpuRun("slow", 1, '{python} -c "import time; time.sleep(60)"')
    long = GpuRun("long", 900, "{python} --version")
    assert not take_runs([good, bad, slow, long], tmp_path, 60)
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(row["name"], row["status"]) for row in rows] == [("good", 0), ("bad", 3), ("slow", 124)]
    assert "fine" in (tmp_path / "good.log").read_text()
    assert "it takes 900" in capsys.readouterr().out
    assert take_runs([good], tmp_path, 60)
    assert "done before" in capsys.readouterr().out
