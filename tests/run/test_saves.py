"""When a run saves, what it does before an error, and which checkpoint is the best."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from longspan.checkpoint.export import export_checkpoint
from longspan.checkpoint.files import checkpoint_path
from longspan.cli.main import main
from longspan.comm import World, on_all_ranks
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
from longspan.evaluation.evaluate_saved import evaluate_saved
from longspan.evaluation.live import evaluate
from longspan.evaluation.request import EvalRequest, Subject, find_saved_weights
from longspan.layout import Layout
from longspan.report import write_report
from longspan.report.follow import LiveRun
from longspan.report.run_folder import RunFolder
from longspan.run import evaluations as evaluations_module, folder as run_folder, saves as module
from longspan.run.checks import check_config
from longspan.run.folder import check_free_disk
from longspan.run.metrics import read_metrics
from longspan.run.saves import BestCheckpoint, Saves
from longspan.train.start.start_times import Starts
from tests.model.stock import without_trials
from tests.run.runs.homes import ALONE, lines_of, train_rows
from tests.run.runs.test_lora_run import write_base
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


def record(best: BestCheckpoint, rows: list[dict[str, Any]], step: int) -> bool:
    return max(best.record_if_best(row, step) for row in rows)


def test_a_figure_is_compared_and_goes_on_after_a_resume(tmp_path: Path, world: Any) -> None:
    said = list[str]()
    best = BestCheckpoint("eval_loss", tmp_path, world, said.append)
    losses = {10: 3.0, 20: 3.5, 30: 2.0, 40: 2.0, 50: None, 60: 1.0}
    assert [step for step, loss in losses.items() if record(best, rows(loss), step)] == [10, 30, 60]
    assert said[1] == "step 30 has the best eval_loss so far, 2 (before: 3 at step 10); its checkpoint is kept"
    resumed = BestCheckpoint("eval_loss", tmp_path, world, said.append)
    resumed.restore_best_steps(60, [60, 30])
    assert resumed.step == 60
    resumed.restore_best_steps(50, [50, 30])  # what came after the checkpoint that the run goes on from is made again
    assert json.loads((tmp_path / "best.json").read_text())["bests"] == [{"step": 30, "value": 2.0}], "for verbs, too"
    assert resumed.step == 30 and not record(resumed, rows(2.5), 60) and record(resumed, rows(1.5), 60)
    higher = BestCheckpoint("code/eval_hits:higher", tmp_path, world, said.append)
    higher.restore_best_steps(60, [60, 30])
    assert higher.step == 0 and "is of another figure" in said[-1]
    assert [record(higher, rows(1.0, eval_hits=hits), step) for step, hits in ((70, 0.5), (80, 0.4))] == [
        True,
        False,
    ]
    with pytest.raises(ConfigError, match=r"checkpoint.keep_best names eval_hits, and the evaluation has eval_loss"):
        record(higher, rows(1.0), 90)
    (tmp_path / "best.json").write_text("{")
    higher.restore_best_steps(60, [60, 30])
    assert higher.step == 0 and "is damaged" in said[-1]


@pytest.mark.parametrize("higher", [False, True])
def test_a_figure_that_is_not_finite_is_none(higher: bool, tmp_path: Path, world: Any) -> None:
    said = list[str]()
    figure = "eval_loss:higher" if higher else "eval_loss"
    best = BestCheckpoint(figure, tmp_path, world, said.append)
    figures = [math.nan, math.inf, -math.inf, 3.0, math.nan, math.inf, -math.inf, 2.0, 4.0]
    assert [step for step, value in enumerate(figures, 1) if record(best, rows(value), step)] == [4, 9 if higher else 8]
    assert said[0] == "eval_loss of step 1 is nan: no figure by which it could be the best"
    assert [" is nan: " in line or " is inf: " in line or " is -inf: " in line for line in said].count(True) == 6
    for bests in ('{"step": 3, "value": NaN}', '{"step": 3, "value": "inf"}', '{"step": Infinity, "value": 1}', "7"):
        stored = json.dumps({"set": "", "column": "eval_loss", "higher": higher, "bests": []})
        (tmp_path / "best.json").write_text(stored.replace("[]", f"[{bests}]"))
        best.restore_best_steps(9, [3])
        assert best.step == 0 and said[-1] == f"{tmp_path}/best.json is damaged: no best step is known from it"


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
    monkeypatch.setattr(run_folder, "read_configuration", lambda _: SimpleNamespace(dtype=torch.bfloat16))
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
    value = evaluated_losses(folder)[0]
    best = f"step 2 is the best by eval_loss {value:.6g}"
    assert f"{best}; model/ has the weights of step 5, the last" in write_report(folder).read_text()
    out, lines = tmp_path / "out", list[str]()
    assert export_checkpoint(folder, None, out, lines.append).step == 5 and are_of_step(folder / "model", folder, 5)
    take = f"step 5, the newest, is taken, and to take the best give {folder}/checkpoints/step-000002"
    assert lines == [f"{folder}: {best}; {take}"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def are_of_step(model: Path, run: Path, step: int) -> bool:
    """Whether a folder has the weights of a checkpoint of this step, bit for bit."""
    out = model.parent / f"exported {model.name} {step}"
    export_checkpoint(run, checkpoint_path(run / "checkpoints", step), out, print, overwrite=True)
    expected, weights = weights_of(out), weights_of(model)
    return expected.keys() == weights.keys() and all(map(torch.equal, *map(dict.values, (expected, weights))))


def evaluated_losses(run: Path) -> list[float]:
    return [row["eval_loss"] for row in read_metrics(run / "metrics.jsonl") if "eval_loss" in row]


WORSE: dict[str, Any] = {"evaluation__every": 1, "optimizer__arguments": ("maximize=true",), **ALONE}


def test_a_run_ends_without_patience_with_its_best_weights_and_a_resume_counts_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys: dict[str, Any] = {"checkpoint__save_total_limit": 1, "train__steps": 9, **WORSE}
    for patience, last in ((2, 3), (3, 4), (3, 4)):  # the third start ends at once
        config = small_config(tmp_path, evaluation__patience=patience, **keys)
        assert config.checkpoint.keep_best == "eval_loss"
        lines = lines_of(0, config, 1)
        folder = Path(config.run.dir)
        summary = json.loads((folder / "summary.json").read_text())
        evaluated = evaluated_losses(folder)
        reason = f"no eval_loss better than {evaluated[0]:.6g} of step 1 in {patience} evaluations"
        assert f"the run ends after step {last}: {reason} (evaluation.patience)" in lines
        assert (summary["step"], summary["steps"], summary["end_reason"]) == (last, 9, reason)
        assert evaluated == sorted(evaluated) and len(evaluated) == last
        assert summary["eval_at_degrees"][0]["step"] == summary["model_step"] == 1
        assert summary["eval_at_degrees"][0]["eval_loss"] == evaluated[0]
        metrics = folder / "metrics.jsonl"
        metrics.write_text("?" + metrics.read_text().replace("\n", "\n\n", 1))  # which cuts no history
        metrics.write_text(metrics.read_text() if patience == 3 else metrics.read_text()[1:])
    assert "metrics.jsonl: left in place 1 line that cannot be read" in lines
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-000001", "step-000004"}
    assert are_of_step(folder / "model", folder, 1)
    best = f"step 1 is the best by eval_loss {evaluated[0]:.6g}"
    page = write_report(folder)
    assert f"ended after step 4 of 9: {reason}; {best}; model/ has its weights" in page.read_text()
    assert RunFolder.read(folder).newest_by_degree[0].loss == evaluated[0] and LiveRun.read(folder).state == "done"
    check_best_is_handed_out(folder, best, 4, capfd)
    with pytest.raises(ConfigError, match=r"evaluation.patience is 2, and held-out documents are evaluated after"):
        check_config(small_config(tmp_path, evaluation__patience=2, **keys | {"evaluation__every": 0}), 1)


def check_best_is_handed_out(run: Path, best: str, newest: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Verbs take the best step of a run, and say so; one that names another checkpoint takes that."""
    newest_path = checkpoint_path(run / "checkpoints", newest)
    line = f"{run}: {best} and is taken; the newest is {newest_path}\n"
    out = run.parent / "out"
    assert main(["export", str(run), str(out)]) == 0 and line in capfd.readouterr().out
    assert (
        are_of_step(out, run, 1)
        and f"| best step | 1, by {best.rpartition('by ')[2]} |" in (out / "README.md").read_text()
    )
    assert main(["export", str(newest_path), str(out), "--overwrite"]) == 0
    assert best not in capfd.readouterr().out and are_of_step(out, run, newest)
    for target, step in ((run, 1), (newest_path, newest)):
        lines = list[str]()
        request = EvalRequest(subjects=(Subject(find_saved_weights(str(target)), load_config(run / "config.toml")),))
        with World(Layout(1), backend="gloo", device="cpu") as world, without_trials():
            (result,) = evaluate_saved(request, world, lines.append, lambda *_: None, Starts())
        evaluation = result.sets[0].evaluation
        assert (evaluation.step, evaluation.loss) == (step, evaluated_losses(run)[step - 1])
        assert (line.strip() in lines) == (target == run)


