"""Every verb over saved weights, for every sort of base model of a run with an adapter, beside stock transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.cli.main import main
from longspan.config.local_folders import with_local_folders
from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import Corpus
from longspan.data.run_order import make_step_order
from longspan.evaluation import saved_losses
from longspan.layout import Layout
from longspan.model import load_model
from longspan.model.weights.hf_folder import read_configuration
from longspan.resolve.run_cost import find_run_cost
from tests.evaluation.saved.evaluating import evaluate_here
from tests.model.frozen.formats.folders import quantise_float8, read_float8
from tests.model.frozen.test_reading import dequantised
from tests.run.runs.homes import ALONE, train_rows
from tests.run.runs.test_lora_run import write_base
from tests.train.small import small_config

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
KEYS: dict[str, Any] = {"lora__rank": 4, "train__steps": 1, "evaluation__every": 0, "optimizer__lr": 0.05}
KEYS |= {"model__dtype": "float64", "train__tokens_per_step": 512, "evaluation__documents": 2, **ALONE}
Weights = dict[str, Tensor]


class Base(NamedTuple):
    """Keys of a run over a folder, how the folder is quantised, and the values that the adapter stands on."""

    keys: dict[str, Any]
    quantise: Callable[[Path], None] | None
    values: Callable[[Path], Weights] | None
    frozen: str = ""


def to_float8(folder: Path) -> None:
    quantise_float8(folder, weight_block_size=(64, 64), modules_to_not_convert=["lm_head"])


BASES = {
    "whole": Base({}, None, lambda folder: dict(load_model(folder, dtype="float64").state_dict())),
    "nf4": Base({"model__frozen": "nf4"}, None, lambda folder: dequantised(folder, torch.float64), "nf4"),
    "float8": Base({}, to_float8, lambda folder: read_float8(folder, torch.float64), "float8"),
    "preset": Base({}, None, None),
}


def run_over(base: Base, folder: Path) -> RunConfig:
    keys = KEYS | base.keys
    if base.values is not None:
        keys["model__path"] = str(write_base(folder / "base", **WIDE))
        if base.quantise is not None:
            base.quantise(folder / "base")
    config = with_local_folders(small_config(folder, **keys))
    train_rows(config, 1)
    return config


def stock_base(config: RunConfig, base: Base) -> Any:
    """The base model that stock transformers makes of a run's configuration and of the values that a format has."""
    folder = Path(config.run.dir)
    if base.values is None:
        return load_model(config=folder, dtype="float64", seed=config.train.seed)
    model = load_model(config=folder, dtype="float64")
    model.load_state_dict(base.values(Path(config.model.path)))
    return model


def cross_entropy(model: Any, config: RunConfig) -> float:
    """The cross entropy of a stock model over the documents that a run holds out."""
    corpus = Corpus(Path(config.run.dir) / "corpus")
    losses = list[Tensor]()
    for document in make_step_order(config, corpus).evaluation:
        ids = torch.from_numpy(corpus[document][np.arange(len(corpus[document]))]).long()
        with torch.no_grad():
            losses.append(F.cross_entropy(model.eval()(ids[None]).logits[0, :-1], ids[1:], reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize(
    "name", [name if name == "float8" else pytest.param(name, marks=pytest.mark.whole) for name in BASES]
)
def test_every_verb_over_every_base(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BASES[name]
    config = run_over(base, tmp_path)
    run = config.run.dir
    model = stock_base(config, base)
    wanted = cross_entropy(model, config)
    (own, without), lines = evaluate_here(run, "--compare", "base")
    assert without.sets[0].evaluation.loss == pytest.approx(wanted, rel=1e-12)
    assert without.sets[0].evaluation.step == 0
    line = f"{run} without adapter: the base model over the values that the adapter stands on, {base.frozen}: "
    assert (line in "\n".join(lines)) == bool(base.frozen)
    adapted = peft.PeftModel.from_pretrained(model, f"{run}/model", torch_device="cpu")
    wanted = cross_entropy(adapted, config)
    assert own.sets[0].evaluation.loss == pytest.approx(wanted, rel=1e-12)
    (again, other), lines = evaluate_here(run, "--compare", config.model.path or run, "--model.dtype", "float64")
    assert again.sets[0].evaluation.loss == own.sets[0].evaluation.loss
    if base.values is not None:  # the folder's own weights, which are not packed again
        whole = dict(load_model(config.model.path, dtype="float64", quantized=True).state_dict())
        wanted = cross_entropy(stock_base(config, base._replace(values=lambda _: whole)), config)
    assert other.sets[0].evaluation.loss == pytest.approx(wanted, rel=1e-12)
    assert ("holds its weights in fp8: they are dequantised to float64" in "\n".join(lines)) == (name == "float8")
    capfd.readouterr()
    assert main(["export", run, str(tmp_path / "adapter")]) == 0
    assert capfd.readouterr().out.endswith(f"next: longspan eval {run} --data ROWS\n")
    assert main(["export", run, str(tmp_path / "merged"), "--merge"]) == 0
    assert capfd.readouterr().out.endswith(f"next: longspan eval {tmp_path / 'merged'} --data TEXTS\n")
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(key, value)  # as torchrun does: the rank is this process
    completions = list[str]()
    for target in (run, str(tmp_path / "merged"), *([config.model.path] if base.values else [])):
        words = ["--prompt", "def", "--max_new_tokens", "3", "--device", "cpu", "--dtype", "float64", "--json"]
        assert main(["generate", target, *words]) == 0
        completions.append(json.loads(capfd.readouterr().out)[0]["completion"])
    assert all(completions) and (completions[0] == completions[1] or name == "nf4")  # merged weights are no codes


def test_evaluations_over_a_stored_folder_are_priced_by_its_packed_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's own configuration does not say that its folder is in 8 bits."""
    base = write_base(tmp_path / "base", **WIDE)
    config = with_local_folders(small_config(tmp_path, **KEYS, model__path=str(base)))
    monkeypatch.setattr(saved_losses, "set_world_machine", lambda *args: None)
    monkeypatch.setattr(saved_losses, "run_on_every_rank", lambda world, price, kind: price())
    world: Any = SimpleNamespace(home=Layout(2), device=torch.device("cpu"))
    model: Any = SimpleNamespace(config=read_configuration(base))

    def gather_seconds() -> float:
        cost = saved_losses.price_plans(config, model, world, log=lambda line: None)
        assert cost == find_run_cost(config, str(base), print, gpu=False, slots=2)
        return cost.forward_only().micro_batch_seconds

    whole = gather_seconds()
    to_float8(base)
    assert 0 < gather_seconds() < whole
