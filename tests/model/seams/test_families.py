"""Families that need a seam of their own equal the stock model, document by document, or are refused by name.

Loss and every gradient, over slots, under tensor parallelism and over pipeline stages; and text through a model of
several modalities.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import Layout, World, bind, load_model, plan_dynamic, plan_fixed, prepare, run_step, save_model
from longspan.doctor.stock import compute_in_float64
from longspan.errors import ModelError
from longspan.model.layers import decoder_layers, towers_beside_text_model
from longspan.model.parts import find_parts
from longspan.model.pipeline.stages import refuse_dependent_layers
from longspan.model.seams.attention_calls import IMPLEMENTATION
from longspan.model.seams.chosen_keys.indexers import order_equal_scores, shard_indexers
from longspan.model.seams.running_layer import hook_layer_arguments
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer
from tests import parity
from tests.model.seams import wrappers
from tests.model.seams.families import FAMILIES, LENGTHS, MANY_HEADS, RENAMED, gradient_error, here, tiny
from tests.model.stock import Answer, answer, prepare_untried, texts, weights_of

Row = tuple[str, dict[str, int], str, dict[str, Any]]  # a family, the axes of its home, a type, options of prepare
TP, PP = {"tp": 2}, {"pp": 2}
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
SEGMENTS = {"segment_layers": 2}
COPIES = {"activation_checkpointing": "none", "shard_parameters": False}
TEXT = "text of "  # a model of several modalities
WRAPPERS = [TEXT + name for name in wrappers.here()]


def _over_slots(families: Sequence[str], kind: str, options: dict[str, Any]) -> list[Row]:
    return [(family, {}, kind, options) for family in families]


TABLES: dict[str, tuple[int, list[Row]]] = {
    "2 ranks": (  # a family of each kind of block; indexers over stages are in test_latents.py
        2,
        [
            *_over_slots(here(["opt", "stablelm", "dbrx"]), "p2p", FULL),
            *_over_slots(here(["nemotron"]), "all_gather", SELECTIVE),
            *_over_slots(WRAPPERS[-1:], "p2p", COPIES),
            *_over_slots(here(["deepseek-v3.2"]), "a2a", FULL),
            *_over_slots(here([f"longcat{RENAMED}", f"hrm{RENAMED}"]), "p2p", FULL),
            *((family, TP, "p2p", {}) for family in here(["gemma4"])),
        ],
    ),
    "more of 2 ranks": (
        2,
        [
            *((family, PP, "p2p", FULL) for family in here(["gemma4 without sharing", "glm-5"])),
            *_over_slots(here(["gemma4"]), "all_gather", SELECTIVE),
            *_over_slots(here([f"deepseek-v3.2{MANY_HEADS}"]), "p2p", COPIES),
            *_over_slots(here(["glm-5", "hy-v4", "longcat", "hrm"]), "all_gather", SELECTIVE),
            *_over_slots(here(["longcat", "hrm"]), "dynamic", FULL | SEGMENTS),
            *((family, axes, "p2p", FULL) for family, axes in (("longcat", PP), ("hrm", TP)) if here([family])),
        ],
    ),
    "3 ranks": (
        3,
        _over_slots(
            [*here([*FAMILIES]), *(name for name in WRAPPERS if name[len(TEXT) :] in ("gemma3", "gemma4"))], "p2p", FULL
        ),
    ),
}


def _model(family: str) -> Any:
    return wrappers.tiny(family[len(TEXT) :]) if family.startswith(TEXT) else tiny(family)


@cache
def _exact(family: str) -> Answer:
    """Few index heads tie, of which the lowest positions are chosen; of many the model's own choice is unique."""
    with compute_in_float64():
        model = _model(family).train()
        if MANY_HEADS not in family:
            order_equal_scores(model)
        return answer(model, _documents(family))


def _documents(family: str) -> Any:
    return wrappers.plain_texts() if family.startswith(TEXT) else texts(LENGTHS)


def cases_of(ranks: int, rows: Sequence[Row]) -> dict[str, parity.Case]:
    """Rows that differ in their types alone are one case, of a model that is prepared once."""
    cases = dict[str, parity.Case]()
    for family, axes, kind, options in rows:
        case, name = _case(ranks, family, axes, kind, options), f"{family}, {axes}, {options}"
        cases[name] = replace(case, plans={**cases[name].plans, **case.plans}) if name in cases else case
    return cases


def _case(ranks: int, family: str, axes: dict[str, int], kind: str, options: dict[str, Any]) -> parity.Case:
    home = Layout(ranks=ranks, **axes)
    if kind == "dynamic":
        plan = plan_dynamic(LENGTHS, home, max_tokens_per_slot=40)
    else:
        more: dict[str, Any] = {"cp_comm_type": kind, "max_tokens_per_slot": 40 if home.pp > 1 else None}
        if kind == "a2a+p2p":
            more["hierarchical_context_parallel_sizes"] = (2, home.slots // 2)
        plan = plan_fixed(LENGTHS, home, cp=home.slots, **more)
    return parity.Case(
        partial(_model, family),
        home,
        {kind: plan},
        _documents(family),
        _exact(family),
        options=options,
        in_float64=True,
        compare=gradient_error,
    )


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.whole] * (n != "2 ranks")) for n in TABLES])
def test_equals_the_stock_model(name: str) -> None:
    cases = cases_of(*TABLES[name])
    first = next(iter(cases))
    parity.check(cases | {first: replace(cases[first], tried=True)})


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("longcat", ["model.layers.0", "model.layers.1"]),
        ("hrm", [f"model.{stack}_module.layers.{layer}" for stack in "LH" for layer in (0, 1)]),
    ],
)
def test_layers_are_found_where_a_configuration_counts_attentions_or_passes(family: str, names: list[str]) -> None:
    if here([family]):
        assert [*decoder_layers(tiny(family))] == names