@pytest.mark.whole
def test_every_verb_takes_the_best_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path / "base")
    keys: dict[str, Any] = {"model__path": str(base), "lora__rank": 4, "optimizer__lr": 0.05, "train__steps": 4}
    config = small_config(tmp_path, evaluation__patience=2, **WORSE | keys)
    lines_of(0, config, 1)
    run = Path(config.run.dir)
    best = run / "checkpoints" / "step-000001"
    outputs = dict[Path, list[object]]()
    for target in (run, best):
        verbs = (["export"], ["export", "--merge"], ["eval", "--json"], ["generate", "--prompt", "def", "--json"])
        for number, (verb, *flags) in enumerate(verbs):
            out = tmp_path / f"{target.name} {number}"
            words = [str(target), str(out)] if verb == "export" else [str(target), "--device", "cpu"]
            capfd.readouterr()
            assert main([verb, *words, *flags]) == 0
            printed = capfd.readouterr()
            said = "step 1 is the best by eval_loss" in printed.out + printed.err
            assert said == (target == run), (target, verb, printed)
            result = json.loads(printed.out) if verb != "export" else None
            weights = {file.name: file.read_bytes() for file in out.glob("*.safetensors")}
            if verb == "eval":
                assert result["eval_loss"] == evaluated_losses(run)[0]
            texts = [row["completion"] for row in result] if verb == "generate" else []
            outputs.setdefault(target, []).append((weights, texts))
    assert outputs[run] == outputs[best]


