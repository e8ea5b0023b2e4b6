"""The trial of a model before its first step: patches, hooks and modules in which rows meet are named; others pass."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bench.census.models import default_config, names
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel

from longspan import run_step, token_log_probs
from longspan.comm import World, bind
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.model.exactness.row_trial import try_rows
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.presets import PRESETS
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import PlanChoice, evaluate
from tests.model.experts.moe_models import FAMILIES, family_model
from tests.model.stock import texts, tiny
from tests.mutation import mutated

LENGTHS = (9, 5)
Rows = Callable[[Tensor], Tensor]  # of hidden states (1, T, D)


def shifted(x: Tensor) -> Tensor:
    return x + 0.3 * F.pad(x, (0, 0, 1, 0))[:, :-1]


def _by_a_gru(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    gru: Any = nn.GRU(x.shape[-1], x.shape[-1], batch_first=True, device=x.device, dtype=x.dtype)
    return x + 0.1 * gru(x)[0]


def _by_conv1d(x: Tensor) -> Tensor:
    weight = torch.full((x.shape[-1], 1, 3), 0.1, dtype=x.dtype, device=x.device)
    return x + F.conv1d(x.mT, weight, padding=1, groups=x.shape[-1]).mT


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
    "a norm over all rows": lambda x: x + 20 * x / x.norm(),
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


@pytest.mark.filterwarnings("ignore:RNN module weights are not part")  # a GRU in bfloat16 on a GPU
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
    choice = PlanChoice.fixed(1, max_tokens_per_slot=64)
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
    last: Tensor | None

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.calls, self.last = norm, 0, None
        self.register_buffer("mean", torch.zeros(32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last = self.calls + 1, x.detach()
        self.mean += x.detach().mean((0, 1)) + 0 * torch.rand(())
        return self.norm(x)


def test_the_trial_leaves_nothing_behind_and_is_made_once_in_each_mode(world: World) -> None:
    model = tiny("llama")
    model.model.norm = memory = _Remembering(model.model.norm)
    prepared = _prepared(world, model)
    prepared.get_submodule("model.layers.0").eval()
    memory.calls, memory.last = 0, None  # of the probe
    modes, before = [module.training for module in prepared.modules()], torch.random.get_rng_state()
    for backward in (True, False, True):
        try_rows(prepared, world, backward=backward)
    assert memory.calls == 0 and memory.last is None and not memory.mean.any()
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


class _Shifting(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(shifted(x))


class ShiftingModel(LlamaModel):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        layer: Any = self.layers[-1]
        layer.mlp = _Shifting(layer.mlp)


class ShiftingForCausalLM(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = ShiftingModel(config)


def test_a_class_of_ones_own_is_refused_when_it_is_prepared(world: World) -> None:
    says = r"rows influence each other outside attention, first in layers\.1\.mlp\S*: outputs differ"
    with pytest.raises(ModelError, match=says):
        config: Any = tiny("llama").config
        _prepared(world, ShiftingForCausalLM(config))


# ---- over ranks


HOMES: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "sharded": (Layout(ranks=2), "llama", {"compute_dtype": torch.bfloat16, "activation_checkpointing": True}),
    "tp": (Layout(ranks=2, tp=2), "llama", {}),
    "sequence-parallel": (Layout(ranks=2, tp=2), "llama", {"sequence_parallel": True}),
    "stages": (Layout(ranks=2, pp=2), "llama", {}),
    "experts": (Layout(ranks=2, ep=2), "qwen3_moe", {}),
}


def _over_ranks(rank: int) -> dict[str, str]:
    """By home, what is said of a model whose last layer shifts its rows on every rank."""
    answers = dict[str, str]()
    for name, (home, family, options) in HOMES.items():
        with World(home, backend=backend()) as world:
            model = family_model(family) if family in FAMILIES else tiny(family)
            stock: Any = prepare(model.train(), world, **options)
            try_rows(stock, world, backward=True)
            try_rows(stock, world, backward=False)
            vars(stock).pop("modes_of_row_trial")
            if "model.layers.1.mlp" in dict(stock.named_modules()):
                _by_hook(stock.get_submodule("model.layers.1.mlp"), _moved)
            with pytest.raises(ModelError) as error:
                try_rows(stock, world, backward=True)
            answers[name] = str(error.value)
    return answers


def _moved(out: Any) -> Any:
    return shifted(out) if isinstance(out, Tensor) else (shifted(out[0]), *out[1:])


def test_over_ranks_every_rank_says_the_same() -> None:
    first, second = run_ranks(_over_ranks, 2)
    assert first.keys() == HOMES.keys()
    for name, said in first.items():
        assert "rows influence each other outside attention, first in model.layers.1.mlp" in said, (name, said)
        assert second[name] == said


# ---- models that pass


DTYPES = [pytest.param(torch.float32, marks=pytest.mark.whole), torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("-tiny") and "-vl-" not in name])
def test_presets_pass(preset: str, dtype: torch.dtype, world: World) -> None:
    model = _prepared(world, load_model(preset=preset, vocab_size=64, dtype=dtype, seed=0))
    try_rows(model, world, backward=True)


@pytest.mark.whole
@pytest.mark.parametrize("name", names())
def test_every_class_of_the_census_passes_or_is_refused_for_another_reason(name: str, world: World) -> None:
    try:
        config = shrink_configuration(default_config(name))
    except Exception as error:  # whatever a class raises
        pytest.skip(f"the census says why it is not built: {error}")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for backward in (True, False):
            try:
                try_rows(_prepared(world, make_tiny_model(config, dtype)), world, backward=backward)
            except ModelError as error:
                assert "without attention" not in str(error), error


def test_without_its_comparison_they_would_pass(llama: PreTrainedModel, world: World) -> None:
    undo, compared = _by_forward(llama.get_submodule("model.layers.0.mlp"), shifted), "nan_to_num(nan=0.0) / self"
    try:
        with mutated(("model.exactness.row_trial", compared, compared.replace("/", "* 0 /"))):
            _try_again(llama, world)
    finally:
        undo()


def test_attention_of_its_own_in_one_mode_alone_is_refused_in_that_mode() -> None:
    model: Any = tiny("llama")
    attention = model.model.layers[1].self_attn

    class OwnInEvaluation(type(attention)):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.training:
                return super().forward(hidden_states, *args, **kwargs)
            return _by_attention_of_its_own(hidden_states), None

    attention.__class__ = OwnInEvaluation
    with World(Layout(ranks=1), backend=backend()) as world:
        prepared = prepare(model, world, shard_parameters=False)
        plan = plan_fixed(LENGTHS, world.home, cp=1)
        assert run_step(prepared, plan, texts(LENGTHS), world).loss > 0
        with pytest.raises(ModelError, match=r"first in model.layers.1.self_attn \(OwnInEvaluation\): in evaluation"):
            run_step(prepared, plan, texts(LENGTHS), world, backward=False)
