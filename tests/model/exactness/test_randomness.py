"""What a model draws at random outside attention: evaluated as it is, refused in training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM as Auto
from transformers import BioGptConfig, GPT2Config, PreTrainedConfig, PreTrainedModel, SeedOssConfig

from longspan.comm import World, bind
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.seams.meta_pass import record_model
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


def training_draws(model: PreTrainedModel) -> tuple[str, ...]:
    return record_model(model, probe=False).draws


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
    model.set_attn_implementation("longspan")
    assert training_draws(model) == ("dropout of 0.1 (4 calls)", "dropout of 0.25 (1 call)")


class Noisy(nn.Module):
    """A norm's place, with noise that is drawn by `draw` of the rows (1, T, D)."""

    def __init__(self, draw: Callable[[Tensor], Any], always: bool) -> None:
        super().__init__()
        self.draw, self.always = draw, always

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.always:
            self.draw(x)
        return x


def noisy(draw: Callable[[Tensor], Any], *, always: bool = False) -> PreTrainedModel:
    model = built(CASES["nothing"][0])
    model.biogpt.layer_norm = Noisy(draw, always)
    return model


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "randn_like": torch.randn_like,
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "randn": lambda x: torch.randn(x.shape),  # on the host, whatever the device is
    "randint": lambda x: torch.randint(0, 2, x.shape, device=x.device),
    "randint_like": lambda x: torch.randint_like(x, 3),
    "randperm": lambda x: torch.randperm(x.shape[1], device=x.device),
    "normal": lambda x: torch.normal(0.0, 1.0, x.shape, device=x.device),
    "bernoulli": lambda x: torch.bernoulli(x.new_full(x.shape, 0.5)),
    "multinomial": lambda x: torch.multinomial(x[0].exp(), 1),
    "poisson": lambda x: torch.poisson(x.exp()),
    "gumbel_softmax": F.gumbel_softmax,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "dropout of 0.2": lambda x: F.dropout(x, 0.2),
    "dropout1d of 0.3": lambda x: F.dropout1d(x, p=0.3),
    "alpha_dropout of 0.1": lambda x: F.alpha_dropout(x, 0.1, training=True),
    "feature_alpha_dropout of 0.1": lambda x: F.feature_alpha_dropout(x, 0.1, training=True),
    "rand of rows' paths": lambda x: torch.rand((x.shape[0], 1, 1), device=x.device),  # as in transformers' drop_path
}
IN_PLACE = ("random_", "geometric_", "cauchy_", "log_normal_", "exponential_", "uniform_", "normal_", "bernoulli_")
DRAWS |= {name: lambda x, name=name: getattr(x.clone(), name)(*[0.5] * (name == "geometric_")) for name in IN_PLACE}


QUIET: dict[str, Callable[[Tensor], Any]] = {  # draw nothing, or a number alone
    "a number": lambda x: torch.rand([]),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout of evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "attention without dropout": lambda x: F.scaled_dot_product_attention(x, x, x),
    "a leaky slope": F.rrelu,
}


@pytest.mark.parametrize("name", [*DRAWS, *QUIET])
def test_draws_of_more_than_a_number_are_seen(name: str) -> None:
    model, before = noisy((DRAWS | QUIET)[name]), torch.get_rng_state()
    model.set_attn_implementation("longspan")
    assert training_draws(model) == (() if name in QUIET else (f"{name.partition(' of rows')[0]} (1 call)",))
    assert record_model(model, probe=False).draws_in_evaluation == ()
    assert torch.equal(torch.get_rng_state(), before)  # of the host, as it was


class NoiseOfTheHost(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape)


def test_noise_of_a_device_of_its_own_is_named_and_noise_in_evaluation_refused_there_too() -> None:
    model = built(CASES["nothing"][0])
    model.biogpt.layer_norm = NoiseOfTheHost()
    with World(Layout(ranks=1), backend=backend()) as world:
        with pytest.raises(ModelError, match=r"as torch.randn\(shape\)"):
            prepare(model, world, shard_parameters=False)
        model = prepare(noisy(DRAWS["rand"], always=True).eval(), world, shard_parameters=False)
        plan = plan_fixed((9, 5), world.home, cp=1)
        with pytest.raises(ModelError, match=r"in training and in evaluation: rand \(1 call\)"):
            run_step(model, plan, texts((9, 5)), world, backward=False)


def test_layers_left_out_at_random_do_not_seem_to_bypass_attention() -> None:
    config, says = CASES["layers left out"]
    with World(Layout(ranks=1), backend=backend()) as world:
        for seed in range(4):
            torch.manual_seed(seed)
            model = prepare(Auto.from_config(config).train(), world, shard_parameters=False)
            assert model.training
            with pytest.raises(ModelError) as refused:
                run_step(model, plan_fixed((9, 5), world.home, cp=1), texts((9, 5)), world)
            assert all(words in str(refused.value) for words in says)
