"""Models prepared with probe=False: the first pass refuses, on every rank, what the probe would have refused."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import LongspanError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.seams.meta_pass import FirstPass
from longspan.plan import Group, MicroBatch, Plan, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.stock import VOCABULARY, texts, tiny, weights_of, worst
from tests.versions import transformers_before

LENGTHS = (9, 4)
_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_PLAIN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {
    f"{name}_{kind}": 0.0
    for name in ("attn", "resid", "embd", "embed", "hidden", "attention")
    for kind in ("pdrop", "dropout")
}
BYPASSING: dict[str, tuple[str, dict[str, Any]]] = {
    "FalconConfig": ("FalconAttention", _PLAIN),
    "BloomConfig": ("BloomAttention", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "MptConfig": ("MptAttention", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    **({"CodeGenConfig": ("CodeGenAttention", _GPT | {"rotary_dim": 4})} if transformers_before("5.24") else {}),
    "GPTNeoConfig": (
        "GPTNeo",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    ),
    "XGLMConfig": (
        "XGLMAttention",
        {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "dropout": 0.0, "layerdrop": 0.0},
    ),
    "RwkvConfig": ("Rwkv", {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}),
    "xLSTMConfig": ("xLSTM", {"hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2}),
}


class OwnAttention(nn.Module):
    """Attention that never asks transformers' interface."""

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states, None


def _llama(*bypassing: int) -> PreTrainedModel:
    model = tiny("llama")
    for layer in bypassing:
        model.get_submodule(f"model.layers.{layer}").self_attn = OwnAttention()
    return model


def _stock(config_class: str) -> PreTrainedModel:
    kind = getattr(transformers, config_class)
    values = {**_COMMON, **BYPASSING[config_class][1]}
    config = kind(**values)
    for name, value in NO_DROPOUT.items():
        if hasattr(config, name):
            setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config)


def _free(home: Layout) -> Plan:
    """All work on slot 0."""
    micro_batch = MicroBatch((Group((0,), (0, 1), LENGTHS),))
    return Plan(home.slots, LENGTHS, (micro_batch,), targets=sum(LENGTHS) - len(LENGTHS), mode="free")


def _refused(
    model: PreTrainedModel, world: World, plan: Plan | None = None, *, train: bool = True, **options: Any
) -> str:
    """What a step of AdamW, or an evaluation, says; the weights must be as they were, step after step."""
    plan = plan or plan_fixed(LENGTHS, world.home, cp=world.home.slots)
    with pytest.raises(LongspanError) as caught:
        prepared, before = model, None
        prepared = prepare(model, world, probe=False, **options)
        before = weights_of(prepared)
        optimizer = build_optimizer(prepared, "adamw", 0.1)
        run_step(prepared, plan, texts(LENGTHS), world, optimizer if train else None, backward=train)
    assert before is None or worst(weights_of(prepared), before) == 0
    return f"{type(caught.value).__name__}: {caught.value}"


def _is_watched(model: nn.Module) -> bool:
    """Whether no pass has shown yet that its layers attend."""
    return any(isinstance(hook, FirstPass) for hook in model._forward_pre_hooks.values())


def _accepted(world: World, **options: Any) -> bool:
    """Whether a model whose layers all attend runs, and is not watched from its second pass on."""
    model, plan = (
        prepare(tiny("llama"), world, probe=False, **options),
        plan_fixed(LENGTHS, world.home, cp=world.home.slots),
    )
    watched = _is_watched(model) or not getattr(model, "probed", True)
    losses = [run_step(model, plan, texts(LENGTHS), world).loss for _ in range(2)]
    return watched and losses[0] == losses[1] and not _is_watched(model) and getattr(model, "probed", True)


def _run(rank: int) -> dict[str, str]:
    messages: dict[str, str] = {}
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        for family in BYPASSING:
            messages[family] = _refused(_stock(family), world, shard_parameters=False)
        for name, train in (("recomputed", True), ("evaluated", False)):
            messages[name] = _refused(_llama(1), world, train=train, activation_checkpointing=True)
        messages["free"] = _refused(_llama(1), world, _free(world.home))
        messages["free, evaluated, copies"] = _refused(
            _llama(1), world, _free(world.home), train=False, shard_parameters=False
        )
        bidirectional = _llama()
        bidirectional.get_submodule("model.layers.0.self_attn").is_causal = False
        messages["not causal"] = _refused(bidirectional, world)
        messages["accepted"] = str(_accepted(world) and _accepted(world, activation_checkpointing=True))
    with World(Layout(ranks=2, pp=2), backend=backend(), timeout=60) as world:
        messages["first stage"] = _refused(_llama(0), world)
        messages["last stage"] = _refused(_llama(1), world)
        messages["stages accepted"] = str(_accepted(world))
    return messages


@cache
def _told() -> list[dict[str, str]]:
    return run_ranks(_run, 2)


@pytest.mark.parametrize("family", BYPASSING)
def test_attention_of_their_own_is_refused_before_the_weights_move(family: str) -> None:
    kind = BYPASSING[family][0]
    for messages in _told():
        assert messages[family].startswith("ModelError: ") and kind in messages[family], messages[family]


@pytest.mark.parametrize("case", ["recomputed", "evaluated", "free", "free, evaluated, copies", "last stage"])
def test_one_layer_is_named_on_every_rank(case: str) -> None:
    for messages in _told():
        assert "ModelError: LlamaForCausalLM: model.layers.1.self_attn (OwnAttention) bypasses" in messages[case], (
            messages[case]
        )


def test_other_refusals_of_the_probe() -> None:
    for messages in _told():
        assert "model.layers.0.self_attn (OwnAttention) bypasses" in messages["first stage"]
        assert "model.layers.0.self_attn is not causal" in messages["not causal"]


def test_models_that_attend_run_and_are_watched_once() -> None:
    assert all(messages["accepted"] == messages["stages accepted"] == "True" for messages in _told())
