"""`longspan eval`: the loss of a run or folder does not depend on the degree, and is that of stock transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longspan.checkpoint.files import PARTIAL
from longspan.cli.eval import _bucket_tables, result_tables
from longspan.cli.main import main
from longspan.config.sections import RunConfig
from longspan.evaluation.metrics import Bucket, Mean
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from tests.evaluation.saved.test_comparison import result
from tests.train.small import small_config, train_rank, write_model, write_texts


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
    assert err.count("its save was interrupted") == (not checkpoint), "one rank says it, where checkpoints are sought"
    trained = [row for row in read_metrics(Path(run.run.dir) / "metrics.jsonl") if "eval_name" not in row][-1]
    assert (found["step"], found["cp"], found["world"]) == (2, int(degree), world)
    assert found["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
    assert found["eval_tokens"] == trained["eval_tokens"]
    assert sorted(Path(run.run.dir).rglob("*")) == before


def test_a_set_of_the_run_and_a_comparison(run: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_a_damaged_checkpoint_and_what_is_no_run_are_named(
    run: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = Path(run.run.dir) / "checkpoints" / "step-000001"
    (file := max(path.glob("*.safetensors"))).unlink()
    assert main(["eval", str(path), "--world", "2"]) == 2
    assert capfd.readouterr().err == f"error: checkpoint {path}: {file.name} is missing\n"
    assert main(["eval", str(tmp_path)]) == 2
    assert "is neither the folder of a run (it has no config.toml) nor a Hugging Face folder" in capfd.readouterr().err


def test_tables_leave_out_what_nobody_can_read() -> None:
    names, row = next(result_tables([result(np.full(5, 50.0))], 1)).splitlines()[1:3]
    assert names.startswith("set       type  cp          loss  perplexity")
    assert row.startswith("held out  -      1  50.000000000   over 1e21")
    buckets = [Bucket(0, 127, Mean(8.0, 4), 2), Bucket(128, 255, Mean(0.0, 0), 1), Bucket(256, 511, Mean(9.0, 3), 1)]
    (table,) = _bucket_tables("chats", [], buckets)  # one of them has no targets
    rows = [line.split()[:4] for line in table.splitlines()[2:]]
    assert rows == [["0", "to", "127", "2.000000"], ["256", "to", "511", "3.000000"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eval_folder")
    write_model(root)
    return root


def test_every_document_has_the_loss_of_stock_transformers(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted((file, file.stat().st_mtime_ns) for file in folder.rglob("*"))
    words = ["eval", str(folder / "model"), "--data", f"words={folder / 'texts'}", "--json", "--world", "2"]
    words += ["--documents", str(tmp_path / "losses.jsonl"), "--model.dtype", "float64"]
    assert main([*words, "--context.eval_context_parallel_size", "2", "--context.eval_cp_comm_type", "a2a"]) == 0
    record: dict[str, Any] = json.loads(capfd.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="sdpa")
    tokenizer, expected = AutoTokenizer.from_pretrained(folder / "model"), list[tuple[float, int]]()
    for file in sorted((folder / "texts").iterdir()):
        ids = torch.tensor([[*tokenizer(file.read_text()).input_ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        expected.append((float(loss), ids.shape[1] - 1))
    rows = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx([loss / targets for loss, targets in expected], rel=1e-12)
    assert [row["name"] for row in rows] == [file.name for file in sorted((folder / "texts").iterdir())]
    total, targets = (sum(values) for values in zip(*expected, strict=True))
    assert (record["eval_loss"], record["eval_targets"]) == (pytest.approx(total / targets, rel=1e-12), targets)
    assert (record["cp"], record["evaluations"][0]["cp_comm_type"], record["kind"]) == (2, ["a2a"], "folder")
    assert sorted((file, file.stat().st_mtime_ns) for file in folder.rglob("*")) == before


REFUSED = [
    ("--data x --set y", "--data and --set are given"),
    ("--degrees 1,x", "--degrees is '1,x'"),
    ("--degrees 1,2 --compare MODEL", "--degrees and --compare are given"),
    ("--compare nowhere", "there is no run nowhere"),
    ("--set y", "--set is 'y', and the run's evaluation sets [[eval]] are: none"),
    ("--data a=x --data a=y", "--data x and y are both named 'a'"),
    ("--context.cp_comm_type a2a", "--context.cp_comm_type is a key of training; evaluation reads --context.eval_"),
    ("--context.mode free", "--context.mode is a key of training, and evaluation does not read it"),
    ("--parallel.tp 3 --world 2", "2 ranks are not divisible by tp 3 x pp 1 = 3"),
    ("--context.eval_context_parallel_size 2", "context.eval_context_parallel_size 2 does not divide 1 slot"),
    ("--documents MODEL", "--documents MODEL is a folder; give a file in it"),
    ("--out MODEL/config.json", "--out MODEL/config.json is a file; give a folder"),
    ("--max-document-tokens 1", "--max-document-tokens is 1; a document of one token predicts nothing"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_cannot_be_is_refused_before_ranks_start(
    folder: Path, capfd: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    model = str(folder / "model")
    assert main(["eval", model, *words.replace("MODEL", model).split()]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith(f"error: {message.replace('MODEL', model)}") and len(err.splitlines()) == 1
