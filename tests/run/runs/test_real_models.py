"""Runs of models of every kind: drawn from a configuration, mixtures of experts, hybrids, resumed unread, refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from longspan.cli.export import main as export_main
from longspan.cli.main import main
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import train_tokenizer
from longspan.errors import ConfigError, DataError, LongspanError, ModelError
from longspan.model import add_mtp, load_model
from longspan.model.weights.fill import RandomWeights
from longspan.model.weights.folder import FolderWeights
from longspan.plan import Plan
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from tests.model.deep import deep_config
from tests.run.runs.homes import ALONE, gone_on_from_the_first_checkpoint, refusals, train_rows
from tests.train.small import small_config, train_rank, without_times, write_texts

LONG = {"data__max_document_tokens": 0, "context__max_tokens_per_slot": 0, "context__eval_max_tokens_per_slot": 0}


def _architecture(folder: Path, **more: object) -> Path:
    """A folder with a configuration and nothing else: experts that two ranks share, 32 positions, 300 rows."""
    config = deep_config("qwen3-moe", layers=4, vocabulary=300)
    config.update({"max_position_embeddings": 32, "dtype": "bfloat16", **more})
    config.save_pretrained(folder)
    return folder


def test_a_configuration_is_drawn_scaled_trained_and_saved(tmp_path: Path) -> None:
    model = {"model__config": str(_architecture(tmp_path / "model")), "model__rope_scaling": "yarn"}
    keys = {**model, **LONG, "train__steps": 2, "train__eval_every": 0, "data__eval_documents": 0}
    alone = small_config(tmp_path / "alone", **keys, **ALONE)
    wanted = [row["loss"] for row in train_rows(alone, 1)]
    home = small_config(tmp_path / "home", **keys, parallel__pp=2, parallel__ep=2)
    assert [row["loss"] for row in train_rows(home, 4)] == pytest.approx(wanted, rel=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(Path(alone.run.dir) / "model", dtype="auto")
    assert saved.config.rope_parameters["rope_type"] == "yarn" and saved.config.rope_parameters["factor"] > 1
    assert saved.config.rope_parameters["original_max_position_embeddings"] == 32


def _folder(path: Path, rows: int = 300) -> Path:
    model = AutoModelForCausalLM.from_config(deep_config("qwen3", layers=4, vocabulary=rows), dtype="bfloat16")
    model.save_pretrained(path)
    return path


def test_models_and_data_that_do_not_fit_are_refused_before_texts_are_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare, small, more = (
        _folder(tmp_path / name, rows) for name, rows in (("bare", 300), ("small", 250), ("more", 300))
    )
    train_tokenizer(["some text"], 280).save_pretrained(small)
    weights = load_file(more / "model.safetensors")
    save_file(weights | {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, more / "model.safetensors")
    positions = (
        r"longest document has 64 tokens \(file\d\d.py\), and the model knows 32 positions .*max_document_tokens = 32"
    )
    target = r"'q_prj', which is no linear of Qwen3ForCausalLM; did you mean 'q_proj'"
    cases: list[tuple[dict[str, Any], type[LongspanError], str]] = [
        (
            {"model__path": str(bare)},
            DataError,
            r"has no tokenizer.json, and its weights know .* name .* with data.tokenizer",
        ),
        ({"model__path": str(small)}, DataError, r"tokenizer .*/small has ids up to 26\d, .* has 250 rows"),
        ({"model__path": str(more)}, ModelError, r"hold 1 tensor that a Qwen3ForCausalLM .* take: .*weight_scale"),
        ({"lora__rank": 4, "lora__targets": ["q_prj"]}, ModelError, target),
        ({"model__config": str(_architecture(tmp_path / "model"))}, ConfigError, positions),
    ]
    configs = [small_config(tmp_path / str(number), **keys) for number, (keys, *_) in enumerate(cases)]
    for error, config, (_, kind, message) in zip(refusals(configs), configs, cases, strict=True):
        assert type(error) is kind and re.search(message, str(error)), (message, error)
        assert not (Path(config.run.dir) / "corpus").exists() or kind is ConfigError
        assert not (Path(config.run.dir) / "metrics.jsonl").exists()
    assert main(["eval", str(more), "--data", f"words={tmp_path}", "--world", "1", "--device", "cpu"]) == 2
    assert "does not take: model.layers.0.mlp.up_proj.weight_scale" in capfd.readouterr().err


def _without_reading(rank: int, config: RunConfig, ranks: int) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read or drawn, and a checkpoint has them")

    FolderWeights.read = RandomWeights.read = refuse  # pyright: ignore[reportAttributeAccessIssue]
    train_rank(rank, config, ranks)


@pytest.mark.whole
def test_a_resumed_run_reads_no_weights_but_its_checkpoint(tmp_path: Path) -> None:
    """Weights are NaN until the checkpoint is loaded, so one that it lacked would end the run."""
    source = _architecture(tmp_path / "model", max_position_embeddings=64)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(source)
    train_tokenizer(["some text"], 300).save_pretrained(source)
    straight = small_config(tmp_path, model__path=str(source), train__save_every=2, train__steps=4)
    rows = [without_times(row) for row in train_rows(straight, 2)]
    again = gone_on_from_the_first_checkpoint(straight, tmp_path / "again")
    for file in source.glob("*.safetensors"):
        file.unlink()
    run_ranks(_without_reading, 2, again, 2, timeout=90)
    assert [without_times(row) for row in train_rows(again)] == rows
    old, new = (
        load_file(folder / "model" / "model.safetensors") for folder in (Path(straight.run.dir), tmp_path / "again")
    )
    assert old.keys() == new.keys() and all(old[name].equal(new[name]) for name in old)


PRESETS = {
    "qwen3-moe-tiny": {"context__planner": "dynamic"},
    "gpt-oss-tiny": {"train__router_balance_loss": 0.01, "train__router_z_loss": 0.001},
}
COMPARED = ("loss", "router_balance_loss", "router_z_loss")


# qwen3-moe goes through other degrees in test_checkpoint_homes.py.
@pytest.mark.whole
@pytest.mark.parametrize("preset", ["qwen3-moe-tiny", "gpt-oss-tiny"])
def test_experts_dealt_out_train_as_experts_on_every_rank(preset: str, tmp_path: Path) -> None:
    curves: list[list[float]] = []
    for ep in (1, 2):
        settings = {"model__preset": preset, "parallel__ep": ep, "train__steps": 2, **PRESETS[preset]}
        config = small_config(tmp_path / f"ep{ep}", **settings)
        rows = train_rows(config, 2)
        facts = json.loads((Path(config.run.dir) / "run.json").read_text())
        weights = load_file(Path(config.run.dir) / "model" / "model.safetensors")
        assert facts["parameters"] == sum(tensor.numel() for tensor in weights.values())
        assert (facts["experts"], facts["experts_of_token"]) == (8, 2) and facts["home"]["ep"] == config.parallel.ep
        if ep == 2:  # the checkpoint is of whole tensors
            more = replace(config, parallel=replace(config.parallel, ep=1), train=replace(config.train, steps=3))
            assert run_ranks(train_rank, 2, more, 2, timeout=110)[0].done == 3
        curves.append([row[name] for row in rows for name in COMPARED])
    assert len(curves[0]) == 6 and curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[0][1] > 1 and curves[0][2] > 0


HYBRID = Path(__file__).parents[3] / "examples" / "hybrid.toml"
SMALLER_HYBRID = {
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
COLUMNS = ("loss", "mtp_loss_1", "router_balance_loss", "grad_norm", "eval_loss")
# Routers and norms round to float32 whatever the model's type is, differently with the number of rows.
HYBRID_BOUND = 1e-7


def _losses(config: RunConfig, ranks: int) -> dict[str, list[float]]:
    run_ranks(train_rank, ranks, config, ranks, timeout=120)
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    return {name: [row[name] for row in rows if name in row] for name in COLUMNS}


@pytest.mark.whole  # test_memory_runs.py runs a hybrid
@pytest.mark.filterwarnings("ignore:.*are no part of the.*itself")  # the depths, which are added then
def test_the_losses_of_the_example_are_those_of_one_rank(tmp_path: Path) -> None:
    paths = {"data.path": str(write_texts(tmp_path / "texts")), "run.dir": str(tmp_path / "four")}
    four = load_config(HYBRID, SMALLER_HYBRID | paths)
    assert (four.context.planner, four.mtp.depths, four.model.preset) == ("dynamic", 1, "qwen3-next-tiny")
    whole: dict[str, Any] = {"planner": "fixed", "context_parallel_size": 1, "max_tokens_per_slot": 0}
    alone = replace(four.context, **whole).set_evaluation(context_parallel_size=1, max_tokens_per_slot=0)
    wanted = _losses(replace(four, context=alone, run=replace(four.run, dir=str(tmp_path / "one"))), 1)
    found = _losses(four, 4)
    plans = [Plan.from_json(file.read_text()) for file in (tmp_path / "four" / "plans").glob("step-*.json")]
    degrees = {group.degree for plan in plans for batch in plan.micro_batches for group in batch.groups}
    assert len(degrees) > 1 and max(degrees) > 1, degrees
    for name in COLUMNS:
        pairs = zip(found[name], wanted[name], strict=name != "eval_loss")  # one rank has no further degrees
        errors = [abs(a / b - 1) for a, b in pairs]
        assert len(errors) == (1 if name == "eval_loss" else 3) and max(errors) <= HYBRID_BOUND, (name, errors)
    run, out = tmp_path / "four", tmp_path / "out"  # under Qwen3-Next's published names, from which it is read
    assert export_main([str(run), str(out)]) == 0
    files, saved = load_file(out / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    assert torch.equal(files["mtp.fc.weight"], saved["mtp.layers.0.eh_proj.weight"])
    assert {"mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= files.keys()
    assert not any("mtp_block" in name for name in files) and len(files) == len(saved)
    model = load_model(out, dtype="float64", sharded=False)
    assert model.config.num_nextn_predict_layers == 1
    read, again = (add_mtp(load_model(x, dtype="float64", sharded=False), 1, weights=x) for x in (out, run / "model"))
    assert all(torch.equal(x, again.get_parameter(name)) for name, x in read.named_parameters())
