"""examples/hybrid.toml with smaller numbers: under dynamic plans of four slots its losses are those of one rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longspan.cli.export import main as export_main
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.model import add_mtp, load_model
from longspan.plan import Plan
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from tests.train.small import train_rank, write_texts

EXAMPLE = Path(__file__).parents[3] / "examples" / "hybrid.toml"
SMALLER = {
    "model.dtype": "float64",
    "data.vocab_size": 300,
    "data.max_document_tokens": 120,
    "data.eval_documents": 2,
    "context.max_tokens_per_slot": 100,
    "context.eval_max_tokens_per_slot": 60,
    "train.steps": 3,
    "train.tokens_per_step": 400,
    "train.warmup_steps": 1,
}
COMPARED = ("loss", "mtp_loss_1", "router_balance_loss", "grad_norm", "eval_loss")
# Routers and norms round to float32 whatever the model's type is, differently with the number of rows.
BOUND = 1e-7


def _losses(config: RunConfig, ranks: int) -> dict[str, list[float]]:
    run_ranks(train_rank, ranks, config, ranks, timeout=120)
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    return {name: [row[name] for row in rows if name in row] for name in COMPARED}


@pytest.mark.whole  # test_memory_runs.py runs a hybrid
@pytest.mark.filterwarnings("ignore:.*are no part of the.*itself")  # the depths, which are added then
def test_the_losses_of_the_example_are_those_of_one_rank(tmp_path: Path) -> None:
    paths = {"data.path": str(write_texts(tmp_path / "texts")), "run.dir": str(tmp_path / "four")}
    four = load_config(EXAMPLE, SMALLER | paths)
    assert (four.context.planner, four.mtp.depths, four.model.preset) == ("dynamic", 1, "qwen3-next-tiny")
    whole: dict[str, Any] = {"planner": "fixed", "context_parallel_size": 1, "max_tokens_per_slot": 0}
    alone = replace(four.context, **whole).set_evaluation(context_parallel_size=1, max_tokens_per_slot=0)
    wanted = _losses(replace(four, context=alone, run=replace(four.run, dir=str(tmp_path / "one"))), 1)
    found = _losses(four, 4)
    plans = [Plan.from_json(file.read_text()) for file in (tmp_path / "four" / "plans").glob("step-*.json")]
    degrees = {group.degree for plan in plans for batch in plan.micro_batches for group in batch.groups}
    assert len(degrees) > 1 and max(degrees) > 1, degrees
    for name in COMPARED:
        pairs = zip(found[name], wanted[name], strict=name != "eval_loss")  # one rank has no further degrees
        errors = [abs(a / b - 1) for a, b in pairs]
        assert len(errors) == (1 if name == "eval_loss" else 3) and max(errors) <= BOUND, (name, errors)
    _exported(tmp_path / "four", tmp_path / "out")


def _exported(run: Path, out: Path) -> None:
    """An export has the depth under Qwen3-Next's published names, and it is read from there."""
    assert export_main([str(run), str(out)]) == 0
    files, saved = load_file(out / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    assert torch.equal(files["mtp.fc.weight"], saved["mtp.layers.0.eh_proj.weight"])
    assert {"mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= files.keys()
    assert not any("mtp_block" in name for name in files) and len(files) == len(saved)
    model = load_model(out, dtype="float64", sharded=False)
    assert model.config.num_nextn_predict_layers == 1
    read, again = (add_mtp(load_model(x, dtype="float64", sharded=False), 1, weights=x) for x in (out, run / "model"))
    assert all(torch.equal(x, again.get_parameter(name)) for name, x in read.named_parameters())
