"""The best checkpoint by an evaluation's figure is kept in addition to the newest, and survives a resume."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longspan.config.file import load_config
from longspan.config.sections import BestFigure
from longspan.errors import ConfigError
from longspan.run import saves as module
from longspan.run.checks import check_numbers
from longspan.run.saves import BestCheckpoint
from longspan.testing import run_ranks
from tests.train.small import small_config, train_rank


def rows(loss: float | None, **others: float) -> list[dict[str, Any]]:
    """Evaluations of the held-out documents and of a set."""
    return [{"step": 1, "eval_loss": loss}, {"step": 1, "eval_name": "code", "eval_loss": 9.0, **others}]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "run_on_first_rank", lambda world, work, kind: work())
    return SimpleNamespace(control=SimpleNamespace(broadcast_object=lambda value: value))


def test_a_figure_is_compared_and_goes_on_after_a_resume(tmp_path: Path, world: Any) -> None:
    said = list[str]()
    best = BestCheckpoint("eval_loss", tmp_path, world, said.append)
    losses = {10: 3.0, 20: 3.5, 30: 2.0, 40: 2.0, 50: None, 60: 1.0}
    assert [step for step, loss in losses.items() if best.note_if_best(rows(loss), step)] == [10, 30, 60]
    assert said[1] == "step 30 has the best eval_loss so far, 2 (before: 3 at step 10); its checkpoint is kept"
    resumed = BestCheckpoint("eval_loss", tmp_path, world, said.append)
    resumed.load_bests(60, [60, 30])
    assert resumed.step == 60
    resumed.load_bests(50, [50, 30])  # what came after the checkpoint that the run goes on from is made again
    assert resumed.step == 30 and not resumed.note_if_best(rows(2.5), 60) and resumed.note_if_best(rows(1.5), 60)
    higher = BestCheckpoint("code/eval_hits:higher", tmp_path, world, said.append)
    higher.load_bests(60, [60, 30])
    assert higher.step == 0 and "is of another figure" in said[-1]
    assert higher.note_if_best(rows(1.0, eval_hits=0.5), 70) and not higher.note_if_best(rows(1.0, eval_hits=0.4), 80)
    with pytest.raises(ConfigError, match=r"train.keep_best names eval_hits, and the evaluation has eval_loss"):
        higher.note_if_best(rows(1.0), 90)
    (tmp_path / "best.json").write_text("{")
    higher.load_bests(60, [60, 30])
    assert higher.step == 0 and "is damaged" in said[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss", "is 'loss'; give a figure of an evaluation as metrics.jsonl has it, such as eval_loss"),
        ("eval_loss:best", "is 'eval_loss:best'; give a figure"),
        ("code/eval_loss", "names eval_loss of the set 'code', which the run has not; its sets: none"),
    ],
)
def test_a_figure_that_is_none_is_refused(text: str, message: str) -> None:
    config = load_config()
    with pytest.raises(ConfigError, match=message):
        check_numbers(replace(config, train=replace(config.train, keep_best=text)), training=True)
    with pytest.raises(ConfigError, match=r"held out \(data.eval_documents\), which the run has not"):
        BestFigure.of("eval_loss").check_sets([])


def test_a_run_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    """By the highest loss, which the first evaluation has."""
    keys = {"train__keep_best": "eval_loss:higher", "run__keep_checkpoints": 1, "train__eval_every": 2}
    for steps in (3, 5):
        run_ranks(train_rank, 2, small_config(tmp_path, train__steps=steps, train__save_every=1, **keys), 2)
        folder = tmp_path / "run"
        assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-000002", f"step-00000{steps}"}
        assert [entry["step"] for entry in json.loads((folder / "best.json").read_text())["bests"]] == [2]
