"""Models that cannot run exactly over a sharded sequence are refused by name: by configuration, and by the probe."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.exactness.check_model import refuse_unsupported
from longspan.model.experts.moe import use_experts
from longspan.model.layers import decoder_layers
from longspan.model.prepared import IMPLEMENTATION
from longspan.model.seams.call_rules import refuse_shared_layers
from longspan.model.seams.meta_pass import record_model
from tests.model.stock import SIZES, tiny


def build(config_class: str, **values: Any) -> PreTrainedModel:
    """A model of this configuration on the meta device."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim" or config_class != "FalconConfig"}
    config = getattr(transformers, config_class)(**{**sizes, **values})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


REFUSED = {
    "other layers": (
        "Qwen3Config",
        {"layer_types": ["linear_attention", "full_attention"]},
        "layers 0 are of type 'linear_attention', supported are full_attention, sliding_attention, chunked_attention, "
        "gated delta nets, Kimi's delta attention, Mamba 2 and short convolutions",
    ),
    "tuples": ("LlamaConfig", {"return_dict": False}, r"return_dict is False, .*; set model.config.return_dict = True"),
    "every reason": (
        "LlamaConfig",
        {"return_dict": False, "layer_types": ["conv", "full_attention"]},
        r"return_dict is False.*; layers 0 are of type 'conv'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_refused_by_name(case: str) -> None:
    config_class, values, says = REFUSED[case]
    model = build(config_class, **values)
    with pytest.raises(ModelError, match=says) as caught:
        refuse_unsupported(model)
    assert type(model).__name__ in str(caught.value)


def test_other_kinds_of_model() -> None:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    with torch.device("meta"), pytest.raises(ModelError, match="encoder-decoder"):
        refuse_unsupported(transformers.T5ForConditionalGeneration(config))
    with torch.device("meta"), pytest.raises(ModelError, match="ForSequenceClassification"):
        refuse_unsupported(transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES)))
    with pytest.raises(ModelError, match="takes a transformers model"):
        refuse_unsupported(torch.nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]


SHARED = {
    "a layer": (lambda model: setattr(model.layers, "1", model.layers[0]), "layers.1.self_attn.q_proj.weight is model"),
    "an MLP": (lambda model: setattr(model.layers[1], "mlp", model.layers[0].mlp), "layers.1.mlp.gate_proj.weight is"),
    "a norm": (lambda model: setattr(model.layers[0], "input_layernorm", model.norm), "norm.weight is model.layers.0"),
}


@pytest.mark.parametrize("case", SHARED)
def test_layers_that_share_parameters(case: str) -> None:
    change, says = SHARED[case]
    model = build("LlamaConfig", tie_word_embeddings=True)
    refuse_shared_layers(model, decoder_layers(model))
    change(model.model)
    with pytest.raises(ModelError, match=f"LlamaForCausalLM: model.{says}.*; use shard_parameters=False"):
        refuse_shared_layers(model, decoder_layers(model))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_probe_sees_every_layer_and_changes_nothing(family: str) -> None:
    model = tiny(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.set_attn_implementation(IMPLEMENTATION)
    refuse_unsupported(model)
    calls = record_model(model).calls
    assert [call.module for call in calls] == [layer.self_attn for layer in decoder_layers(model).values()]
    assert all(call.causal and call.window is None and not call.sinks for call in calls)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(parameter.is_meta for parameter in model.parameters())


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "in": lambda ids: 3 in ids[:, [-1, 0]],
    "equal": lambda ids: torch.equal(ids, ids + 1) or ids.equal(ids + 1),
    "allclose": lambda ids: torch.allclose(ids, ids + 1, atol=0) or ids.allclose(ids + 1, rtol=1e-3),
    "nonzero": lambda ids: torch.is_nonzero(ids[0, 0]) or ids[0, 0].is_nonzero(),
    "a word of Python": lambda ids: (ids > 3).any() or ids.tolist() == [] or ids.max().item() or int(ids[0, 0]),
}


@pytest.mark.parametrize("how", READS)
def test_a_forward_may_read_values_for_which_the_probe_makes_up_zeros(how: str) -> None:
    model = tiny("llama")
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: (READS[how](args[0]), None)[1])
    model.set_attn_implementation(IMPLEMENTATION)
    assert len(record_model(model).calls) == 2


PROBED = {
    "Falcon": (
        "FalconConfig",
        {},
        r"FalconForCausalLM: transformer.h.0.self_attention, .*\(FalconAttention\) bypasses",
    ),
    "Bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}, r"BloomForCausalLM cannot be probed|bypasses"),
    "JetMoe": (
        "JetMoeConfig",
        {"num_local_experts": 4, "kv_channels": 8, "num_experts_per_tok": 2},
        "split_with_sizes expects .*; its forward reads values of tensors, .*probe=False",
    ),
    "Xmod": (
        "XmodConfig",
        {"is_decoder": True},
        "raised ValueError: Input language .*; the error is its forward's own",
    ),
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
    "bidirectional": ("LlamaConfig", {}, "model.layers.0.self_attn is not causal"),
    "one among others": ("Qwen3Config", {}, r"model.layers.1.self_attn \(OwnAttention\) bypasses"),
}


class OwnAttention(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None


@pytest.mark.parametrize("case", PROBED)
def test_models_refused_by_the_probe(case: str) -> None:
    config_class, values, says = PROBED[case]
    model = build(config_class, **values)
    if case == "bidirectional":
        for layer in decoder_layers(model).values():
            layer.self_attn.is_causal = False  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    if case == "one among others":
        model.model.layers[1].self_attn = OwnAttention()
    model.set_attn_implementation(IMPLEMENTATION)
    use_experts(model)
    with pytest.raises(ModelError, match=says):
        record_model(model)


def test_phimoe_draws_its_experts_in_training_even_without_noise() -> None:
    values = {"num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
    model = build("PhimoeConfig", **values)
    model.set_attn_implementation(IMPLEMENTATION)
    use_experts(model)
    assert any("exponential_" in draw for draw in record_model(model, probe=False).draws)
