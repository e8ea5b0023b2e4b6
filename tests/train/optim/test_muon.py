"""Muon: torch's bits on whole matrices, and one rank's updates under every way of sharding them."""

import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.comm import World
from longspan.config.file import load_config
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import load_model
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.weights.local_tensors import local_block, local_tensor
from longspan.run.checks import check_optimizer
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer
from longspan.train.optim import muon
from longspan.train.optim.muon import is_layer_matrix, orthogonalize
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.training import build_run_optimizer
from tests.model.deep import deep
from tests.model.stock import prepare_untried

NAMES = {
    "model.layers.3.self_attn.q_proj.weight": ((8, 4), True),
    "model.layers.3.self_attn.q_proj.lora_A.default.weight": ((2, 8), True),
    "model.layers.3.mlp.experts.down_proj": ((4, 8, 6), True),
    "model.layers.3.mlp.gate.weight": ((4, 8), True),
    "model.layers.3.mlp.shared_expert_gate.weight": ((1, 8), False),
    "model.layers.3.mamba.conv1d.weight": ((8, 1, 4), False),
    "model.layers.3.mamba.A_log": ((8, 4), False),
    "model.layers.3.input_layernorm.weight": ((8,), False),
    "model.embed_tokens.weight": ((9, 8), False),
    "lm_head.weight": ((9, 8), False),
}


