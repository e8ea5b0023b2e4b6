"""`longspan eval`: the loss of a checkpoint does not depend on the degree or on the number of ranks."""

import json
from pathlib import Path

import numpy as np
import pytest

from longspan.checkpoint.files import PARTIAL
from longspan.cli.eval import _bucket_tables, result_tables
from longspan.cli.main import main
from longspan.config.sections import RunConfig
from longspan.evaluation.metrics import Bucket, Mean
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from tests.evaluation.saved.test_comparison import result
from tests.train.small import small_config, train_rank, write_texts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("eval")
    sets = [{"name": "others", "path": str(write_texts(folder / "others", 4)), "context_parallel_size": 1}]
    config = small_config(folder, train__steps=2, train__save_every=1, eval=sets)
    run_ranks(train_rank, 2, config, 2)
    (Path(config.run.dir) / "checkpoints" / f"step-000009{PARTIAL}").mkdir()  # a save that was interrupted
    return config


CASES = [(2, "step-000002", "1"), (3, "", "3"), *(pytest.param(n, "", str(n), marks=pytest.mark.whole) for n in (1, 2))]


@pytest.mark.parametrize(("world", "checkpoint", "degree"), CASES)
def test_the_loss_is_that_of_the_run(
    run: RunConfig, capfd: pytest.CaptureFixture[str], world: int, checkpoint: str, degree: str
) -> None:
    target = f"{run.run.dir}/checkpoints/{checkpoint}" if checkpoint else run.run.dir
    before = sorted(Path(run.run.dir).rglob("*"))
    flags = ["--json", "--context.eval_context_parallel_size", degree, "--context.eval_max_tokens_per_slot", "64"]
    assert main(["eval", target, "--world", str(world), *flags]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert err.count("its save was interrupted") == (not checkpoint), (
        "one rank says it, where checkpoints are looked for"
    )
    trained = [row for row in read_metrics(Path(run.run.dir) / "metrics.jsonl") if "eval_name" not in row][-1]
    assert (found["step"], found["cp"], found["world"]) == (2, int(degree), world)
    assert found["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
    assert found["eval_tokens"] == trained["eval_tokens"]
    assert sorted(Path(run.run.dir).rglob("*")) == before


def test_a_set_of_the_run_and_a_comparison(run: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    """A set is planned by its own keys; the folder that the run saved has the losses of its last checkpoint."""
    words = ["eval", run.run.dir, "--set", "others", "--compare", f"{run.run.dir}/model", "--json", "--world", "2"]
    assert main(words) == 0
    found = json.loads(capfd.readouterr().out)
    trained = [row for row in read_metrics(Path(run.run.dir) / "metrics.jsonl") if row.get("eval_name") == "others"][-1]
    assert (found["eval_name"], found["cp"], found["eval_targets"]) == ("others", 1, trained["eval_targets"])
    assert found["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
    (difference,) = found["compare"]["differences"]
    assert abs(difference["difference"]) < 1e-6 and found["compare"]["kind"] == "folder"
    assert [row[:2] for row in found["by_length"]] == [row[:2] for row in trained["by_length"]]


def test_a_degree_is_chosen_and_said(run: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--json", "--context.eval_context_parallel_size", "auto"]
    assert main(["eval", run.run.dir, "--world", "2", *flags]) == 0
    out, err = capfd.readouterr()
    rows = [row for row in read_metrics(Path(run.run.dir) / "metrics.jsonl") if "eval_loss" in row]
    answer, trained = json.loads(out), [row for row in rows if "eval_name" not in row][-1]
    assert answer["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
    assert err.count(f"at cp {answer['cp']}") == 1 and "5 documents; cp " in err


def test_an_earlier_checkpoint_has_another_loss_in_words(run: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", f"{run.run.dir}/checkpoints/step-000001"]) == 0  # on as many processes as the run had
    out, err = capfd.readouterr()
    title, names, values = out.splitlines()[:3]
    assert title == f"{run.run.dir}/checkpoints/step-000001, step 1 on 2 ranks"
    assert "bits per byte" in names and values.startswith("held out  p2p    2  5.03")
    assert err.splitlines() == [f"step-000001, cp 2: {done} of 2 micro-batches" for done in (1, 2)]


def test_a_damaged_checkpoint_is_named(run: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(run.run.dir) / "checkpoints" / "step-000001"
    (file := max(path.glob("*.safetensors"))).unlink()
    assert main(["eval", str(path), "--world", "2"]) == 2
    assert capfd.readouterr().err == f"error: checkpoint {path}: {file.name} is missing\n"


def test_a_degree_that_does_not_fit_is_refused_before_ranks_start(
    run: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", run.run.dir, "--world", "4", "--context.eval_context_parallel_size", "3"]) == 2
    assert "context.eval_context_parallel_size 3 does not divide 4 slots" in capfd.readouterr().err


def test_a_perplexity_that_nobody_can_read_is_not_written_out() -> None:
    names, row = next(result_tables([result(np.full(5, 50.0))], 1)).splitlines()[1:3]
    assert names.startswith("set       type  cp          loss  perplexity")
    assert row.startswith("held out  -      1  50.000000000   over 1e21")


def test_a_bucket_without_targets_has_no_loss() -> None:
    buckets = [Bucket(0, 127, Mean(8.0, 4), 2), Bucket(128, 255, Mean(0.0, 0), 1), Bucket(256, 511, Mean(9.0, 3), 1)]
    (table,) = _bucket_tables("chats", [], buckets)
    assert [line.split()[:4] for line in table.splitlines()[2:]] == [
        ["0", "to", "127", "2.000000"],
        ["256", "to", "511", "3.000000"],
    ]


def test_a_folder_that_is_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "is neither the folder of a run (it has no config.toml) nor a Hugging Face folder" in capfd.readouterr().err
