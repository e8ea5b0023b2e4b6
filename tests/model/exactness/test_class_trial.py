"""The trial of a model's routing and images: what is its own of each row passes; what is not is named."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.exactness import image_trial, trials
from longspan.model.exactness.check_model import check_model_on_this_rank
from longspan.model.exactness.class_trial import ClassTrial, try_small_model_of_class
from longspan.model.exactness.image_trial import try_images
from longspan.model.multimodal.image_modules import video_tokens
from longspan.plan import plan_fixed
from longspan.testing import backend
from longspan.train import run_step
from tests.model.experts.moe_models import family_model
from tests.model.stock import texts, tiny
from tests.model.vision.models import config_of


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    trials._results.clear()
    yield
    trials._results.clear()


# AFMoE gives attention its mask by name
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "afmoe"])
def test_a_model_of_true_sizes_is_tried_with_a_small_one(family: str) -> None:
    model = on_meta(CONFIG_MAPPING[family]())
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    assert try_small_model_of_class(model) == ClassTrial()
    assert torch.equal(before, torch.random.get_rng_state()) and torch.get_num_threads() == threads
    assert all(parameter.is_meta for parameter in model.parameters())


def test_models_without_experts_are_not_tried() -> None:
    check_model_on_this_rank(tiny("qwen3"), ())
    assert not trials._results
    check_model_on_this_rank(family_model("qwen3_moe"), ())
    assert len(trials._results) == 1


# ---- blocks of experts that are not exact over some of the rows


Forward = Callable[[Any, Tensor], Tensor]
Block = qwen3_moe.Qwen3MoeSparseMoeBlock
_stock: Forward = Block.forward


def _of_capacity(block: Any, x: Tensor) -> Tensor:
    """Experts take at most 6 rows each, the first that come."""
    flat = x.flatten(0, 1)
    _, weights, chosen = block.gate(flat)
    taken = nn.functional.one_hot(chosen, block.gate.num_experts).sum(1).cumsum(0)
    weights = weights * (taken.gather(1, chosen) <= 6)
    return block.experts(flat, chosen, weights).view_as(x)


def _with_noise(block: Any, x: Tensor) -> Tensor:
    return _stock(block, x * torch.empty_like(x).uniform_(0.9, 1.1) if block.training else x)


def _counting(block: Any, x: Tensor) -> Tensor:
    block.seen += x.shape[1]
    return _stock(block, x)


class _Balanced(torch.autograd.Function):
    """Hands rows on; backward adds the gradient of a loss of the rows' mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (logits,) = ctx.saved_tensors
        return gradients[0], logits.softmax(-1).mean(0).expand_as(logits) / len(logits)


def _with_a_loss(block: Any, x: Tensor) -> Tensor:
    return _Balanced.apply(_stock(block, x), block.gate(x.flatten(0, 1))[0])  # pyright: ignore[reportReturnType]


def _of_visited_experts(block: Any, x: Tensor) -> Tensor:
    """An expert without rows is left out, and its weight is a parameter of its own."""
    chosen, y = block.gate(x.flatten(0, 1))[2], _stock(block, x)
    for expert in chosen.unique().tolist():
        y = y * torch.where((chosen == expert).any(-1), block.scales[expert], 1.0)[None, :, None]
    return y


def _fail(block: Any, x: Tensor) -> Tensor:
    raise ValueError("experts need a GPU")


FIRST = r"rows influence each other outside attention, first in layers.0.mlp"
NOT_EXACT: dict[str, tuple[Forward, str]] = {
    "capacity": (_of_capacity, f"{FIRST}.*: outputs differ"),
    "sums over rows": (lambda block, x: _stock(block, x - x.mean(1, keepdim=True)), FIRST),
    "a loss in the gradient": (_with_a_loss, r"the gradient of \S+ is not the sum over rows: it differs by"),
    "a state of the rows that passed": (
        _counting,
        r"its forward pass in training changes layers.0.mlp.seen by the rows",
    ),
    "parameters of visited experts alone": (
        _of_visited_experts,
        r"layers.\d.mlp.scales.\d has no gradient, not even zeros, where no row",
    ),
    "a class that cannot be tried": (
        _fail,
        r"it has experts, and a small Qwen3MoeModel that shows how they route cannot be run on the host .*need a GPU",
    ),
}


def _model_with(monkeypatch: pytest.MonkeyPatch, case: str) -> PreTrainedModel:
    init = Block.__init__

    def init_with_more(block: Any, config: Any) -> None:
        init(block, config)
        if case == "a state of the rows that passed":
            block.register_buffer("seen", torch.zeros(()))
        if case == "parameters of visited experts alone":
            block.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(block.gate.num_experts))

    monkeypatch.setattr(Block, "__init__", init_with_more)
    monkeypatch.setattr(Block, "forward", NOT_EXACT[case][0])
    return on_meta(Qwen3MoeConfig(num_hidden_layers=2))


@pytest.mark.parametrize("case", NOT_EXACT)
def test_rows_that_are_not_alone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, says = _model_with(monkeypatch, case), NOT_EXACT[case][1]
    with pytest.raises(ModelError, match=f"Qwen3MoeForCausalLM cannot run exactly .*: .*{says}"):
        check_model_on_this_rank(model, ())
    if case == "capacity":
        with pytest.raises(ModelError, match=says), World(Layout(ranks=1), backend=backend()) as world:
            prepare(model, world, shard_parameters=False)


def test_experts_that_are_not_what_we_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = qwen3_moe.Qwen3MoeExperts.forward
    monkeypatch.setattr(qwen3_moe.Qwen3MoeExperts, "forward", lambda *args: 2 * stock(*args))
    with pytest.raises(ModelError, match=r"layers.0.mlp.experts \(Qwen3MoeExperts\) computes something of its own"):
        check_model_on_this_rank(on_meta(Qwen3MoeConfig(num_hidden_layers=2)), ())


def _train(model: PreTrainedModel) -> None:
    with World(Layout(ranks=1), backend=backend()) as world:
        prepared = prepare(model, world, shard_parameters=False)
        run_step(prepared, plan_fixed((9, 5), world.home, cp=1), texts((9, 5)), world)


def test_draws_of_experts_are_refused_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("phimoe")
    assert try_small_model_of_class(model).draws and not try_small_model_of_class(model).reasons
    with pytest.raises(ModelError, match=r"PhimoeForCausalLM draws .*: exponential_ .*it does so by its code"):
        _train(model)
    monkeypatch.setattr(Block, "forward", _with_noise)
    monkeypatch.setattr("longspan.model.seams.meta_pass._draws_numbers", lambda *_: False)
    with pytest.raises(ModelError, match="draws at random outside attention in training: numbers by which a small"):
        _train(family_model("qwen3_moe"))


# ---- what a model does with images: rows at placeholders and positions, or more than that


def test_images_that_enter_as_rows_and_positions_alone() -> None:
    assert try_images(CONFIG_MAPPING["llava_next"]()).reasons == ()  # tiles, unpadded, and rows that end lines
    assert try_images(config_of("qwen3-vl")).reasons == ()  # parts for deeper layers, positions of three numbers
    assert video_tokens(config_of("qwen3-vl")).placeholder == 59


def test_images_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_images(config_of("gemma3")).reasons == ()
    monkeypatch.setattr(trials, "_results", {})
    monkeypatch.setattr(image_trial, "_spans_of_layers", lambda *_: {})
    (reason,) = try_images(config_of("gemma3")).reasons
    assert reason.startswith("it does more with images than put their rows in the places of their placeholders: logits")
