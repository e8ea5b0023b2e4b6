"""When a run saves, what it does before an error, and which checkpoint is the best."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longspan.checkpoint.export import export_checkpoint
from longspan.comm import on_all_ranks
from longspan.config.file import load_config
from longspan.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    LongspanError,
    NonFiniteError,
    RankLostError,
    RunFolderError,
)
from longspan.report import write_report
from longspan.run import folder as run_folder, saves as module
from longspan.run.checks import check_config
from longspan.run.folder import check_free_disk
from longspan.run.metrics import read_metrics
from longspan.run.saves import BestCheckpoint, Saves
from tests.run.runs.homes import ALONE, lines_of, train_rows
from tests.train.small import small_config


class FakeSaver:
    written: list[tuple[int, int]]
    refusal: CheckpointError | None = None

    def __init__(self, *_: Any, keep: int, **__: Any) -> None:
        self.keep, self.left = keep, ""

    def save(self, *_: Any, step: int, state: Any) -> None:
        if self.refusal is None:
            self.written.append((step, self.keep))

    def wait(self) -> None:
        self.left = "waited"
        if self.refusal is not None:
            raise self.refusal

    def give_up(self, seconds: float = 0.0) -> None:
        self.left = f"waited at most {seconds:g} s" if seconds else "given up"


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(step, keep) of every checkpoint that would be written."""
    FakeSaver.written = []
    monkeypatch.setattr(module, "CheckpointSaver", FakeSaver)
    return FakeSaver.written


def saves_of(keys: dict[str, object], rank: int = 0, done: int = 0) -> Saves:
    config = load_config(None, keys)
    world = SimpleNamespace(rank=rank, home=SimpleNamespace(ranks=(0, 1)), timeout=60.0)
    order = SimpleNamespace(version=2, begin_of_step=lambda step: step)
    of_model = {"model": None, "optimizer": None, "order": order}
    run: Any = SimpleNamespace(config=config, world=world, done=done, checkpoints="c", **of_model)
    return Saves(run, lambda _: None)


