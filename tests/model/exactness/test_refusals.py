"""Models that cannot run exactly over a sharded sequence are refused by name: by configuration, and by the probe."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BioGptConfig, GPT2Config, PreTrainedConfig, PreTrainedModel

from longspan.comm import World, bind
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.exactness.check_model import check_model_on_this_rank
from longspan.model.experts.moe import connect_experts
from longspan.model.feature import Call
from longspan.model.layers import decoder_layers
from longspan.model.options import PrepareOptions
from longspan.model.seams.attention_calls import IMPLEMENTATION
from longspan.model.seams.meta_pass import record_calls_and_draws
from longspan.model.seams.running_layer import hook_layer_arguments
from longspan.model.sharding import ShardingFeature
from longspan.plan import plan_fixed
from longspan.train import run_step
from tests.model.stock import SIZES, texts, tiny


def build(config_class: str, **values: Any) -> PreTrainedModel:
    config = getattr(transformers, config_class)(**{**SIZES, **values})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


REFUSED = {
    "other layers": (
        "Qwen3Config",
        {"layer_types": ["linear_attention", "full_attention"]},
        "layers 0 are of type 'linear_attention', supported are full_attention, sliding_attention, chunked_attention, "
        "gated delta nets, Kimi's delta attention, Mamba 2 and short convolutions",
    ),
    "every reason": (
        "LlamaConfig",
        {"return_dict": False, "layer_types": ["conv", "full_attention"]},
        r"return_dict is False, .*; set model.config.return_dict = True; layers 0 are of type 'conv'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_refused_by_name(case: str) -> None:
    config_class, values, says = REFUSED[case]
    model = build(config_class, **values)
    with pytest.raises(ModelError, match=says) as caught:
        check_model_on_this_rank(model, ())
    assert type(model).__name__ in str(caught.value)


OTHER_HEAD = r"its head \(ForSequenceClassification\) is .*; use LlamaForCausalLM"


def test_other_kinds_of_model() -> None:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    with torch.device("meta"), pytest.raises(ModelError, match="encoder-decoder"):
        check_model_on_this_rank(transformers.T5ForConditionalGeneration(config), ())
    with torch.device("meta"), pytest.raises(ModelError, match=OTHER_HEAD):
        check_model_on_this_rank(transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES)), ())
    with pytest.raises(ModelError, match="takes a transformers model"):
        check_model_on_this_rank(nn.Linear(2, 2), ())  # pyright: ignore[reportArgumentType]


SHARED = {
    "a layer": (lambda model: setattr(model.layers, "1", model.layers[0]), "layers.1.self_attn.q_proj.weight is model"),
    "a norm": (lambda model: setattr(model.layers[0], "input_layernorm", model.norm), "norm.weight is model.layers.0"),
}


@pytest.mark.parametrize("case", SHARED)
def test_layers_that_share_parameters(case: str) -> None:
    change, says = SHARED[case]
    model = build("LlamaConfig", tie_word_embeddings=True)
    world: Any = SimpleNamespace(home=Layout(ranks=1))
    feature = ShardingFeature(Call(model, model, world, PrepareOptions()))
    feature.refuse(model)
    change(model.model)
    with pytest.raises(ModelError, match=f"LlamaForCausalLM: model.{says}.*; use shard_parameters=False"):
        feature.refuse(model)


def test_the_probe_sees_every_layer_and_changes_nothing() -> None:
    model = tiny("qwen3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.set_attn_implementation(IMPLEMENTATION)
    check_model_on_this_rank(model, ())
    calls = record_calls_and_draws(model).calls
    assert [call.module for call in calls] == [layer.self_attn for layer in decoder_layers(model).values()]
    assert all(call.causal and call.window is None for call in calls)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(parameter.is_meta for parameter in model.parameters())


def _read_values(_: nn.Module, args: tuple[Tensor]) -> None:
    (ids,) = args
    assert not (3 in ids[:, [-1, 0]] or torch.equal(ids, ids + 1) or ids.equal(ids + 1))
    assert not (torch.allclose(ids, ids + 1, atol=0) or ids.allclose(ids + 1, rtol=1e-3))
    assert not (torch.is_nonzero(ids[0, 0]) or ids[0, 0].is_nonzero())
    assert not ((ids > 3).any() or ids.tolist() == [] or ids.max().item() or int(ids[0, 0]))


def test_a_forward_may_read_values_for_which_the_probe_makes_up_zeros() -> None:
    model = tiny("llama")
    model.get_input_embeddings().register_forward_pre_hook(_read_values)
    model.set_attn_implementation(IMPLEMENTATION)
    assert len(record_calls_and_draws(model).calls) == 2


PROBED = {
    "JetMoe": (
        "JetMoeConfig",
        {"num_local_experts": 4, "kv_channels": 8, "num_experts_per_tok": 2},
        "split_with_sizes expects .*; a forward must .* depend on no values of tensors",
    ),
    "Xmod": ("XmodConfig", {"is_decoder": True}, "raised ValueError: Input language .*; a forward must hand"),
    "Qwen2-MoE's windows": (
        "Qwen2MoeConfig",
        {"num_experts": 4, "use_sliding_window": True, "sliding_window": 5},
        "model.layers.0.self_attn is a sliding_attention layer but passes no sliding_window",
    ),
    "no keywords": (
        "NemotronConfig",
        {},
        "cannot be probed: .*got no shard.*must hand keyword arguments down to its dec",
    ),
}


@pytest.mark.parametrize("case", PROBED)
def test_models_refused_by_the_probe(case: str) -> None:
    config_class, values, says = PROBED[case]
    model = build(config_class, **values)
    model.set_attn_implementation(IMPLEMENTATION)
    if case == "Qwen2-MoE's windows":
        hook_layer_arguments(model)
    connect_experts(model)
    with pytest.raises(ModelError, match=says):
        record_calls_and_draws(model)


# ---- what is drawn at random outside attention: evaluated as it is, refused in training

GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 64}
NARROW = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 61,
    "intermediate_size": 32,
}
RANDOM: dict[str, tuple[PreTrainedConfig, tuple[str, ...]]] = {
    "modules": (GPT2Config(**GPT2), ("resid_pdrop (0.1)", "embd_pdrop (0.1)", "dropout of 0.1 (5 calls)")),
    "of attention alone": (GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0), ()),
    "in functions": (
        transformers.SeedOssConfig(
            **NARROW, num_key_value_heads=1, head_dim=8, attention_dropout=0.1, residual_dropout=0.2
        ),
        ("residual_dropout (0.2)", "dropout of 0.2"),
    ),
    "layers left out": (
        BioGptConfig(**NARROW, layerdrop=0.5, hidden_dropout_prob=0.0, activation_dropout=0.0),
        ("layerdrop 0.5", "layerdrop (0.5)"),
    ),
    "nothing": (BioGptConfig(**NARROW, layerdrop=0.0, hidden_dropout_prob=0.0, activation_dropout=0.0), ()),
}


def built(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", RANDOM)
def test_training_is_refused_by_name_and_evaluation_is_not(name: str, world: World) -> None:
    config, says = RANDOM[name]
    documents = texts((9, 5))
    model = prepare(built(config).eval(), world, shard_parameters=False)
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
    model = built(RANDOM["nothing"][0])
    model.biogpt.layer_norm = Noisy(draw, always)
    return model


DRAWS: dict[str, Callable[[Tensor], Any]] = {  # torch marks the operators that draw
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "randn": lambda x: torch.randn(x.shape),  # on the host, whatever the device is
    "uniform_": lambda x: x.clone().uniform_(),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "dropout of 0.2": lambda x: F.dropout(x, 0.2),
    "dropout1d of 0.3": lambda x: F.dropout1d(x, p=0.3),
    "rand of rows' paths": lambda x: torch.rand((x.shape[0], 1, 1), device=x.device),  # as in transformers' drop_path
}


QUIET: dict[str, Callable[[Tensor], Any]] = {  # draw nothing, or a number alone
    "a number": lambda x: torch.rand([]),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout of evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "attention without dropout": lambda x: F.scaled_dot_product_attention(x, x, x),
    "a leaky slope": F.rrelu,
}


def test_draws_of_more_than_a_number_are_seen() -> None:
    model = noisy(lambda x: [draw(x) for draw in (*DRAWS.values(), *QUIET.values())])
    before = torch.get_rng_state()
    model.set_attn_implementation("longspan")
    record = record_calls_and_draws(model)
    words = ("dropout of 0.2", "dropout1d of 0.3", "rand", "randn", "rrelu", "uniform_")
    assert record.draws == tuple(f"{name} ({'2 calls' if name == 'rand' else '1 call'})" for name in words)
    assert record.draws_in_evaluation == ()
    assert torch.equal(torch.get_rng_state(), before)  # of the host, as it was


class NoiseOfTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape)


def test_noise_of_a_device_of_its_own_is_named_and_noise_in_evaluation_refused_there_too(world: World) -> None:
    model = built(RANDOM["nothing"][0])
    model.biogpt.layer_norm = NoiseOfTheHost()
    with pytest.raises(ModelError, match=r"make tensors where its inputs are \(device=x.device\)"):
        prepare(model, world, shard_parameters=False)
    model = prepare(noisy(DRAWS["rand"], always=True).eval(), world, shard_parameters=False)
    plan = plan_fixed((9, 5), world.home, cp=1)
    with pytest.raises(ModelError, match=r"in training and in evaluation: rand \(1 call\)"):
        run_step(model, plan, texts((9, 5)), world, backward=False)
