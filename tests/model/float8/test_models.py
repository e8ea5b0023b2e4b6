"""Models in float8 by rows beside the same formulas in float64 on one process, and what is refused."""

import re
from dataclasses import dataclass, field
from typing import Any

import peft
import pytest
import torch
from torch import nn

from longspan.comm import World
from longspan.errors import ModelError
from longspan.evaluation import evaluate
from longspan.layout import Layout
from longspan.model import load_model, prepare, preset_config
from longspan.model.execution import model_execution
from longspan.model.float8_layers import float8_linears
from longspan.model.marks import find_float8_weight
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.float8.dense import float8_on_cpus, random_model, use_dense_float8
from tests.model.float8.test_products import count_quantised
from tests.model.stock import dense_answer, gradients_of, prepare_untried, texts, worst

LENGTHS = (13, 1, 30, 7, 2, 18)


@dataclass(frozen=True)
class Home:
    """Ranks, how a model is prepared on them, and the degree of plans; `experts` of a mixture."""

    layout: Layout
    cp: int = 1
    experts: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.layout} {self.experts} {self.options}"


def _whole(*home: Any, **options: Any) -> Any:
    return pytest.param(Home(*home, **options), marks=pytest.mark.whole)


HOMES = [
    Home(Layout(ranks=1), options={"activation_checkpointing": "full"}),
    Home(Layout(ranks=2), 2),
    _whole(Layout(ranks=4, pp=2), 2, options={"checkpoint_policies": "selective"}),
    _whole(Layout(ranks=2), 2, options={"mlp_tile_tokens": 7, "activation_checkpointing": "selective"}),
]
MIXTURES = [
    Home(Layout(ranks=2, ep=2), 2, experts=4),
    _whole(Layout(ranks=2, tp=2), experts=4),
    _whole(Layout(ranks=2, pp=2), experts=4),
]


def answer(rank: int, home: Home) -> tuple[float, float, dict[str, torch.Tensor]]:
    documents, prepared = texts(LENGTHS), prepare if home.layout.slots == 1 else prepare_untried
    with float8_on_cpus(), World(home.layout, backend=backend()) as world:
        model = prepared(random_model(home.experts), world, float8="rowwise", **home.options)
        assert "float8 by rows" in model_execution(model).words["products"]
        plan = plan_fixed(LENGTHS, home.layout, cp=home.cp, max_tokens_per_slot=40)
        evaluated = evaluate(model, documents, plan, world).loss
        return run_step(model, plan, documents, world).loss, evaluated, gradients_of(model)


def answers(home: Home) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    return run_ranks(answer, len(home.layout.ranks), home) if len(home.layout.ranks) > 1 else [answer(0, home)]


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_loss_and_gradients_are_those_of_the_formulas(home: Home) -> None:
    loss, gradients = dense_answer(use_dense_float8(random_model()), texts(LENGTHS))
    plain, _ = dense_answer(random_model(), texts(LENGTHS))
    assert abs(loss - plain) > 1e-5  # float8 is there
    for of_rank, evaluated, some in answers(home):
        assert abs(of_rank - loss) <= 1e-12 * loss and abs(evaluated - loss) <= 1e-12 * loss
        assert worst(some, {name: gradients[name] for name in some}) <= 1e-11 and (home.layout.pp > 1 or len(some) > 20)


@pytest.mark.parametrize("home", MIXTURES, ids=str)
def test_mixtures_are_the_same_under_every_home(home: Home) -> None:
    ((loss, evaluated, gradients),) = answers(Home(Layout(ranks=1), experts=4))
    bound, of_gradients = (1e-12, 1e-11) if home.layout.tp == 1 else (1e-2, 0.5)
    for of_rank, of_evaluation, some in answers(home):
        assert abs(of_rank - loss) <= bound * loss and abs(of_evaluation - evaluated) <= bound * loss
        assert worst(some, {name: gradients[name] for name in some}) <= of_gradients


