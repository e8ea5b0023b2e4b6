"""Whole weights by name under every home equal the stock model's, and adapters merge as peft merges them."""

from functools import cache
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from longspan import Layout, World, prepare, weights_by_name
from longspan.errors import ModelError
from longspan.testing import backend, run_ranks
from tests.model.deep import deep
from tests.model.lora.adapted import adapted
from tests.model.stock import error, tiny

FOLDED = {"pipeline_schedule": "zbv", "virtual_stages": 2}
CASES: dict[str, tuple[Layout, str, str, dict[str, Any]]] = {  # a home, a family, an adapter, how it is prepared
    "shards": (Layout(2), "qwen3", "", {}),
    "copies": (Layout(2), "qwen3", "", {"shard_parameters": False}),
    "tp 2": (Layout(2, tp=2), "llama", "", {}),
    "pp 2, tied": (Layout(2, pp=2), "qwen3", "", {}),
    "pp 2, folded": (Layout(2, pp=2), "llama", "", FOLDED),
    "experts, tp 2": (Layout(2, tp=2), "qwen3-moe", "", {}),
    "experts, ep 2": (Layout(2, ep=2), "qwen3-moe", "", {}),
    "every linear": (Layout(2), "llama", "every linear", {}),
    "every linear, pp 2": (Layout(2, pp=2), "llama", "every linear", {}),
    "row-wise, tp 2": (Layout(2, tp=2), "llama", "row-wise alone", {}),
    "ends": (Layout(2), "llama", "embedding and head", {}),
    "dora": (Layout(2), "llama", "dora", {}),
    "a module that is trained": (Layout(2), "llama", "modules_to_save", {}),
}
MERGED = [name for name, (_, _, adapter, _) in CASES.items() if adapter]
WHOLE = ("copies", "tp 2", "pp 2, folded", "experts, tp 2", "row-wise, tp 2", "every linear")  # only in the whole table


def stock(family: str, adapter: str) -> Any:
    return adapted(family, adapter) if adapter else deep(family, torch.float64, 4, 62)


def _errors(name: str, merge: bool) -> dict[str, float]:
    home, family, adapter, options = CASES[name]
    with World(home, backend=backend(), timeout=60) as world:
        prepared = prepare(stock(family, adapter), world, probe=False, **options)
        pairs = [(n, w.clone()) for n, w in weights_by_name(prepared, world, merge_adapter=merge)]
        assert all(w.device.type == world.device.type and type(w) is Tensor for _, w in pairs)
    weights, wanted = dict(pairs), stock_weights(family, adapter, merge)
    assert len(pairs) == len(weights), "a weight came twice"
    return {n: error(weights[n], wanted[n]) if n in weights and n in wanted else torch.inf for n in weights | wanted}


def stock_weights(family: str, adapter: str, merge: bool) -> dict[str, Tensor]:
    """The stock model's, each tied one once; merged by peft, or with the adapter as peft saves it."""
    model = stock(family, adapter)
    if not adapter:
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set[str]()
        return {name: x for name, x in model.state_dict().items() if name not in tied}
    if merge:
        return model.merge_and_unload().state_dict()
    of_adapter = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {**tiny(family, torch.float64, vocabulary=62).state_dict(), **of_adapter}


@cache
def results(whole: bool) -> list[dict[str, dict[str, float]]]:
    return run_ranks(compare, 2, whole, timeout=240)


def compare(rank: int, whole: bool) -> dict[str, dict[str, float]]:
    """The errors of each weight by case."""
    names = [name for name in CASES if (name in WHOLE) == whole]
    found = {name: _errors(name, merge=False) for name in names}
    return found | {f"{name}, merged": _errors(name, merge=True) for name in names if name in MERGED}


ROWS = [(name, suffix) for suffix in ("", ", merged") for name in (MERGED if suffix else CASES)]


@pytest.mark.parametrize(
    "case, whole",
    [pytest.param(n + end, n in WHOLE, id=n + end, marks=[pytest.mark.whole] * (n in WHOLE)) for n, end in ROWS],
)
def test_weights_are_those_of_the_stock_model(case: str, whole: bool) -> None:
    for found in results(whole):
        limit = 1e-14 if case.endswith("merged") else 0.0  # of what is not merged, every bit
        assert max(found[case].values()) <= limit, {n: e for n, e in found[case].items() if e > limit}


def refuse(rank: int) -> list[str]:
    """What is said of models that are not prepared, and of tied ends that have an adapter."""
    said = list[str]()
    with World(Layout(2), backend=backend(), timeout=60) as world:
        adapted, copied = (
            prepare(peft.get_peft_model(deep("qwen3", torch.float64, 2, 62), config), world, probe=False)
            for config in (
                peft.LoraConfig(target_modules=["embed_tokens"]),
                peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
            )
        )
        for model, merge in ((deep("llama", torch.float64, 2), False), (adapted, True), (copied, True)):
            with pytest.raises(ModelError) as refusal:
                weights_by_name(model, world, merge_adapter=merge)
            said.append(str(refusal.value))
    return said


def test_refusals_come_before_the_first_weight() -> None:
    for said in run_ranks(refuse, 2):
        assert "longspan.prepare" in said[0]
        assert "embed_tokens.base_layer.weight is trained, and is the weight of the other end" in said[1]
        assert "lm_head.modules_to_save.default.weight is trained, and is the weight of the other end" in said[2]