def test_which_parameters_are_matrices_of_layers() -> None:
    for name, (shape, expected) in NAMES.items():
        assert is_layer_matrix(name, torch.zeros(shape)) == expected, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_on_whole_matrices_it_has_the_bits_of_torch(dtype: torch.dtype, adjust: str) -> None:
    torch.manual_seed(0)
    # (inputs, outputs); bfloat16 on a CPU rounds otherwise where tensors have strides, as torch's tall results have
    shapes = ((48, 32), (32, 32), (32, 48), (48, 48))[: 2 if dtype == torch.bfloat16 else 4]
    models = [nn.Sequential(*(nn.Linear(*shape, dtype=dtype) for shape in shapes)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    here = build_optimizer(models[0], "muon", lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust)
    weights, biases = ([p for p in models[1].parameters() if p.ndim == dims] for dims in (2, 1))
    others = [
        optim.Muon(weights, lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust),
        OnePassAdamW(biases, lr=0.02, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for _ in range(3):
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in (here, *others):
            optimizer.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
    assert {key for state in here.state.values() for key in state} == {
        *("momentum_buffer", "step", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("halved", [5, 6])
def test_float64_products_are_not_rounded_and_experts_are_matrices_of_their_own(halved: int) -> None:
    """With products of five rows whole, and in halves of which a quarter is a copy."""
    x = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with patch.object(muon, "HALVED", halved):
        y = orthogonalize(x, (3.4445, -4.7750, 2.0315), 5)
    for matrix, result in zip(x, y, strict=True):
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        values = s / s.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        assert torch.allclose(result, u @ values.diag() @ v, rtol=0, atol=1e-12)


def test_what_it_refuses() -> None:
    arguments = ("ns_steps=6", "momentum=0.9", "adjust_lr_fn=original")
    check_optimizer(load_config(None, KEYS | {"optimizer.arguments": arguments, "train.steps": 9}))
    for keys, message in (
        ({"optimizer.arguments": ("adjust_lr_fn=mine",)}, r"adjust_lr_fn is 'mine'; use original or match_rms_adamw"),
        ({"optimizer.arguments": ("momentum=1",)}, r"refuses its .*: momentum 1 is not below 1"),
        ({"optimizer.stochastic_rounding": True, "model.dtype": "bfloat16"}, r"rounds updates of adamw .* is 'muon'"),
        ({"train.offload_weights": True}, r"train.offload_weights is true, and optimizer.class 'muon' is not known"),
        ({"train.offload_optimizer_states": True}, r"train.offload_optimizer_states is true, .* 'muon' is not"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_optimizer(load_config(None, KEYS | {"train.steps": 9} | keys))
    with pytest.raises(ConfigError, match=r"found none of the 3 trained parameters to be a matrix inside a layer"):
        build_optimizer(nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4)}), "muon")


# ---- over ranks

HOMES = {
    "slots": ("llama", Layout(2)),
    "tp": ("llama", Layout(2, tp=2)),
    "ep": ("qwen3-moe", Layout(2, ep=2)),
    "replicas": ("llama", Layout(2, dp_replicate=2)),
    "an adapter": ("adapter", Layout(2)),
    "three slots": ("llama", Layout(3)),
    "stages": ("llama", Layout(2, pp=2)),
    "replicas of slots, tp": ("llama", Layout(8, tp=2, dp_replicate=2)),
    "ep and slots": ("qwen3-moe", Layout(4, ep=2)),
    "experts, tp": ("qwen3-moe", Layout(4, tp=2)),
    "more ranks than matrices": ("gpt-oss", Layout(4)),
}
FEW = ("slots", "tp", "ep", "replicas")
KEYS = {"optimizer.class": "muon", "optimizer.lr": 1e-2, "optimizer.weight_decay": 0.1}
STEPS = 3


def _open(family: str, world: World) -> tuple[Any, Any]:
    if family == "adapter":
        model: Any = add_lora(
            load_model(None, "qwen3-tiny", dtype="float64", vocab_size=64, seed=1), NewAdapter(rank=3)
        )
    else:
        model = deep(family, torch.float64, layers=2)
    model = prepare_untried(model, world)
    return model, build_run_optimizer(load_config(None, KEYS), world, model)


def _step(model: Any, optimizer: Any, step: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            draws = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
            gradient = torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
            parameter.grad = torch.zeros_like(parameter)
            if isinstance(parameter, DTensor):
                gradient = gradient[local_block(parameter.shape, parameter.device_mesh, parameter.placements)]
            local_tensor(parameter.grad).copy_(gradient)
    optimizer.gradient_scale = torch.tensor(0.5, device=local_tensor(parameter).device)
    optimizer.step()


def _contents(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights and momenta, whole, by name."""
    contents = {}
    for name, parameter in model.named_parameters():
        values = {"": parameter.detach()} | optimizer.state.get(parameter, {})
        for key, x in values.items():
            contents[f"{name} {key}".strip()] = (x.full_tensor() if isinstance(x, DTensor) else x).cpu()
    return contents


def _over_ranks(rank: int, root: Path, names: tuple[str, ...], one: bool) -> list[tuple[dict[str, torch.Tensor], int]]:
    muon.BUNDLE_NUMBERS = 1500  # several bundles
    muon.HALVED = 24
    return [_updated(root, name, Layout(1) if one else HOMES[name][1]) for name in names]


def _updated(root: Path, name: str, home: Layout) -> tuple[dict[str, torch.Tensor], int]:
    """Contents after STEPS steps, and how many numbers this rank orthogonalized in these."""
    family, _ = HOMES[name]
    one = home == Layout(1)
    recorded = patch.object(muon, "orthogonalize", wraps=orthogonalize)
    with World(home, backend=backend(), timeout=60) as world, recorded as done:
        model, optimizer = _open(family, world)
        for step in range(STEPS):
            if step == 2 and not one:
                save_checkpoint(root / name, model, optimizer, world, step=step)
            _step(model, optimizer, step)
        numbers = sum(call.args[0].numel() for call in done.call_args_list)
        contents = _contents(model, optimizer)
        if one:  # resumed from the checkpoint of more ranks
            model, optimizer = _open(family, world)
            load_checkpoint(root / name / "step-000002", model, optimizer, world)
            _step(model, optimizer, 2)
            contents |= {f"resumed {key}": x for key, x in _contents(model, optimizer).items()}
    return contents, numbers


MORE = [pytest.param((name,), marks=pytest.mark.whole) for name in HOMES if name not in FEW]


@pytest.mark.parametrize("names", [FEW, *MORE], ids=", ".join)
def test_every_home_updates_as_one_rank(tmp_path: Path, names: tuple[str, ...]) -> None:
    of_ranks = run_ranks(_over_ranks, len(HOMES[names[0]][1].ranks), tmp_path, names, False, timeout=120)
    (of_one,) = run_ranks(_over_ranks, 1, tmp_path, names, True, timeout=120)
    for name, expected, *answers in zip(names, of_one, *of_ranks, strict=True):
        _check_home(name, *expected, answers)


def _check_home(name: str, expected: dict[str, torch.Tensor], numbers: int, answers: list[Any]) -> None:
    results = [contents for contents, _ in answers]
    # no rank repeats what another does, but for routers, of which tensor-parallel ranks have all
    assert numbers <= sum(count for _, count in answers) <= 1.01 * numbers
    assert all(count for _, count in answers), answers
    seen = {key for result in results for key in result}
    assert seen == {key for key in expected if not key.startswith("resumed ")}
    assert any("momentum" in key for key in seen) and any("exp_avg" in key for key in seen) == (name != "an adapter")
    for key, whole in expected.items():
        for result in results:
            if (x := result.get(key.removeprefix("resumed "))) is not None:
                assert (x - whole).abs().max() <= 1e-12, key


def _beside_own_matrices(rank: int) -> float:
    """The largest difference from whole matrices, of three that both ranks share, after one and two of their own."""
    with World(Layout(2, pp=2), backend=backend(), timeout=30) as world:
        kind = world.device.type
        shared_mesh = init_device_mesh(kind, (2,))
        own_mesh = init_device_mesh(kind, (2, 1), mesh_dim_names=("stages", "slots"))["slots"]
        draws = torch.Generator().manual_seed(0)
        values = torch.randn(3, 2, 4, 4, generator=draws, dtype=torch.float64).to(world.device)
        own = [nn.Parameter(DTensor.from_local(values[0, 0].clone(), own_mesh, [Shard(0)])) for _ in range(rank + 1)]
        for parameter in own:
            parameter.grad = torch.ones_like(parameter)
        shared, whole = list[nn.Parameter](), list[nn.Parameter]()
        for value, gradient in values:
            whole.append(nn.Parameter(value.clone()))
            whole[-1].grad = gradient
            half = value.chunk(2)[rank].clone()
            shared.append(nn.Parameter(DTensor.from_local(half, shared_mesh, [Shard(0)])))
            shared[-1].grad = DTensor.from_local(gradient.chunk(2)[rank].clone(), shared_mesh, [Shard(0)])
        for groups in ((own, shared), (whole,)):
            muon.Muon([{"params": group, "is_matrix": True} for group in groups], lr=0.1).step()
        pairs = zip(shared, whole, strict=True)
        return max((local_tensor(a.detach()) - b.detach().chunk(2)[rank]).abs().max().item() for a, b in pairs)


def test_ranks_with_other_matrices_of_their_own_share_work_alike() -> None:
    """As stages of a pipeline with unlike layers do, which share encoders that have a higher rate."""
    assert max(run_ranks(_beside_own_matrices, 2, timeout=60)) <= 1e-12
