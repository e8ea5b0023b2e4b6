"""Moments on the host over ranks: the same bits and the same checkpoints under every way of sharding parameters."""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.comm import World
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.layout import Layout
from longspan.model import load_model
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.weights.local_tensors import local_tensor
from longspan.run import set_up
from longspan.run.metrics import read_metrics
from longspan.testing import backend, run_ranks
from longspan.train import offload_optimizer_states
from longspan.train.optim.offload_states import OffloadedStates
from longspan.train.training import build_run_optimizer
from tests.model.stock import prepare_untried
from tests.train.small import small_config, train_rank, without_times

BUCKET = 64 << 10  # bytes: a layer's matrices come apart


@dataclass(frozen=True)
class Case:
    """A home, a model, keys of [train], the rank of an adapter (0: the model's own weights are trained).

    `resumed`: where an optimizer goes on from the checkpoint of the other, if it does.
    """

    home: Layout
    preset: str = "qwen3-tiny"
    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    dtype: str = "float32"
    lora: int = 0
    resumed: tuple[str, ...] = ()


BY_CHANCE = {"optimizer.stochastic_rounding": True}
MOMENTUM = {"optimizer.class": "sgd", "optimizer.arguments": ("momentum=0.9", "nesterov=true")}
NADAM = {"optimizer.class": "torch.optim.NAdam"}
CASES = {
    "replicas, by chance": Case(Layout(2, dp_replicate=2), keys=BY_CHANCE, dtype="bfloat16", resumed=("device",)),
    "tp": Case(Layout(2, tp=2), keys=NADAM),
    "tied ends of a pipeline": Case(Layout(2, pp=2), keys=BY_CHANCE, dtype="bfloat16", resumed=("host",)),
    "experts": Case(Layout(2, ep=2), "qwen3-moe-tiny", keys=MOMENTUM),
    "an adapter": Case(Layout(2), lora=2),
}
FEW = ("replicas, by chance", "tied ends of a pipeline")


def _open(case: Case, world: World, *, on_host: bool) -> tuple[Any, Any]:
    model: Any = load_model(None, case.preset, dtype=case.dtype, vocab_size=64, seed=1)
    model = prepare_untried(add_lora(model, NewAdapter(rank=case.lora)) if case.lora else model, world)
    world.seed = 7
    optimizer = build_run_optimizer(load_config(None, {"optimizer.lr": 1e-2} | case.keys), world, model)
    return model, offload_optimizer_states(optimizer, world, bucket_bytes=BUCKET) if on_host else optimizer


def _step(model: Any, optimizer: Any, world: World, step: int) -> None:
    """One update along gradients that are drawn by the names of parameters, one for both ends of a tied pipeline."""
    world.step = step
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            draws = torch.Generator().manual_seed(zlib.crc32(f"{_tied(name)} {step}".encode()))
            parameter.grad = torch.zeros_like(parameter)
            local_tensor(parameter.grad).copy_(torch.randn(local_tensor(parameter).shape, generator=draws))
    optimizer.step()


def _tied(name: str) -> str:
    return name.replace("lm_head", "model.embed_tokens")


def _contents(model: Any, optimizer: Any) -> dict[str, Any]:
    values = dict[str, Any]()
    for name, parameter in model.named_parameters():
        states = {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
        for key, value in {name: parameter.detach(), **states}.items():
            local_bytes = local_tensor(value).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            sharding = (value.device_mesh, value.placements, value.stride()) if isinstance(value, DTensor) else None
            values[key] = (value.dtype, value.shape, sharding, hashlib.sha256(local_bytes).hexdigest())
    return values


def _over_ranks(rank: int, root: Path, names: Sequence[str]) -> None:
    for name in names:
        case = CASES[name]
        with World(case.home, backend=backend(), timeout=60) as world:
            pairs = {place: _open(case, world, on_host=place == "host") for place in ("device", "host")}
            for step in (1, 2):
                for pair in pairs.values():
                    _step(*pair, world, step)
            for place, pair in pairs.items():
                save_checkpoint(root / name / place, *pair, world, step=2)
            manifests = [root / name / place / "step-000002" / "manifest.json" for place in pairs]
            device, host = (json.loads(manifest.read_text())["files"] for manifest in manifests)
            assert device == host and len(device) == 2 + 2, name
            for place in case.resumed:
                other = "host" if place == "device" else "device"
                pairs[f"{place}, resumed"] = _open(case, world, on_host=place == "host")
                load_checkpoint(root / name / other / "step-000002", *pairs[f"{place}, resumed"], world)
            for pair in pairs.values():
                _step(*pair, world, 3)
            expected, *others = (_contents(*pair) for pair in pairs.values())
            assert all(
                s.device.type == "cpu" for s in tree_leaves(pairs["host"][1].state) if isinstance(s, torch.Tensor)
            )
            assert any(".exp_avg" in key or ".momentum" in key for key in expected)
            for other in others:
                assert [*other] == [*expected] and other == expected, name
            if case.resumed:  # ranks hold whole parameters, some or all of them twice
                digests = dict[str, str]()
                for of_rank in world.control.gather_objects({_tied(key): x[3] for key, x in expected.items()}):
                    assert all(digests.setdefault(key, x) == x for key, x in of_rank.items()), name


@pytest.mark.parametrize("names", [FEW, pytest.param(("tp", "experts", "an adapter"), marks=pytest.mark.whole)])
def test_weights_moments_and_checkpoints_are_the_same_under_every_home(tmp_path: Path, names: Sequence[str]) -> None:
    run_ranks(_over_ranks, 2, tmp_path, names, timeout=120)


def _train(config: RunConfig, steps: int, key: str, *, on_host: bool) -> list[dict[str, object]]:
    keys: dict[str, Any] = {key: on_host}
    train = replace(config.train, steps=steps, **keys)
    built = list[Any]()

    def noted(*arguments: Any, **keywords: Any) -> Any:
        built.append(build_run_optimizer(*arguments, **keywords))
        return built[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(set_up, "build_run_optimizer", noted)
        train_rank(0, replace(config, train=train), 1)
    assert [isinstance(optimizer, OffloadedStates) for optimizer in built] == [on_host]
    return [without_times(row) for row in read_metrics(Path(config.run.dir) / "metrics.jsonl")]


@pytest.mark.parametrize("key", ["offload_optimizer_states", pytest.param("offload_weights", marks=pytest.mark.whole)])
def test_a_run_goes_on_with_the_key_switched_on_or_off(tmp_path: Path, key: str) -> None:
    keys = {"evaluation__every": 0, "context__context_parallel_size": 1, "evaluation__context_parallel_size": 1}
    keys |= {"optimizer__lr_schedule": "constant"}
    straight = _train(small_config(tmp_path / "straight", **keys), 3, key, on_host=False)
    switched = small_config(tmp_path / "switched", **keys)
    for steps, on_host in ((1, True), (2, False), (3, True)):
        rows = _train(switched, steps, key, on_host=on_host)
    losses, others = ([(row["loss"], row["grad_norm"]) for row in r if "loss" in row] for r in (straight, rows))
    assert losses == others and len(losses) == 3
    assert any(norm > 1 for _, norm in losses), "some gradients are clipped"
