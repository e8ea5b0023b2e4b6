"""One run through homes that differ in everything at once: tp, pp, vpp, ep, slots, ranks, copies, planner and degree.

Each leg goes on from the checkpoint of the one before. Weights, moments of AdamW and losses equal those of a run on one
rank that never stopped, and every step trains on the same documents.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from longspan.checkpoint import checkpoint as checkpoint_module
from longspan.checkpoint.files import checkpoint_path
from longspan.checkpoint.storage import SafetensorsReader, read_metadata
from longspan.config.sections import ParallelConfig, RunConfig
from longspan.corpus.tokenizer import train_tokenizer
from longspan.run.metrics import read_metrics
from longspan.testing import backend, run_ranks
from longspan.train import training as run_module
from tests.model.stock import SIZES, worst
from tests.run.runs.homes import farthest
from tests.train.small import small_config, train_rank

# a checkpoint is read here without ranks
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SETTINGS = {
    "model__dtype": "float64",
    "evaluation__documents": 0,
    "context__context_parallel_size": 1,
    "optimizer__warmup_steps": 0,  # with the ratio below the rate is the same, whatever the steps of a leg
    "optimizer__min_lr_ratio": 1.0,
    "evaluation__every": 0,
    "optimizer__weight_decay": 0.1,
}
LAYERS: dict[str, Any] = SIZES | {"num_hidden_layers": 4, "vocab_size": 300}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**LAYERS, tie_word_embeddings=True),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **LAYERS, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[1]
    ),
}
Change = Callable[[dict[str, Any]], None]
BOUND = 1e-12 if backend() == "gloo" else 1e-5


@dataclass(frozen=True)
class Leg:
    """Ranks and home of a part of the run, its plans, and the step that it ends with."""

    until: int
    ranks: int
    parallel: ParallelConfig
    plans: dict[str, Any]


ALL_AT_ONCE = ParallelConfig(tp=2, pp=2, ep=2, sequence_parallel=True)
CHAINS = {
    "qwen3": (
        Leg(1, 4, ParallelConfig(tp=2, sequence_parallel=True), {"context_parallel_size": 2}),
        Leg(2, 2, ParallelConfig(pp=2, vpp=2, pipeline_schedule="zero_bubble"), {"planner": "padded"}),
    ),
    "qwen3-moe": (
        Leg(1, 8, ALL_AT_ONCE, {"planner": "dynamic"}),
        Leg(2, 3, ParallelConfig(), {"context_parallel_size": 3, "cp_comm_type": "all_gather"}),
        Leg(3, 4, ParallelConfig(pp=2, vpp=2, ep=2), {"planner": "padded", "context_parallel_size": 2}),
        Leg(4, 4, ParallelConfig(ep=2, dp_replicate=2), {"planner": "dynamic", "max_tokens_per_slot": 32}),
    ),
}


def _documents(config: RunConfig, ranks: int, change: Change | None = None) -> list[tuple[int, ...]]:
    seen = run_ranks(_train, ranks, config, ranks, change, timeout=240)
    assert all(each == seen[0] for each in seen)
    return seen[0]


def _train(rank: int, config: RunConfig, ranks: int, change: Change | None = None) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    step, set_state = run_module.run_step, checkpoint_module.set_optimizer_state_dict

    def noted(model: Any, plan: Any, documents: Any, *others: Any, **named: Any) -> Any:
        seen.append(documents.ids)
        return step(model, plan, documents, *others, **named)

    def changed(*others: Any, optim_state_dict: dict[str, Any], **named: Any) -> Any:
        if change is not None:
            change(optim_state_dict)
        return set_state(*others, optim_state_dict=optim_state_dict, **named)

    run_module.run_step, checkpoint_module.set_optimizer_state_dict = noted, changed  # type: ignore[assignment]
    try:
        train_rank(rank, config, ranks)
    finally:
        run_module.run_step, checkpoint_module.set_optimizer_state_dict = step, set_state
    return seen


def _checkpoint(config: RunConfig, step: int) -> dict[str, Tensor]:
    metadata = read_metadata(path := checkpoint_path(Path(config.run.dir) / "checkpoints", step))
    entries: Any = metadata.state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(tensors, storage_reader=SafetensorsReader(path, metadata), no_dist=True)
    return tensors


@pytest.fixture(scope="module")
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[request.param]()).save_pretrained(folder / "model")
    train_tokenizer(["some text"], 300).save_pretrained(folder / "model")
    chain = CHAINS[request.param]
    changes = {"model__path": str(folder / "model"), "train__steps": chain[-1].until, "checkpoint__every": 1}
    config = small_config(folder, **SETTINGS, **changes)
    return chain, config, _documents(config, 1)


def _of_leg(config: RunConfig, leg: Leg, folder: Path) -> RunConfig:
    return replace(
        config,
        parallel=leg.parallel,
        context=replace(config.context, **leg.plans),
        train=replace(config.train, steps=leg.until),
        checkpoint=replace(config.checkpoint, every=0),
        run=replace(config.run, dir=str(folder)),
    )


@pytest.mark.parametrize("straight", ["qwen3", pytest.param("qwen3-moe", marks=pytest.mark.whole)], indirect=True)
def test_a_run_goes_through_homes_that_differ_in_everything(straight: Any, tmp_path: Path) -> None:
    chain, config, documents = straight
    seen, mine = list[tuple[int, ...]](), config
    for leg in chain:
        mine = _of_leg(config, leg, tmp_path / "run")
        seen += _documents(mine, leg.ranks)
        found, wanted = (_checkpoint(c, leg.until) for c in (mine, config))
        assert len(wanted) > 4 * 4 * 11  # weights, two moments and their steps, of eleven parameters a layer
        assert worst(found, wanted) < BOUND, leg
    assert seen == documents
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert facts["parameters"] == sum(x.numel() for x in saved.values())
    losses = [[float(row["loss"]) for row in read_metrics(Path(c.run.dir) / "metrics.jsonl")] for c in (mine, config)]
    assert farthest(*losses) < BOUND


def _lose_a_moment(state: dict[str, Any]) -> None:
    state["state.model.layers.2.mlp.up_proj.weight.exp_avg_sq"].zero_()


@pytest.mark.parametrize("straight", ["qwen3"], indirect=True)
def test_a_moment_that_is_lost_would_be_seen(straight: Any, tmp_path: Path) -> None:
    _, config, documents = straight
    shutil.copytree(Path(config.run.dir), tmp_path / "run", ignore=shutil.ignore_patterns("step-00000[2-9]"))
    mine = _of_leg(config, Leg(2, 1, ParallelConfig(), {}), tmp_path / "run")
    assert _documents(mine, 1, _lose_a_moment) == documents[1:2]
    found, wanted = (_checkpoint(c, 2) for c in (mine, config))
    assert worst(found, wanted) > BOUND
