"""What a model draws at random outside attention: evaluated as it is, refused in training."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM as Auto
from transformers import BioGptConfig, GPT2Config, PreTrainedConfig, PreTrainedModel, SeedOssConfig

from longspan.comm import World, bind
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.seams.randomness import random_draws
from longspan.plan import plan_fixed
from longspan.testing import backend
from longspan.train import run_step
from tests.model.stock import texts

GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 64}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61, "intermediate_size": 32}
CASES: dict[str, tuple[PreTrainedConfig, tuple[str, ...]]] = {
    "modules": (GPT2Config(**GPT2), ("resid_pdrop (0.1)", "embd_pdrop (0.1)", "dropout of 0.1 (5 calls)")),
    "of attention alone": (GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0), ()),
    "in functions": (
        SeedOssConfig(**SIZES, num_key_value_heads=1, head_dim=8, attention_dropout=0.1, residual_dropout=0.2),
        ("residual_dropout (0.2)", "dropout of 0.2"),
    ),
    "layers left out": (
        BioGptConfig(**SIZES, layerdrop=0.5, hidden_dropout_prob=0.0, activation_dropout=0.0),
        ("layerdrop 0.5", "layerdrop (0.5)"),
    ),
    "nothing": (BioGptConfig(**SIZES, layerdrop=0.0, hidden_dropout_prob=0.0, activation_dropout=0.0), ()),
}


def built(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return Auto.from_config(config)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("probe", [True, False])
def test_training_is_refused_by_name_and_evaluation_is_not(name: str, probe: bool) -> None:
    config, says = CASES[name]
    documents = texts((9, 5))
    with World(Layout(ranks=1), backend=backend()) as world:
        model = prepare(built(config).eval(), world, shard_parameters=False, probe=probe)
        plan = plan_fixed((9, 5), world.home, cp=1)
        assert torch.isfinite(torch.tensor(run_step(model, plan, documents, world, backward=False).loss))
        shard = bind(plan.micro_batches[0], world)
        ids = torch.zeros(1, 14, dtype=torch.long, device=world.device)
        calls: list[Any] = [
            lambda: run_step(model, plan, documents, world),
            lambda: model.train()(input_ids=ids, position_ids=shard.position_ids[None], shard=shard),
        ]
        for call in calls:
            if not says:
                call()
                continue
            with pytest.raises(ModelError) as refused:
                call()
            assert all(words in str(refused.value) for words in says), str(refused.value)


def test_modules_are_counted_where_a_model_does_not_run_without_memory() -> None:
    class Refusing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.device.type != "meta" else x.item()

    model = built(GPT2Config(**GPT2, embd_pdrop=0.25, attn_pdrop=0.5))
    model.transformer.ln_f = Refusing()
    assert random_draws(model) == ("dropout of 0.1 (4 calls)", "dropout of 0.25 (1 call)")


def test_other_draws_are_seen() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn_like(x) if self.training else x

    model = built(CASES["nothing"][0])
    model.biogpt.layer_norm = Noisy()
    model.set_attn_implementation("longspan")
    assert random_draws(model) == ("randn_like (1 call)",)
