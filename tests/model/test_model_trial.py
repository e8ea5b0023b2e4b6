"""The trial of a model before its first step: patches, hooks and modules in which rows meet are named; others pass."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedModel

from longspan import run_step, token_log_probs
from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.model.presets import PRESETS
from longspan.model.row_trial.model_trial import try_rows
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import PlanChoice, evaluate
from tests.model.stock import texts, tiny
from tests.mutation import mutated

LENGTHS = (9, 5)
Rows = Callable[[Tensor], Tensor]  # of hidden states (1, T, D)


# ---- what rows may do to each other, of hidden states (1, T, D)


def shifted(x: Tensor) -> Tensor:
    return x + 0.3 * F.pad(x, (0, 0, 1, 0))[:, :-1]


def _by_a_gru(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    with torch.device(x.device):
        return x + 0.1 * nn.GRU(x.shape[-1], x.shape[-1], batch_first=True, dtype=x.dtype)(x)[0]


def _by_conv1d(x: Tensor) -> Tensor:
    weight = torch.full((x.shape[-1], 1, 3), 0.1, dtype=x.dtype, device=x.device)
    return x + F.conv1d(x.mT, weight, padding=1, groups=x.shape[-1]).mT


def _by_experts_that_choose(x: Tensor) -> Tensor:
    chosen = x[0].sum(-1).topk(x.shape[1] // 2).indices
    return x.index_copy(1, chosen, 1.1 * x[:, chosen])


def _by_attention_of_its_own(x: Tensor) -> Tensor:
    return x + F.scaled_dot_product_attention(x, x, x, is_causal=True)


MEETING: dict[str, Rows] = {
    "a cumulative sum": lambda x: x + 0.1 * x.cumsum(1),
    "the mean over rows": lambda x: x - 0.1 * x.mean(1, keepdim=True),
    "batch norm": lambda x: F.batch_norm(x[0], None, None, training=True)[None],
    "the token before": shifted,
    "a recurrence": _by_a_gru,
    "a convolution": _by_conv1d,
    "a Fourier transform": lambda x: x + 0.1 * torch.fft.fft(x.float(), dim=1).real.to(x.dtype),
    "a softmax over rows": lambda x: x + 10 * x * x.softmax(1),
    "a norm over all rows": lambda x: x + x / x.norm(),
    "experts that choose rows": _by_experts_that_choose,
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
    return module.register_forward_pre_hook(lambda _, args: (meet(args[0]), *args[1:])).remove


def _by_class(module: nn.Module, meet: Rows) -> Callable[[], None]:
    kind: Any = type(module)

    class Own(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return meet(super().forward(*args, **kwargs))

    module.__class__ = Own
    return lambda: setattr(module, "__class__", kind)


PLACES = {
    "a forward": ("model.layers.0.mlp", _by_forward),
    "a hook": ("model.layers.1.mlp", _by_hook),
    "a hook before": ("model.layers.1.post_attention_layernorm", _by_hook_before),
    "a class": ("model.layers.0.mlp.act_fn", _by_class),
    "keys": ("model.layers.0.self_attn.k_proj", _by_hook),
    "queries": ("model.layers.0.self_attn.q_proj", _by_hook),
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
def llama_in_half(world: World) -> PreTrainedModel:
    return _prepared(world, tiny("llama", torch.bfloat16))


def _try_again(model: PreTrainedModel, world: World, *, backward: bool = True) -> None:
    vars(model).pop("modes_of_row_trial", None)
    try_rows(model, world, backward=backward)


def _refused(model: PreTrainedModel, world: World, place: str, rows: str, *, backward: bool = True) -> None:
    name, patch = PLACES[place]
    undo = patch(model.get_submodule(name), MEETING[rows])
    try:
        says = rf"LlamaForCausalLM cannot run exactly .*: rows influence each other outside attention, first in {name} \("
        with pytest.raises(ModelError, match=says):
            _try_again(model, world, backward=backward)
    finally:
        undo()


@pytest.mark.parametrize("rows", MEETING)
def test_rows_that_meet_are_refused_by_name(rows: str, llama: PreTrainedModel, world: World) -> None:
    _refused(llama, world, "a forward", rows)


@pytest.mark.parametrize("place", PLACES)
def test_wherever_they_meet(place: str, llama: PreTrainedModel, world: World) -> None:
    _refused(llama, world, place, "the token before", backward=False)


@pytest.mark.parametrize("rows", MEETING)
def test_in_bfloat16_too(rows: str, llama_in_half: PreTrainedModel, world: World) -> None:
    _refused(llama_in_half, world, "a forward", rows)


def test_without_patches_they_pass(llama: PreTrainedModel, llama_in_half: PreTrainedModel, world: World) -> None:
    for model in (llama, llama_in_half):
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
