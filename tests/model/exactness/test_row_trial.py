"""The trial of a model before its first step: patches, hooks and modules in which rows meet are named; others pass."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel

from longspan import run_step, token_log_probs
from longspan.comm import World, bind
from longspan.errors import ModelError
from longspan.evaluation import evaluate
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.model.exactness.row_trial import try_rows
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import PlannerConfig
from tests.model.stock import texts, tiny

LENGTHS = (9, 5)
Rows = Callable[[Tensor], Tensor]  # of hidden states (1, T, D)


def shifted(x: Tensor) -> Tensor:
    return x + 0.3 * F.pad(x, (0, 0, 1, 0))[:, :-1]


def _by_attention_of_its_own(x: Tensor) -> Tensor:
    return x + F.scaled_dot_product_attention(x, x, x, is_causal=True)


MEETING: dict[str, Rows] = {
    "the mean over rows": lambda x: x - 0.1 * x.mean(1, keepdim=True),
    "the token before": shifted,
    "a softmax over rows": lambda x: x + 10 * x * x.softmax(1),
    "experts that choose rows": lambda x: torch.where(x.sum(-1, True) > x.sum(-1).median(), 1.1 * x, x),
    "the number of rows": lambda x: x * 40 / x.shape[1],
    "a row's local number": lambda x: x * (1 + torch.arange(x.shape[1], device=x.device)[:, None] / 100).to(x.dtype),
    "attention of its own": _by_attention_of_its_own,
    "the first row": lambda x: torch.cat([2 * x[:, :1], x[:, 1:]], 1),
}


# ---- where they may do so


def _by_forward(module: nn.Module, meet: Rows) -> Callable[[], None]:
    forward = module.forward
    module.forward = lambda x, *args, **kwargs: forward(meet(x), *args, **kwargs)
    return lambda: setattr(module, "forward", forward)


def _by_hook(module: nn.Module, meet: Rows) -> Callable[[], None]:
    return module.register_forward_hook(lambda _, __, out: meet(out)).remove


def _by_hook_before(module: nn.Module, meet: Rows) -> Callable[[], None]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (meet(args[0]), *args[1:])

    return module.register_forward_pre_hook(hook).remove


PLACES = {
    "a forward": ("model.layers.0.mlp", _by_forward),
    "a hook": ("model.layers.1.mlp", _by_hook),
    "a hook before": ("model.layers.1.post_attention_layernorm", _by_hook_before),
    "keys": ("model.layers.0.self_attn.k_proj", _by_hook),
    "a norm": ("model.norm", _by_hook),
    "an embedding": ("model.embed_tokens", _by_hook),
    "a head": ("lm_head", _by_hook_before),
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(Layout(ranks=1), backend=backend()) as world:
        yield world


def _prepared(world: World, model: PreTrainedModel) -> PreTrainedModel:
    prepared = prepare(model.train(), world)
    assert isinstance(prepared, PreTrainedModel)
    return prepared


@pytest.fixture(scope="module")
def llama(world: World) -> PreTrainedModel:
    return _prepared(world, tiny("llama"))


@pytest.fixture(scope="module")
def in_half(world: World) -> PreTrainedModel:
    return _prepared(world, tiny("llama", torch.bfloat16))


def _try_again(model: PreTrainedModel, world: World, *, backward: bool = True) -> None:
    vars(model).pop("modes_of_row_trial", None)
    try_rows(model, world, backward=backward)


def _refused(model: PreTrainedModel, world: World, place: str, rows: str, *, backward: bool = True) -> None:
    name, patch = PLACES[place]
    undo = patch(model.get_submodule(name), MEETING[rows])
    says = rf"LlamaForCausalLM cannot run exactly .*: rows influence each other outside attention, first in {name} \("
    try:
        with pytest.raises(ModelError, match=says):
            _try_again(model, world, backward=backward)
    finally:
        undo()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rows", MEETING)
def test_rows_that_meet_are_refused_by_name(
    rows: str, half: bool, llama: PreTrainedModel, in_half: PreTrainedModel, world: World
) -> None:
    _refused(in_half if half else llama, world, "a forward", rows)


@pytest.mark.parametrize("place", PLACES)
def test_wherever_they_meet(place: str, llama: PreTrainedModel, world: World) -> None:
    _refused(llama, world, place, "the token before", backward=False)


def test_without_patches_they_pass(llama: PreTrainedModel, in_half: PreTrainedModel, world: World) -> None:
    for model in (llama, in_half):
        for backward in (True, False):
            _try_again(model, world, backward=backward)


def test_rotary_angles_by_the_longest_position(llama: PreTrainedModel, world: World) -> None:
    rotary: Any = llama.get_submodule("model.rotary_emb")
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids.float() / (1 + position_ids.max()))
    try:
        with pytest.raises(ModelError, match=r"first in model\.rotary_emb \(LlamaRotaryEmbedding\)"):
            _try_again(llama, world)
    finally:
        rotary.forward = forward


# ---- before the first step


def test_every_kind_of_step_and_a_call_of_ones_own_are_preceded_by_it(world: World) -> None:
    model = tiny("llama")
    _by_forward(model.get_submodule("model.layers.0.mlp"), shifted)
    model, plan, documents = _prepared(world, model), plan_fixed(LENGTHS, world.home, cp=1), texts(LENGTHS)
    shard = bind(plan.micro_batches[0], world)
    inputs = {"input_ids": shard.scatter(torch.arange(sum(LENGTHS)))[None], "position_ids": shard.position_ids[None]}
    choice = PlannerConfig.fixed(1, max_tokens_per_slot=64)
    of_mlp = r"\.mlp \(LlamaMLP\): in "
    steps: list[tuple[Callable[[], object], str]] = [
        (lambda: model(**inputs, shard=shard), ""),
        (lambda: run_step(model, plan, documents, world), of_mlp + "training"),
        (lambda: evaluate(model, documents, choice, world), of_mlp + "evaluation"),
        (lambda: token_log_probs(model, plan, documents, world), of_mlp + "evaluation"),
    ]
    for step, where in [*steps, *steps]:  # and stays refused
        with pytest.raises(
            ModelError, match=rf"rows influence each other outside attention, first in model\.layers\.0{where}"
        ):
            step()


class _Remembering(nn.Module):
    """A norm that keeps something of each call, and draws a number that changes nothing."""

    mean: Tensor

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.last = norm, None
        self.lengths, self.by_name = list[Tensor](), {"calls": 0}
        self.register_buffer("mean", torch.zeros(32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        self.lengths.append(self.last.sum())
        self.by_name |= {"calls": self.by_name["calls"] + 1, "size": self.last.norm()}
        self.mean += self.last.mean((0, 1)) + 0 * torch.rand(())
        return self.norm(x)

    def is_new(self) -> bool:
        nothing = (self.last, self.lengths, self.by_name) == (None, [], {"calls": 0})
        return nothing and not self.mean.is_meta and not self.mean.any()


def test_probe_and_trial_leave_nothing_behind_and_the_trial_is_made_once_in_each_mode(world: World) -> None:
    model = tiny("llama")
    model.model.norm = memory = _Remembering(model.model.norm)
    prepared = _prepared(world, model)
    assert memory.is_new()
    prepared.get_submodule("model.layers.0").eval()
    modes, before = [module.training for module in prepared.modules()], torch.random.get_rng_state()
    for backward in (True, False, True):
        try_rows(prepared, world, backward=backward)
    assert memory.is_new()
    assert [module.training for module in prepared.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not any(module._forward_hooks for module in prepared.get_submodule("model.norm").modules())
    calls = list[int]()
    prepared.get_submodule("lm_head").register_forward_hook(lambda *_: calls.append(1))
    try_rows(prepared, world, backward=True)
    assert not calls


def test_a_layer_that_meets_in_one_mode_alone(llama: PreTrainedModel, world: World) -> None:
    mlp = llama.get_submodule("model.layers.0.mlp")
    undo = _by_hook(mlp, lambda x: shifted(x) if mlp.training else x)
    try:
        _try_again(llama, world, backward=False)
        with pytest.raises(ModelError, match=r"in training mode"):
            _try_again(llama, world)
    finally:
        undo()


# ---- models of one's own, which a small one of their class shows when they are prepared


class ShiftingModel(LlamaModel):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        _by_forward(self.layers[-1].get_submodule("mlp"), shifted)


class ShiftingForCausalLM(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = ShiftingModel(config)


def test_a_class_of_ones_own_is_refused_when_it_is_prepared(world: World) -> None:
    config: Any = tiny("llama").config
    with pytest.raises(
        ModelError, match=r"rows influence each other outside attention, first in layers\.1\.mlp\S*: outputs differ"
    ):
        _prepared(world, ShiftingForCausalLM(config))


# ---- over ranks


HOMES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "sharded": (Layout(ranks=2), {"compute_dtype": torch.bfloat16, "activation_checkpointing": True}),
    "sequence-parallel": (Layout(ranks=2, tp=2), {"sequence_parallel": True}),
    "stages": (Layout(ranks=2, pp=2), {}),
}


def _over_ranks(rank: int) -> dict[str, str]:
    answers = dict[str, str]()
    for name, (home, options) in HOMES.items():
        with World(home, backend=backend()) as world:
            model: Any = prepare(tiny("llama").train(), world, **options)
            if "model.layers.1.mlp" in dict(model.named_modules()):
                _by_hook(model.get_submodule("model.layers.1.mlp"), shifted)
            with pytest.raises(ModelError) as error:
                try_rows(model, world, backward=True)
            answers[name] = str(error.value)
    return answers


def test_over_ranks_every_rank_says_the_same() -> None:
    first, second = run_ranks(_over_ranks, 2)
    assert first.keys() == HOMES.keys()
    for name, said in first.items():
        assert "rows influence each other outside attention, first in model.layers.1.mlp" in said, (name, said)
        assert second[name] == said


@pytest.mark.parametrize("preset", ["gpt-oss", "qwen3-next", pytest.param("bamba", marks=pytest.mark.whole)])
def test_presets_pass(preset: str, world: World) -> None:
    model = _prepared(world, load_model(preset=f"{preset}-tiny", vocab_size=64, dtype=torch.bfloat16, seed=0))
    try_rows(model, world, backward=True)
