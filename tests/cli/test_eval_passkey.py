"""`longspan eval --passkey.*`: the grid of a Hugging Face folder, its files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspan.cli.main import main
from longspan.corpus.tokenizer import load_tokenizer, train_tokenizer
from longspan.evaluation.passkey import passkey_documents, passkey_text
from longspan.model import load_model

LENGTHS, DEPTHS = (130, 170), (0.0, 1.0)
WORDS = ["--passkey.lengths", "130", "170", "--passkey.depths", "0", "1", "--passkey.samples", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder that knows 200 positions."""
    root = tmp_path_factory.mktemp("eval_passkey")
    train_tokenizer([passkey_text(10_000 + 977 * i, i % 4, i % 3) for i in range(60)], 400).save_pretrained(root)
    load_model(preset="qwen3-tiny", vocab_size=400, seed=3).save_pretrained(root)
    values = json.loads((root / "config.json").read_text()) | {"max_position_embeddings": 200}
    (root / "config.json").write_text(json.dumps(values))
    return root


def test_keys_are_retrieved_as_the_stock_model_says(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plot, out = tmp_path / "plots" / "passkey.svg", tmp_path / "out"
    words = ["eval", str(folder), *WORDS, "--world", "2", "--degrees", "1,2", "--model.dtype", "float64"]
    assert main([*words, "--plot", str(plot), "--out", str(out)]) == 0
    said = capfd.readouterr().out
    assert "passkey at cp 2, keys retrieved: 0 of 8" in said
    record: dict[str, Any] = json.loads((out / "results.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    documents = passkey_documents(load_tokenizer(folder), LENGTHS, DEPTHS, samples=2)
    losses = []
    for document in documents:
        ids, first = torch.from_numpy(document.all_ids()), document.answer_start
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, first - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[first:], reduction="none"))
    cells = [torch.cat(losses[i : i + 2]).mean().item() for i in range(0, 8, 2)]
    for evaluation, degree in zip(record["evaluations"], (1, 2), strict=True):
        grid = evaluation["passkey"]
        assert (grid["lengths"], grid["depths"], grid["samples"], grid["cp"]) == ([130, 170], [0.0, 1.0], 2, degree)
        assert [loss for row in grid["losses"] for loss in row] == pytest.approx(cells, rel=1e-12)
        assert (grid["retrieved"], evaluation["eval_passkey_retrieved"]) == ([[0, 0], [0, 0]], 0.0)
        assert evaluation["eval_name"] == "passkey"
    assert plot.read_text() == (out / "passkey.svg").read_text()
    assert plot.read_text().count("Passkey retrieval: 0 of 8 keys retrieved</text>") == 2
    rows = [json.loads(line) for line in (out / "documents.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows[:8]] == [document.name for document in documents]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--passkey.lengths", "300"], "300 tokens (passkey"),
        (
            ["--passkey.lengths", "300"],
            "knows 200 positions; lengthen it with --model.rope_scaling yarn (a factor of 1.5)",
        ),
        (["--passkey.lengths", "40"], "a passkey document of 40 tokens has no room"),
        (["--passkey.lengths", "150", "--passkey.depths", "2"], "from 0 (its beginning) to 1 (its end), not [2.0]"),
        (["--passkey.samples", "3"], "needs lengths of documents in tokens"),
        (["--plot", "x.svg"], "needs lengths of documents in tokens"),
        (["--passkey.lengths", "150", "--data", "passkey=texts"], "both make a set 'passkey'"),
    ],
)
def test_what_makes_no_documents_is_refused(
    folder: Path, words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(folder), *words]) == 2
    assert said in capfd.readouterr().err
