"""Stochastic rounding: right in the mean, the same on every replica of a weight, and repeated by a resumed run."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.comm import World
from longspan.config.file import load_config
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.multimodal.prepare_encoder import prepare_encoder
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from longspan.train.optim.one_pass_adamw import STREAMS, Key, noise_of, random_words, round_stochastically
from longspan.train.optim.optimizer import OptimizerChoice, StochasticRounding, build_rounding_optimizer
from longspan.train.training import make_optimizer
from tests.model.stock import texts
from tests.train.multimodal.encoders import encoder_of
from tests.train.multimodal.reference import HIDDEN, language_model_of

DRAWS = 21_000


def _rounded(x: Tensor, seed: int) -> Tensor:
    """Rounded by the bits of as many places in a row."""
    words = random_words(Key(seed, 2**32 - 1 - seed), torch.arange(x.numel()).view(x.shape))
    return torch.stack([round_stochastically(x, noise_of(words, stream)) for stream in range(STREAMS)])


def test_the_mean_of_many_draws_is_the_number() -> None:
    exact = torch.cat(
        [torch.randn(40, generator=torch.Generator().manual_seed(0)) * 10.0**power for power in (-30, -3, 0, 5)]
    )
    drawn = _rounded(exact.expand(DRAWS // STREAMS, -1).contiguous(), 1).flatten(0, 1)
    assert drawn.dtype == torch.bfloat16
    below = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32).double()  # toward zero
    above = ((exact.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32).double()
    assert ((drawn == below) | (drawn == above)).all()
    share = (exact.double() - below) / (above - below)
    deviation = (share * (1 - share) / DRAWS).sqrt().clamp(min=1e-9)
    far = ((drawn == above).double().mean(0) - share).abs() / deviation
    assert far.max() < 4.5, far.max()  # of 160 numbers; a bias of a hundredth of the spacing would be 3 more
    assert (share - share.round()).abs().max() > 0.4


def test_numbers_of_bfloat16_and_what_is_not_finite_stay() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -0.0078125, 3.0e38, math.inf, -math.inf]).bfloat16().float()
    for seed in range(20):
        assert (_rounded(exact, seed).float() == exact).all()
    assert _rounded(torch.tensor([math.nan]), 0).isnan().all()


def _trained(kind: str, choice: OptimizerChoice, steps: int) -> Tensor:
    """One weight matrix around 1, after so many small steps along one gradient."""
    torch.manual_seed(0)
    model: Any = nn.Linear(64, 64, bias=False)
    nn.init.normal_(model.weight, 1.0, 0.1)
    gradient = torch.randn(64, 64)
    model = model.to(torch.float32 if kind == "float32" else torch.bfloat16)
    before = model.weight.detach().float().clone()
    world: Any = SimpleNamespace(seed=3, step=0)
    optimizer = (
        build_rounding_optimizer(choice, model, world) if kind == "by chance" else choice.build(model.parameters())
    )
    for step in range(steps):
        world.step = step + 1
        model.weight.grad = gradient.to(model.weight)
        optimizer.step()
    return model.weight.detach().float() - before


@pytest.mark.parametrize(
    "choice",
    [
        OptimizerChoice("adamw", 2e-5, 0.0, (("betas", (0.9, 0.999)),)),
        OptimizerChoice("sgd", 2e-5, 0.0, (("momentum", 0.9),)),
        OptimizerChoice("torch.optim.NAdam", 2e-5),
    ],
    ids=lambda choice: choice.name,
)
def test_small_updates_add_up(choice: OptimizerChoice) -> None:
    exact, nearest, by_chance = (_trained(kind, choice, 60) for kind in ("float32", "nearest", "by chance"))
    assert not nearest.any()  # each is below half the spacing of bfloat16 around 1
    slope = (by_chance * exact).sum() / exact.square().sum()
    assert slope == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("choice", [OptimizerChoice("sgd", 1e-4), OptimizerChoice("adamw", 1e-4)], ids=str)
def test_bits_follow_seed_step_and_name_and_differ_between_updates_of_one_step(choice: OptimizerChoice) -> None:
    def after(world: dict[str, int], updates: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        given: Any = SimpleNamespace(**world)
        optimizer = build_rounding_optimizer(choice, model, given)
        for _ in range(updates):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        return model.weight.detach()

    at = {"seed": 1, "step": 5}
    start, one, two = (after(at, updates) for updates in (0, 1, 2))
    assert torch.equal(one, after(at, 1))
    assert not any(torch.equal(one, after(at | other, 1)) for other in ({"step": 6}, {"seed": 2}))
    assert not torch.equal(one != start, two != start)  # the second update rounds others up


# ---- over ranks


def _opened(world: World, family: str) -> tuple[Any, Optimizer]:
    model = prepare(load_model(None, family, dtype="bfloat16", vocab_size=64), world, probe=False)
    world.seed = 7
    return model, build_rounding_optimizer(OptimizerChoice("adamw", 1e-4, 0.1), model, world)


def _step(model: Any, optimizer: Optimizer, world: World, step: int) -> None:
    documents = texts([12] * 8, seed=step)
    plan = plan_fixed([12] * 8, world.home, cp=1, max_tokens_per_slot=24)
    run_step(model, plan, documents, world, optimizer, step=step)


def _contents(model: Any, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        tensors[name] = local_tensor(parameter.detach()).clone()
        tensors |= {f"{name}.{key}": local_tensor(value).clone() for key, value in optimizer.state[parameter].items()}
    return tensors


def _copies(model: Any, world: World) -> set[str]:
    """The names of weights of which another rank holds the same block otherwise."""
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    mine = dict[tuple[str, tuple[int, ...]], list[float]]()
    for name, parameter in model.named_parameters():
        mesh = parameter.device_mesh.get_coordinate() if isinstance(parameter, DTensor) else []
        kinds = parameter.placements if isinstance(parameter, DTensor) else ()
        place = tuple(at for at, kind in zip(mesh, kinds, strict=True) if not kind.is_replicate())
        mine[tied.get(name, name), place] = local_tensor(parameter.detach()).float().flatten().tolist()
    seen: dict[Any, list[float]] = {}
    different = set[str]()
    for blocks in world.control.gather_objects(mine):
        for key, values in blocks.items():
            if seen.setdefault(key, values) != values:
                different.add(key[0])
    return different


HOMES = {"replicas": Layout(4, dp_replicate=2), "tp": Layout(4, tp=2), "tied ends of a pipeline": Layout(4, pp=2)}


def _over_ranks(rank: int, root: Path) -> None:
    for name, home in HOMES.items():
        with World(home, backend=backend(), timeout=60) as world:
            model, optimizer = _opened(world, "qwen3-tiny")
            for step in (1, 2):
                _step(model, optimizer, world, step)
            save_checkpoint(root / name, model, optimizer, world, step=2, state={}, keep=0)
            _step(model, optimizer, world, 3)
            assert not _copies(model, world), (name, _copies(model, world))
            dtypes = {t.dtype for key, t in _contents(model, optimizer).items() if not key.endswith(".step")}
            assert dtypes == {torch.bfloat16}
            again, resumed = _opened(world, "qwen3-tiny")
            load_checkpoint(root / name / "step-000002", again, resumed, world)
            _step(again, resumed, world, 3)
            straight, repeated = _contents(model, optimizer), _contents(again, resumed)
            assert straight.keys() == repeated.keys()
            assert all(torch.equal(straight[key], repeated[key]) for key in straight), name


@pytest.mark.whole
def test_replicas_stay_equal_and_a_resumed_run_repeats_its_bits(tmp_path: Path) -> None:
    run_ranks(_over_ranks, 4, tmp_path, timeout=120)


def _encoder_updates(rank: int) -> None:
    with World(Layout(1), backend=backend()) as world:
        language_model = prepare(language_model_of("qwen3", torch.bfloat16), world)
        encoder = Encoder(module=prepare_encoder(encoder_of("image", HIDDEN, torch.bfloat16), world), world=world)
        model = MultimodalModel({"image": encoder}, language_model, world)
        keys = {"train.lr": 2.0**-6, "encoder.lr": 2.0**-9, "train.optimizer": "sgd", "train.weight_decay": 0.0}
        optimizer = make_optimizer(load_config(None, keys | {"train.stochastic_rounding": True}), world, model)
        assert isinstance(optimizer, StochasticRounding)
        assert {group["initial_lr"] for group in optimizer.param_groups} == {2.0**-9, 2.0**-6}
        for parameter in model.parameters():
            local_tensor(parameter.detach()).zero_()
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for name, parameter in model.named_parameters():
            rate = 2.0**-9 if name.startswith("encoders.") else 2.0**-6
            assert (local_tensor(parameter.detach()) == -rate).all(), name


def test_an_encoder_has_its_own_learning_rate() -> None:
    run_ranks(_encoder_updates, 1, timeout=120)