REFUSED = {
    "opt over tp": ("opt", TP, "OPTForCausalLM has no tensor-parallel plan"),
    "opt over stages": ("opt", PP, "OPTForCausalLM cannot be cut into pipeline stages"),
    "entries over tp": ("deepseek-v4", TP, r"tp 2 does not divide 1 \(key/value heads\)"),
    "streams over stages": ("deepseek-v4", PP, "parameters that its pipeline plan does not place .*hc_head"),
    "identity experts": ("longcat", {"ep": 2}, "no experts to deal out; use ep 1; its own are outside transformers'"),
    "stacks over stages": ("hrm", PP, "HrmTextForCausalLM cannot be cut into pipeline stages: .* has .*L_module"),
    "inputs of each layer": ("gemma4", PP, "parameters that its pipeline plan does not place .*per_layer"),
}


def _refusals(rank: int) -> dict[str, str]:
    messages = {}
    for case, (family, home, _) in REFUSED.items():
        with World(Layout(ranks=2, **home), backend=backend()) as world:
            if here([family]):
                with pytest.raises(ModelError) as refused:
                    prepare(tiny(family), world)
                messages[case] = str(refused.value)
    return messages


def test_refused_by_name_on_every_rank() -> None:
    for messages in run_ranks(_refusals, 2):
        for case, message in messages.items():
            assert re.search(REFUSED[case][2], message), (case, message)


def test_layers_that_need_more_of_earlier_ones_than_their_hidden_states() -> None:
    model, kept = tiny("nemotron"), dict[str, int]()
    model.set_attn_implementation(IMPLEMENTATION)
    hook_layer_arguments(model)
    stages, parts = (range(1), range(1, 2)), find_parts(model)
    refuse_dependent_layers(model, parts, stages)
    first, second = model.model.layers
    model.model.register_forward_pre_hook(lambda *_: kept.clear())
    first.register_forward_hook(lambda *_: kept.update(keys=1))
    second.register_forward_pre_hook(lambda *_: kept.__getitem__("keys") and None)
    with pytest.raises(ModelError, match=r"layers 1 to 1 do not run without those before them \(KeyError: 'keys'\)"):
        refuse_dependent_layers(model, parts, stages)


@pytest.mark.skipif(not here(["glm-5"]), reason="this transformers has no such class")
def test_layers_that_may_begin_a_stage_are_named() -> None:
    model = tiny("glm-5")  # the second and the last layer take the choice of the one before
    model.set_attn_implementation(IMPLEMENTATION)
    hook_layer_arguments(model)
    shard_indexers(model)
    with pytest.raises(ModelError, match=r"layers 1 to 3 do not run .*; later stages may begin with layers 2: choose"):
        refuse_dependent_layers(model, find_parts(model), (range(1), range(1, 4)))


# ---- models of several modalities


def _trained(rank: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Weights after a step, those of the folder that was saved, read sharded, and what is said of an image."""
    with World(Layout(ranks=2), backend=backend()) as world:
        model = prepare_untried(load_model(folder, dtype="float32", sharded=True), world)
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        run_step(model, plan, wrappers.plain_texts(), world, optimizer=build_optimizer(model, lr=0.1))
        save_model(model, folder / "saved", world)
        again = prepare_untried(load_model(folder / "saved", dtype="float32", sharded=True), world)
        shard = bind(plan.micro_batches[0], world).with_padding()
        inputs = {"input_ids": torch.ones(1, shard.local_rows, dtype=torch.long), "shard": shard}
        with pytest.raises(ModelError) as refused:
            model(**inputs, position_ids=shard.position_ids[None], pixel_values=torch.zeros(1, 3, 8, 8))
        return weights_of(model), weights_of(again), str(refused.value)


def test_training_from_a_folder_leaves_the_towers_alone(tmp_path: Path) -> None:
    stock = wrappers.tiny("gemma3").float()
    assert [*decoder_layers(stock)] == [f"model.language_model.layers.{i}" for i in range(4)]
    assert [type(tower).__name__ for tower in towers_beside_text_model(stock)] == [
        "SiglipVisionModel",
        "Gemma3MultiModalProjector",
    ]
    stock.save_pretrained(tmp_path)
    towers = {id(parameter) for tower in towers_beside_text_model(stock) for parameter in tower.parameters()}
    for trained, saved, refused in run_ranks(_trained, 2, tmp_path):
        for name, parameter in stock.named_parameters():
            assert torch.equal(trained[name], saved[name])
            assert torch.equal(trained[name], parameter) == (id(parameter) in towers), name
        assert "Gemma3ForConditionalGeneration got pixel_values=" in refused.replace("FSDP", "")
        assert "longspan.MultimodalModel, docs/bridge.md" in refused