@pytest.mark.parametrize(("experts", "rows"), [(0, 7), (4, 7), (0, 0)])
def test_tiles_bring_each_weight_to_float8_once_a_pass(
    experts: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, documents = count_quantised(monkeypatch), texts(LENGTHS)
    with float8_on_cpus(), World(Layout(ranks=1), backend="gloo") as world:
        plan = plan_fixed(LENGTHS, world.home, cp=1)
        plain = prepare_untried(random_model(experts), world, float8="rowwise")
        loss, gradients = run_step(plain, plan, documents, world).loss, gradients_of(plain)
        how: dict[str, Any] = {"mlp_tile_tokens": rows, "activation_checkpointing": "full"}
        model = prepare_untried(random_model(experts), world, float8="rowwise", **how)
        calls.clear()
        tiled = run_step(model, plan, documents, world).loss
    assert abs(tiled - loss) <= 1e-12 * loss and worst(gradients_of(model), gradients) <= 1e-12
    attention, feed = 2 * 4, 2 * (2 if experts else 3)  # weights of two layers
    # A recomputed layer stops before its MLP in tiles, which runs forward once more with the gradients.
    assert calls.count("quantise_columns") == attention + feed
    again = attention + feed - (0 if rows else 2)  # its last product is left out
    assert calls.count("quantise_rows") == attention + feed + again


def test_adapters_are_trained_over_frozen_weights_in_float8() -> None:
    documents, results = texts(LENGTHS), list[Any]()
    for dense in (True, False):
        model: Any = peft.get_peft_model(
            random_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        )
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        stock = model.get_base_model()
        if dense:
            narrow = [module for name, module in stock.named_modules() if "lora_" in name]
            use_dense_float8(stock)
            for module in narrow:
                vars(module).pop("forward", None)
            results.append(dense_answer(stock, documents))
            continue
        with float8_on_cpus(), World(Layout(ranks=1), backend="gloo") as world:
            prepared = prepare(model, world, float8="rowwise")
            assert "float8 by rows: 14 linears" in model_execution(prepared).words["products"]
            plan = plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=40)
            results.append((run_step(prepared, plan, documents, world).loss, gradients_of(prepared)))
    (loss, gradients), (of_step, some) = results
    assert abs(of_step - loss) <= 1e-12 * loss and worst(some, gradients) <= 1e-11


CHOSEN = {
    "qwen3-tiny": (14, 0, ()),
    "qwen3-moe-tiny": (8, 2, ()),
    "qwen3-next-tiny": (22, 4, ("in_proj_ba", "shared_expert_gate")),
    "granite-hybrid-tiny": (18, 4, ()),
}


@pytest.mark.parametrize("preset", CHOSEN)
def test_routers_gates_and_decays_stay_as_they_are(preset: str) -> None:
    model = load_model(config=preset_config(preset, vocab_size=64), dtype="float32", seed=0)
    chosen, (count, experts, left) = float8_linears(model), CHOSEN[preset]
    others = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - chosen.keys()
    assert len(chosen) == count and "lm_head" in others
    assert {re.sub(r".*\.layers\.\d+\.\w+\.", "", name) for name in others - {"lm_head"}} == {*left}
    with float8_on_cpus(), World(Layout(ranks=1), backend="gloo") as world:
        prepared = prepare_untried(model, world, float8="rowwise")
        assert ("experts of" in model_execution(prepared).words["products"]) is bool(experts)
        assert sum(find_float8_weight(m, "down_proj") is not None for m in prepared.modules()) == experts


def refusals(rank: int) -> tuple[str, str]:
    words, narrow = list[str](), preset_config("qwen3-tiny", vocab_size=64)
    narrow.intermediate_size = 16 * 17
    with World(Layout(ranks=range(2), tp=2), backend=backend()) as world:
        for setting in ("rowwise", "tensor"):
            with pytest.raises(ModelError) as error:
                prepare(random_model(), world, float8=setting)
            words.append(str(error.value))
        with float8_on_cpus(), pytest.raises(ModelError) as error:
            prepare(load_model(config=narrow, dtype="float32", seed=0), world, float8="rowwise")
    return f"{words[0]} {error.value}", words[1]


def test_what_cannot_be_in_float8_is_refused_on_every_rank() -> None:
    for words, of_tensor in run_ranks(refusals, 2):
        for part in (
            'float8 is "rowwise" for Qwen3ForCausalLM, and needs a GPU of compute capability 8.9 or more, ',
            "and this rank computes on a CPU; its other arithmetic must be in bfloat16, and is in float64",
            "that 16 divides: those of model.layers.0.mlp.gate_proj",
            " on each of 2 tensor-parallel ranks are (136, 192), ",
            "as of 5 more; leave float8 out",
        ):
            assert part in words, words
        assert 'float8 is \'tensor\'; use "rowwise" (one scale a row), or "" for none' in of_tensor
