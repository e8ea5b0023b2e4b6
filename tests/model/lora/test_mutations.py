"""Terms of an adapter that ranks could forget without an error, left out on purpose: the tests would show it."""

import pytest

from longspan.comm import World
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.adapters import peft_modules
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.lora.adapted import LENGTHS, adapted, dense_answer
from tests.model.stock import error, gradients_of, texts
from tests.mutation import mutated

SPLIT, DISABLED = "model.tensor_parallel.styles", "model.lora"
FIRST, SECOND = "else first:\n        ", "for linear in second:\n            "
SUMMED = "sum_partial_gradients(linear, key)"
SCALING = "scaling forgotten"  # peft's own term: the layers' factor is set to one
# What is wrong -> the module, what stands there, and in its place; and what shows it.
MUTATIONS = {
    "nothing": (None, set[str]()),
    "no sum of A's gradient, column-wise": ((SPLIT, f"{FIRST}{SUMMED}", f"{FIRST}pass"), {"lora_A"}),
    "no sum of B's gradient, row-wise": ((SPLIT, f"{SECOND}{SUMMED}", f"{SECOND}pass"), {"lora_B"}),
    "bias on every rank": (("model.tensor_parallel.styles", '"bias": return_none', '"bias": local_tensor'), {"loss"}),
    SCALING: (None, {"loss", "lora_A", "lora_B"}),
    "adapter not left out": ((DISABLED, "module._disable_adapters = True", "pass"), {"base"}),
}


def _notice(rank: int) -> dict[str, set[str]]:
    """By what is wrong, what of a step under tp 2 is not that of one process."""
    noticed, home, documents = dict[str, set[str]](), Layout(ranks=2, tp=2), texts(LENGTHS)
    with World(home, backend=backend(), timeout=60) as world:
        loss, base_loss, gradients = dense_answer("biased", "every linear", world.device)
        for name, (change, _) in MUTATIONS.items():
            with mutated(change):
                peft_model = adapted("biased", "every linear")
                model, plan = prepare(peft_model, world), plan_fixed(LENGTHS, home, cp=1)
                for layer in peft_modules(model).values() if name == SCALING else ():
                    layer.scaling = {"default": 1.0}  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
                with peft_model.disable_adapter():
                    base = run_step(model, plan, documents, world, backward=False).loss
                step, found = run_step(model, plan, documents, world).loss, gradients_of(model)
            wrong = {"loss"} if abs(step / loss - 1) > 1e-9 else set[str]()
            wrong |= {"base"} if abs(base / base_loss - 1) > 1e-9 else set()
            for key in gradients:
                wrong |= {key.split(".")[-3]} if error(found[key], gradients[key]) > 1e-9 else set()
            noticed[name] = wrong
    return noticed


@pytest.mark.whole
def test_every_term_that_is_left_out_is_noticed() -> None:
    for noticed in run_ranks(_notice, 2, timeout=200):
        assert not noticed["nothing"]
        for name, (_, shown) in MUTATIONS.items():
            assert shown <= noticed[name], (name, noticed[name])
