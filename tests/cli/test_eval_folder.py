"""`longspan eval` of a Hugging Face folder on texts: every document's loss is that of stock transformers in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longspan.cli.main import main
from longspan.corpus.tokenizer import train_tokenizer
from longspan.model import load_model
from tests.train.small import write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ and texts/."""
    root = tmp_path_factory.mktemp("eval_folder")
    texts = [file.read_text() for file in sorted(write_texts(root / "texts").iterdir())]
    load_model(preset="qwen3-tiny", vocab_size=300, seed=3).save_pretrained(root / "model")
    train_tokenizer(texts, 300).save_pretrained(root / "model")
    return root


def reference_losses(model_folder: Path, texts: Path) -> list[tuple[float, int]]:
    """The summed loss and targets of each text, one at a time, by stock transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    losses = list[tuple[float, int]]()
    for file in sorted(texts.iterdir()):
        ids = torch.tensor([[*tokenizer(file.read_text()).input_ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        losses.append((float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")), ids.shape[1] - 1))
    return losses


def test_every_document_has_the_loss_of_stock_transformers(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted((file, file.stat().st_mtime_ns) for file in folder.rglob("*"))
    words = ["eval", str(folder / "model"), "--data", f"words={folder / 'texts'}", "--json", "--world", "2"]
    words += ["--documents", str(tmp_path / "losses.jsonl"), "--model.dtype", "float64"]
    assert main([*words, "--context.eval_context_parallel_size", "2", "--context.eval_cp_comm_type", "a2a"]) == 0
    record: dict[str, Any] = json.loads(capfd.readouterr().out)
    expected = reference_losses(folder / "model", folder / "texts")
    rows = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx([loss / targets for loss, targets in expected], rel=1e-12)
    assert [row["name"] for row in rows] == [file.name for file in sorted((folder / "texts").iterdir())]
    total, targets = (sum(values) for values in zip(*expected, strict=True))
    assert (record["eval_loss"], record["eval_targets"]) == (pytest.approx(total / targets, rel=1e-12), targets)
    assert (record["cp"], record["evaluations"][0]["cp_comm_type"], record["kind"]) == (2, ["a2a"], "folder")
    assert sorted((file, file.stat().st_mtime_ns) for file in folder.rglob("*")) == before


REFUSED = [
    (["--data", "x", "--set", "y"], "--data and --set are given"),
    (["--degrees", "1,x"], "--degrees is '1,x'"),
    (["--degrees", "1,2", "--compare", "{model}"], "--degrees and --compare are given"),
    (["--compare", "nowhere"], "there is no run nowhere"),
    (["--set", "y"], "--set is 'y', and the run's evaluation sets [[eval]] are: none"),
    (["--data", "a=x", "--data", "a=y"], "--data x and y are both named 'a'"),
    (
        ["--context.cp_comm_type", "a2a"],
        "--context.cp_comm_type is a key of training; evaluation reads --context.eval_",
    ),
    (["--context.mode", "free"], "--context.mode is a key of training, and evaluation does not read it"),
    (["--parallel.tp", "3", "--world", "2"], "2 ranks are not divisible by tp 3 x pp 1 = 3"),
    (["--context.eval_context_parallel_size", "2"], "context.eval_context_parallel_size 2 does not divide 1 slot"),
    (["--documents", "{model}"], "--documents {model} is a folder; give a file in it"),
    (["--out", "{model}/config.json"], "--out {model}/config.json is a file; give a folder"),
    (["--max-document-tokens", "1"], "--max-document-tokens is 1; a document of one token predicts nothing"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_cannot_be_is_refused_before_ranks_start(
    folder: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    model = str(folder / "model")
    assert main(["eval", model, *(word.replace("{model}", model) for word in words)]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith(f"error: {message.replace('{model}', model)}") and len(err.splitlines()) == 1