def test_the_best_weights_are_saved_also_where_all_steps_are_done(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"train__steps": 3, "evaluation__every": 2, "evaluation__patience": 1}
    config = small_config(tmp_path, **WORSE | keys)
    folder = Path(config.run.dir)
    for _ in range(2):  # the second start shows the run
        lines_of(0, config, 1)
        summary = json.loads((folder / "summary.json").read_text())
        assert [row["step"] for row in read_metrics(folder / "metrics.jsonl") if "eval_loss" in row] == [2, 3]
        assert (summary["step"], summary["end_reason"], summary["model_step"]) == (3, "", 2)
        assert summary["best"] == {"figure": "eval_loss", "step": 2, "value": evaluated_losses(folder)[0]}
        assert summary["eval_at_degrees"][0]["eval_loss"] == evaluated_losses(folder)[0] < evaluated_losses(folder)[1]
        assert are_of_step(folder / "model", folder, 2)
    better = small_config(tmp_path / "better", **WORSE | keys | {"optimizer__arguments": ()})
    evaluations = list[int]()
    with patch.object(evaluations_module, "evaluate", lambda *args: evaluations.append(1) or evaluate(*args)):
        lines_of(0, better, 1)
    folder = Path(better.run.dir)
    assert json.loads((folder / "summary.json").read_text())["model_step"] == 3 and are_of_step(
        folder / "model", folder, 3
    )
    assert len(evaluations) == len(evaluated_losses(folder)) == 2, "what decides is not evaluated once more"


@pytest.mark.whole
def test_patience_that_is_given_later_counts_from_the_first_best_step(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"optimizer__arguments": ("maximize=true",), "evaluation__every": 1, **ALONE}
    lines_of(0, small_config(tmp_path, train__steps=3, **keys), 1)
    lines = lines_of(0, small_config(tmp_path, train__steps=9, evaluation__patience=2, **keys), 1)
    assert "the run ends after step 6: no eval_loss better than" in lines and "of step 4 in 2 evaluations" in lines