def test_the_first_ranks_clock_counts_from_a_save(
    saved: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    of_ranks = (2.0, 0), (2.0, 1), (0.0, 0)
    first, second, never = (saves_of({"checkpoint.minutes": minutes}, rank) for minutes, rank in of_ranks)
    answers = []
    for seconds in (100.0, 130.0, 200.0, 260.0):
        now[0] = seconds
        answers.append(first.minutes_are_over())
        assert not second.minutes_are_over() and not never.minutes_are_over()
        if first.is_checkpoint_due(minutes_over=first.minutes_are_over()):
            first.save()
    assert answers == [False, True, False, True] and saved == [(0, 2), (0, 2)]


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(("done", "due"), [(0, False), (3, True), (4, False), (6, True), (7, True)])
def test_steps_between_checkpoints_and_the_last(done: int, due: bool) -> None:
    saves = saves_of({"checkpoint.every": 3, "train.steps": 7})
    saves.done = done
    assert saves.is_checkpoint_due(minutes_over=False) == due and saves.is_checkpoint_due(minutes_over=True)


def broken_weights() -> NonFiniteError:
    error = NonFiniteError("nan")
    error.weights_are_finite = False
    return error


ERRORS = [
    (on_all_ranks(RunFolderError("full")), True, "waited"),
    (on_all_ranks(NonFiniteError("nan")), True, "waited"),
    (on_all_ranks(broken_weights()), False, "waited"),
    (on_all_ranks(CheckpointError("full")), False, "waited"),
    (RankLostError("rank 1 is lost"), False, "given up"),
    (CommError("ranks disagree"), False, "waited at most 15 s"),
    (RunFolderError("of this rank alone"), False, "waited at most 15 s"),
]


@pytest.mark.parametrize(("error", "saves", "left"), ERRORS, ids=str)
def test_errors_of_all_ranks_come_after_a_save(
    saved: list[tuple[int, int]], error: LongspanError, saves: bool, left: str
) -> None:
    error = type(error)(str(error)) if not error.on_all_ranks else error
    run = saves_of({}, done=4)
    with pytest.raises(type(error)) as raised, run.save_before_errors():
        run.done += 1
        raise error
    notes = getattr(raised.value, "__notes__", [])
    assert (saved, notes) == ([(5, 0)], ["The weights after 5 steps are saved in c"]) if saves else ([], [])
    assert vars(run.saver)["left"] == left  # a checkpoint that was being written before


def test_nothing_new_is_not_saved(saved: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    run = saves_of({}, done=4)
    with pytest.raises(RunFolderError), run.save_before_errors():
        raise on_all_ranks(RunFolderError("full"))
    assert not saved

    monkeypatch.setattr(FakeSaver, "refusal", CheckpointError("no space"))
    with pytest.raises(RunFolderError) as raised, run.save_before_errors():
        run.done += 2
        raise on_all_ranks(RunFolderError("full"))
    assert raised.value.__notes__ == ["What was trained since step 4 is lost: no space"]


def rows(loss: float | None, **others: float) -> list[dict[str, Any]]:
    return [{"step": 1, "eval_loss": loss}, {"step": 1, "eval_name": "code", "eval_loss": 9.0, **others}]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "run_on_first_rank", lambda world, work, kind: work())
    return SimpleNamespace(control=SimpleNamespace(broadcast_object=lambda value: value))


def test_a_figure_is_compared_and_goes_on_after_a_resume(tmp_path: Path, world: Any) -> None:
    said = list[str]()
    best = BestCheckpoint("eval_loss", tmp_path, world, said.append)
    losses = {10: 3.0, 20: 3.5, 30: 2.0, 40: 2.0, 50: None, 60: 1.0}
    assert [step for step, loss in losses.items() if best.record_if_best(rows(loss), step)] == [10, 30, 60]
    assert said[1] == "step 30 has the best eval_loss so far, 2 (before: 3 at step 10); its checkpoint is kept"
    resumed = BestCheckpoint("eval_loss", tmp_path, world, said.append)
    resumed.restore_best_steps(60, [60, 30])
    assert resumed.step == 60
    resumed.restore_best_steps(50, [50, 30])  # what came after the checkpoint that the run goes on from is made again
    assert resumed.step == 30 and not resumed.record_if_best(rows(2.5), 60) and resumed.record_if_best(rows(1.5), 60)
    higher = BestCheckpoint("code/eval_hits:higher", tmp_path, world, said.append)
    higher.restore_best_steps(60, [60, 30])
    assert higher.step == 0 and "is of another figure" in said[-1]
    assert [higher.record_if_best(rows(1.0, eval_hits=hits), step) for step, hits in ((70, 0.5), (80, 0.4))] == [
        True,
        False,
    ]
    with pytest.raises(ConfigError, match=r"checkpoint.keep_best names eval_hits, and the evaluation has eval_loss"):
        higher.record_if_best(rows(1.0), 90)
    (tmp_path / "best.json").write_text("{")
    higher.restore_best_steps(60, [60, 30])
    assert higher.step == 0 and "is damaged" in said[-1]


GB = 10**9


OF_ADAPTER = {"lora.rank": 4, "checkpoint.minutes": 0.0}
IN_EIGHT_BITS = {"optimizer.moments": "8bit", "checkpoint.minutes": 0.0}  # saved in bfloat16
MUON = {"optimizer.class": "muon", "checkpoint.minutes": 0.0}  # a second moment of half of the weights
ONE = {"checkpoint.minutes": 0.0}  # after the last step
EVERY_4 = ONE | {"checkpoint.every": 4}
EVERY_1 = ONE | {"checkpoint.every": 1}
# Of a checkpoint of 12 GB, before 10 steps, and a model of 2 GB at the end: keys, checkpoints that are there, GB that
# are free, and on the model's own disk (0: it has none), and what is said.
DISKS: list[tuple[dict[str, object], int, int, int, str]] = [
    ({}, 0, 38, 0, ""),
    ({}, 0, 37, 0, "has 34.46 GiB free, for 2 of 3 more checkpoints at once (0 are there); make room"),  # by the clock
    (ONE, 0, 14, 0, ""),
    (ONE, 0, 13, 0, "refused: RUN/model 1.863 GiB, and"),
    (ONE | {"checkpoint.allow_little_disk": True}, 0, 13, 0, "for 0 of 1 more checkpoint at once"),
    (EVERY_4, 0, 38, 0, ""),
    (EVERY_4, 0, 37, 0, "refused: for 2 of 3 more checkpoints at once (0 are there)"),
    (EVERY_4, 2, 14, 0, ""),  # an old one goes when the next is there
    (EVERY_4, 2, 13, 0, "refused: for 0 of 1 more checkpoint at once (2 are there)"),
    (
        EVERY_1 | {"checkpoint.save_total_limit": 1, "checkpoint.keep_best": "eval_loss"},
        0,
        37,
        0,
        "refused: for 2 of 3",
    ),
    (EVERY_1 | {"checkpoint.save_total_limit": 0}, 0, 121, 0, "refused: for 9 of 10 more checkpoints"),
    (OF_ADAPTER, 0, 4, 0, ""),
    (OF_ADAPTER, 0, 3, 0, "refused: a checkpoint takes 2.794 GiB, RUN/model 953.7 MiB, and"),
    (IN_EIGHT_BITS, 0, 10, 0, ""),
    (IN_EIGHT_BITS, 0, 9, 0, "refused: a checkpoint takes 7.451 GiB"),
    (MUON, 0, 12, 0, ""),
    (MUON, 0, 11, 0, "refused: a checkpoint takes 9.313 GiB"),
    (ONE, 0, 12, 2, ""),
    (ONE, 0, 12, 1, "refused: the model that a run saves at its end takes 1.863 GiB, and other has 953.7 MiB free"),
]


class _OtherDisk(type(Path())):
    def stat(self, **_: Any) -> Any:
        return SimpleNamespace(st_dev=-1)


@pytest.mark.parametrize(("keys", "there", "free", "free_for_model", "says"), DISKS)
def test_the_disk_is_compared_with_the_checkpoints_that_it_is_to_hold(
    keys: dict[str, object],
    there: int,
    free: int,
    free_for_model: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks have 2e9 bytes of trained weights in all, with two moments, and 6e9 that are not trained."""
    config, said = load_config(None, {"train.steps": 10, **keys}), list[str]()
    kinds = ((10**9 // 4, True), (3 * 10**9 // 4, False)) if config.lora.rank else ((10**9 // 4, True),) * 2
    weights = [torch.nn.Parameter(torch.empty(n, device="meta"), requires_grad=trains) for n, trains in kinds]
    asked = list[Path]()

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        return SimpleNamespace(free=(free if path == tmp_path else free_for_model) * GB)

    monkeypatch.setattr(run_folder.shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(run_folder, "read_json", lambda _: {"dtype": "bfloat16"})
    monkeypatch.setattr(run_folder, "complete_checkpoints", lambda _: [tmp_path] * there)
    monkeypatch.setattr(run_folder, "run_on_first_rank", lambda world, work, kind: work())
    world = SimpleNamespace(
        home=SimpleNamespace(dp_replicate=2 if config.lora.rank else 1),
        control=SimpleNamespace(gather_objects=lambda size, _: [size, size]),
    )
    run: Any = SimpleNamespace(
        config=config,
        world=world,
        done=0,
        checkpoints=tmp_path / "run" / "checkpoints",
        dir=tmp_path,
        model=SimpleNamespace(parameters=lambda: iter(weights)),
        optimizer=SimpleNamespace(
            param_groups=[{"params": weights[:1], "is_matrix": config.optimizer.class_ == "muon"}]
        ),
    )
    if free_for_model:
        run.dir = _OtherDisk("other")
    if says.startswith("refused: "):
        with pytest.raises(ConfigError, match=re.escape(says.removeprefix("refused: "))) as error:
            check_free_disk(run, said.append)
        assert str(error.value).endswith("checkpoint.allow_little_disk = true trains all the same") and not said
    else:
        check_free_disk(run, said.append)
        assert [says in line for line in said] == [True] * bool(says)
    assert asked == [tmp_path, *[run.dir] * bool(free_for_model)], "the nearest folder that is there"


def test_a_run_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    keys = ALONE | {
        "checkpoint__keep_best": "eval_loss:higher",
        "checkpoint__save_total_limit": 1,
        "evaluation__every": 2,
    }
    for steps in (3, 5):
        train_rows(small_config(tmp_path, train__steps=steps, checkpoint__every=1, **keys), 1)
        folder = tmp_path / "run"
        assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-000002", f"step-00000{steps}"}
        assert [entry["step"] for entry in json.loads((folder / "best.json").read_text())["bests"]] == [2]


def test_a_run_ends_without_patience_with_its_best_weights_and_a_resume_counts_on(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"evaluation__every": 1, "checkpoint__save_total_limit": 1, "train__steps": 9, **ALONE}
    keys["optimizer__arguments"] = ("maximize=true",)  # every step is worse than the one before
    for patience, last in ((2, 3), (3, 4), (3, 4)):  # the third start ends at once
        config = small_config(tmp_path, evaluation__patience=patience, **keys)
        assert config.checkpoint.keep_best == "eval_loss"
        lines = lines_of(0, config, 1)
        folder = Path(config.run.dir)
        summary = json.loads((folder / "summary.json").read_text())
        evaluated = [row["eval_loss"] for row in read_metrics(folder / "metrics.jsonl") if "eval_loss" in row]
        reason = f"no eval_loss better than {evaluated[0]:.6g} of step 1 in {patience} evaluations"
        assert f"the run ends after step {last}: {reason} (evaluation.patience)" in lines
        assert (summary["step"], summary["steps"], summary["end_reason"]) == (last, 9, reason)
        assert evaluated == sorted(evaluated) and len(evaluated) == last
        assert summary["eval_at_degrees"][0]["step"] == 1
        assert summary["eval_at_degrees"][0]["eval_loss"] == evaluated[0]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-000001", "step-000004"}
    export_checkpoint(folder, folder / "checkpoints/step-000001", tmp_path / "best", lines.__contains__)
    best, model = (load_file(Path(path, "model.safetensors")) for path in (tmp_path / "best", folder / "model"))
    assert best.keys() == model.keys() and all(torch.equal(best[name], model[name]) for name in best)
    assert f"ended after step 4 of 9: {reason}" in write_report(folder).read_text()
    with pytest.raises(ConfigError, match=r"evaluation.patience is 2, and held-out documents are evaluated after"):
        check_config(small_config(tmp_path, evaluation__patience=2, **keys | {"evaluation__every": 0}), 1)


@pytest.mark.whole
def test_patience_that_is_given_later_counts_from_the_first_best_step(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"optimizer__arguments": ("maximize=true",), "evaluation__every": 1, **ALONE}
    lines_of(0, small_config(tmp_path, train__steps=3, **keys), 1)
    lines = lines_of(0, small_config(tmp_path, train__steps=9, evaluation__patience=2, **keys), 1)
    assert "the run ends after step 6: no eval_loss better than" in lines and "of step 4 in 2 evaluations" in lines
