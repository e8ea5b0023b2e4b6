"""The same families under tensor parallelism and over pipeline stages: equal to the stock model, or refused by name."""

import re
from functools import cache, partial

import pytest

from longspan.comm import World
from longspan.doctor.stock import whole_float64
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.parts import find_parts
from longspan.model.pipeline.stages import refuse_dependent_layers
from longspan.model.seams.attention_calls import IMPLEMENTATION, keep_layer_arguments
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.seams import wrappers
from tests.model.seams.families import LENGTHS, errors_of, gradient_error, here, tiny
from tests.model.stock import dense_answer, gradients_of, texts

EXACT_OVER_TP = [  # Nemotron has a plan from transformers 5.21 on
    family
    for family in here(["nemotron", "gemma4", "gemma4 without sharing"])
    if tiny(family).config.base_model_tp_plan
]
EXACT_OVER_STAGES = here(["nemotron", "stablelm", "gemma4 without sharing"])
TP, PP = {"tp": 2}, {"pp": 2}
REFUSED = {
    "opt over tp": ("opt", TP, "OPTForCausalLM has no tensor-parallel plan"),
    "stablelm over tp": ("stablelm", TP, "StableLmForCausalLM has no tensor-parallel plan"),
    "dbrx over tp": ("dbrx", TP, "DbrxForCausalLM has no tensor-parallel plan"),
    "opt over stages": ("opt", PP, "OPTForCausalLM cannot be cut into pipeline stages"),
    "inputs of each layer": ("gemma4", PP, "parameters that its pipeline plan does not place .*per_layer"),
}


def _over_tp(rank: int) -> dict[str, tuple[float, float]]:
    errors = {}
    with World(Layout(ranks=2, tp=2), backend=backend()) as world, whole_float64():
        for family in EXACT_OVER_TP:
            stock = dense_answer(tiny(family), texts(LENGTHS))
            errors[family] = errors_of(partial(tiny, family), world, stock, cp=1)
        documents = wrappers.plain_texts()
        stock = dense_answer(wrappers.tiny("gemma3"), documents)
        errors["gemma3"] = errors_of(partial(wrappers.tiny, "gemma3"), world, stock, cp=1, documents=documents)
    return errors


def test_tensor_parallelism_equals_the_stock_model() -> None:
    for errors in run_ranks(_over_tp, 2):
        assert len(errors) == len(EXACT_OVER_TP) + 1 and max(max(pair) for pair in errors.values()) < 1e-12, errors


def _over_stages(rank: int) -> dict[str, tuple[float, float, int]]:
    """Errors of the loss and of the gradients that are here, and how many there are."""
    errors = {}
    with World(Layout(ranks=2, pp=2), backend=backend()) as world, whole_float64():
        for family in EXACT_OVER_STAGES:
            loss, exact = dense_answer(tiny(family), texts(LENGTHS))
            model = prepare(tiny(family), world, activation_checkpointing="full")
            plan = plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=40)
            result, gradients = run_step(model, plan, texts(LENGTHS), world), gradients_of(model)
            error = gradient_error(gradients, {name: exact[name] for name in gradients})
            errors[family] = (abs(result.loss / loss - 1), error, len(gradients))
    return errors


def test_stages_equal_the_stock_model() -> None:
    ranks = run_ranks(_over_stages, 2)
    for family in EXACT_OVER_STAGES:
        assert all(max(errors[family][:2]) < 1e-12 for errors in ranks), ranks
        assert sum(errors[family][2] for errors in ranks) >= len([*tiny(family).parameters()])


def _refusals(rank: int) -> dict[str, str]:
    messages = {}
    for home in (TP, PP):
        with World(Layout(ranks=2, **home), backend=backend()) as world:
            for case, (family, of_case, _) in REFUSED.items():
                if of_case is home and here([family]):
                    with pytest.raises(ModelError) as refused:
                        prepare(tiny(family), world)
                    messages[case] = str(refused.value)
    return messages


@cache
def _messages() -> list[dict[str, str]]:
    return run_ranks(_refusals, 2)


@pytest.mark.parametrize("case", [case for case in REFUSED if here([REFUSED[case][0]])])
def test_refused_by_name_on_every_rank(case: str) -> None:
    for messages in _messages():
        assert re.search(REFUSED[case][2], messages[case]), messages


def test_layers_that_need_more_of_earlier_ones_than_their_hidden_states() -> None:
    model, kept = tiny("nemotron"), dict[str, int]()
    model.set_attn_implementation(IMPLEMENTATION)
    keep_layer_arguments(model)
    stages, parts = (range(1), range(1, 2)), find_parts(model)
    refuse_dependent_layers(model, parts, stages)
    first, second = model.model.layers
    model.model.register_forward_pre_hook(lambda *_: kept.clear())
    first.register_forward_hook(lambda *_: kept.update(keys=1))
    second.register_forward_pre_hook(lambda *_: kept.__getitem__("keys") and None)
    with pytest.raises(ModelError, match=r"layers 1 to 1 do not run without those before them \(KeyError: 'keys'\)"):
        refuse_dependent_layers(model, parts, stages)
