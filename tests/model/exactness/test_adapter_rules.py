"""What an adapter may not be: one clear error, from the configuration and the layers alone, on every rank."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare, without_adapter
from longspan.model.adapters import find_adapter, unwrap_model
from longspan.model.exactness.check_model import check_adapter
from longspan.model.tensor_parallel.tensor_parallel import refuse_tensor_parallel
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.lora.adapted import adapted
from tests.model.stock import texts, tiny


def lora(**more: Any) -> Any:
    return peft.get_peft_model(tiny("llama"), peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **more}))


def ia3() -> Any:
    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return peft.get_peft_model(tiny("llama"), config)


def two() -> Any:
    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def merged() -> Any:
    model = lora()
    model.merge_adapter()
    return model


def frozen() -> Any:
    model = lora()
    model.requires_grad_(False)
    return model


def of_two_types() -> Any:
    model = lora()
    first = next(p for p in model.parameters() if p.requires_grad)
    first.data = first.data.double()
    return model


ONE, TP, PP = Layout(ranks=2), Layout(ranks=2, tp=2), Layout(ranks=2, pp=2)
CASES: dict[str, tuple[Callable[[], Any], Layout, str]] = {
    "another method": (ia3, ONE, "of peft's method IA3.*merge_and_unload"),
    "two adapters": (two, ONE, "has 2 adapters .default, second."),
    "merged": (merged, ONE, "is merged into its weight"),
    "frozen": (frozen, ONE, "none of its parameters requires a gradient"),
    "two types": (of_two_types, ONE, "of float32 and float64"),
    "biases": (lambda: lora(bias="all"), ONE, "bias is 'all'"),
    "rows of an embedding": (
        lambda: lora(trainable_token_indices=[1, 2]),
        ONE,
        "trl.clone_chat_template, and train modules_to_save=",
    ),
    "dropout under tp": (lambda: lora(lora_dropout=0.1), TP, "lora_dropout is 0.1.*use tp 1"),
    "dora under tp": (lambda: lora(use_dora=True), TP, "use_dora is set"),
    "copies under tp": (lambda: lora(modules_to_save=["lm_head"]), TP, "modules_to_save .lm_head."),
    "a tied head in stages": (
        lambda: peft.get_peft_model(tiny("qwen3"), peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"])),
        PP,
        "tied to the head.*use pp 1",
    ),
}


@pytest.mark.filterwarnings("ignore")  # peft's own, of merged weights
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_exact_is_refused(case: str) -> None:
    make, layout, message = CASES[case]
    model, world = unwrap_model(make()), SimpleNamespace(home=layout)
    with pytest.raises(ModelError, match=message):
        adapter = find_adapter(model)
        assert adapter is not None
        check_adapter(model, adapter, world)  # pyright: ignore[reportArgumentType]
        refuse_tensor_parallel(model, world, sequence_parallel=False)  # pyright: ignore[reportArgumentType]


def _on_ranks(rank: int) -> list[str]:
    """What a prepared model refuses."""
    told = list[str]()

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(ModelError) as error:
            call()
        told.append(str(error.value))

    layout = Layout(ranks=2)
    with World(layout, backend=backend(), timeout=60) as world:
        torch.manual_seed(rank)
        refused(lambda: prepare(lora(), world))
        peft_model = adapted("llama", "every linear", torch.float32)
        model, documents = prepare(peft_model, world), texts((8, 9))
        plan = plan_fixed([8, 9], layout, cp=2)
        with without_adapter(model):
            refused(lambda: run_step(model, plan, documents, world))
        refused(lambda: peft_model.save_pretrained("x"))
        refused(peft_model.merge_and_unload)
    return told


def test_what_a_prepared_model_refuses() -> None:
    for told in run_ranks(_on_ranks, 2, timeout=100):
        assert len(told) == 4
        assert "not the same on ranks 0 and 1" in told[0] and "adapter is left out" in told[1]
        assert "longspan.save_model" in told[2] and "export RUN FOLDER --merge" in told[3]
