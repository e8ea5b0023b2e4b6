"""Forwards that are the user's own, and attention that is: run as they are, or refused by name on every rank."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import FalconConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, RwkvConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from longspan import Layout, World, plan_fixed, prepare, run_step
from longspan.errors import ModelError
from longspan.model import add_mtp
from longspan.model.parts import find_parts
from longspan.model.pipeline.stages import refuse_inexact_stages
from longspan.model.presets import preset_config
from longspan.model.seams.norms import fuse_norms
from longspan.testing import backend, run_ranks
from tests.model.stock import SIZES, at_random, config_of, dense_answer, gradients_of, random_model, texts, tiny, worst

LENGTHS = (20, 9, 5)
EXACT = 1e-12


def _ends(logits: Tensor) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(logits=logits)  # pyright: ignore[reportArgumentType]


class _Scaled(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids) * 3
        out = self.model(inputs_embeds=inputs_embeds, position_ids=position_ids, **more)
        return _ends(self.lm_head(out.last_hidden_state))


class _Twice(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **more)[0]
        hidden = self.model(inputs_embeds=hidden, position_ids=position_ids, **more)[0]
        return _ends(self.lm_head(hidden))


class _Keyword(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        out = self.model(input_ids=input_ids, position_ids=position_ids, output_hidden_states=True, **more)
        return _ends(self.lm_head(out[0] if out.hidden_states is None else out.hidden_states[-2]))


class _ByIds(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, position_ids=position_ids, **more)[0])
        return _ends(logits if input_ids is None else logits + F.one_hot(input_ids, SIZES["vocab_size"]))


class _NormAgain(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **more)[0]
        return _ends(self.lm_head(self.model.norm(hidden)))


class _Warm(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return _ends(0.5 * out.logits)


class _HandsOn(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
        more = {**more, "return_dict": True, "inputs_embeds": more.get("inputs_embeds"), "output_attentions": False}
        assert input_ids is None or input_ids.shape[0] == 1  # shapes may be read
        hidden = self.model(input_ids, attention_mask, position_ids, **more).last_hidden_state
        return _ends(self.lm_head(hidden))


OTHERS: dict[str, tuple[type[LlamaForCausalLM], str]] = {
    "embeddings scaled": (
        _Scaled,
        "reads input_ids itself .*; it gives its base model inputs_embeds of its own making",
    ),
    "the base model twice": (_Twice, "calls its base model 2 times, not once"),
    "another keyword": (_Keyword, "gives its base model output_hidden_states of its own making"),
    "logits by ids": (_ByIds, r"reads input_ids itself \(one_hot\)"),
    "the norm again": (_NormAgain, "makes its logits of model.norm.weight too"),
}
SAME = {"logits at a temperature": _Warm, "arguments handed on": _HandsOn}


def _llama(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 2})
    return kind._from_config(config, dtype=torch.float64).train()


def _step(model: PreTrainedModel, world: World, **options: Any) -> tuple[float, PreTrainedModel]:
    prepared: Any = prepare(model, world, **options)
    return run_step(prepared, plan_fixed(LENGTHS, world.home, cp=1), texts(LENGTHS), world).loss, prepared


@pytest.mark.parametrize("case", OTHERS)
def test_what_a_forward_does_before_its_base_model_is_refused(case: str, world: World) -> None:
    kind, what = OTHERS[case]
    says = f"{kind.__name__}: its forward {what}"
    with pytest.raises(ModelError, match=says):
        _step(_llama(kind), world)


@pytest.mark.parametrize("case", SAME)
def test_forwards_that_hand_their_arguments_on_are_exact(case: str, world: World) -> None:
    loss, gradients = dense_answer(_llama(SAME[case]), texts(LENGTHS))
    ours, prepared = _step(_llama(SAME[case]), world)
    assert abs(ours - loss) <= EXACT * loss and worst(gradients_of(prepared), gradients) <= EXACT


# ---- forwards set on an instance, or wrapped


def _plain() -> Any:
    return at_random(config_of("llama"))


def _hybrid() -> Any:
    return at_random(preset_config("bamba-tiny", vocab_size=SIZES["vocab_size"]))


def _dynamic() -> Any:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return at_random(LlamaConfig(**SIZES, rope_parameters=rope))


def _set(module: Any, factor: float = 1.5) -> None:
    """What a user may do: the module's forward, and something with its result."""
    inner = module.forward
    module.forward = lambda *args, **kwargs: factor * inner(*args, **kwargs)


def _mixer(model: nn.Module) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("mamba"))


SET: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "a mixer": (_hybrid, _mixer, r"mamba \(BambaMixer\) has a forward set on the instance"),
    "the model": (_plain, lambda model: model, r"the model itself \(LlamaForCausalLM\) has a forw"),
    "frequencies by length": (
        _dynamic,
        lambda model: model.model.rotary_emb,
        r"rotary_emb .* has a forward set on the instance",
    ),
}


@pytest.mark.parametrize("case", SET)
def test_a_forward_that_longspan_would_not_run_is_refused(case: str, world: World) -> None:
    make, find, says = SET[case]
    _set(find(model := make()))
    with pytest.raises(ModelError, match=says):
        prepare(model, world)


def test_a_wrapped_forward_of_a_mixer_s_class_is_refused(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    model = _hybrid()
    kind = type(_mixer(model))
    inner: Callable[..., Any] = kind.forward

    @functools.wraps(inner)
    def louder(*args: Any, **kwargs: Any) -> Any:
        return 1.5 * inner(*args, **kwargs)

    monkeypatch.setattr(kind, "forward", louder)
    says = "forward in a wrapper that is not transformers' own"
    with pytest.raises(ModelError, match=says):
        prepare(model, world)


def test_a_model_that_could_not_be_prepared_can_be_prepared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards that longspan itself has set are none of the user's."""

    def fail(_: object) -> None:
        raise ModelError("no weights")

    for model in (_dynamic(), _hybrid()):
        fuse_norms(model)
        with World(Layout(1), backend=backend()) as world:
            with monkeypatch.context() as patched, pytest.raises(ModelError, match="no weights"):
                patched.setattr("longspan.model.prepared.pop_deferred_weights", fail)
                prepare(model, world)
            prepare(model, world)


def test_a_norm_with_a_forward_of_its_own_is_not_fused() -> None:
    model, norms = _plain(), fuse_norms(_plain())
    model.model.layers[1].input_layernorm.forward = lambda x: 2 * x
    assert fuse_norms(model) == norms - 1
    x = torch.randn(1, 3, 32, dtype=torch.float64)
    assert torch.equal(model.model.layers[1].input_layernorm(x), 2 * x)


KEPT: dict[str, Callable[[Any], Any]] = {
    "attention's linear": lambda model: model.model.layers[0].self_attn.o_proj,
    "a norm": lambda model: model.model.layers[1].input_layernorm,
    "an MLP": lambda model: model.model.layers[0].mlp,
    "the embedding": lambda model: model.model.embed_tokens,
    "the head": lambda model: model.lm_head,
}


def _kept(rank: int, ranks: int, **home: int) -> dict[str, float]:
    errors = dict[str, float]()
    with World(Layout(ranks=ranks, **home), backend=backend()) as world:
        for name, module in KEPT.items():
            stock, model = _plain(), _plain()
            for each in (stock, model):
                _set(module(each))
            exact = dense_answer(stock, texts(LENGTHS))[0]
            errors[name] = abs(_step(model, world)[0] - exact) / exact
    return errors


@pytest.mark.parametrize("home", [{}, *(pytest.param({axis: 2}, marks=pytest.mark.whole) for axis in ("tp", "pp"))])
def test_forwards_set_on_other_modules_are_run(home: dict[str, int]) -> None:
    for errors in run_ranks(functools.partial(_kept, ranks=2, **home), 2) if home else [_kept(0, 1)]:
        assert max(errors.values()) <= EXACT, errors


def test_stages_and_depths_refuse_forwards_that_they_would_not_call_or_would_share() -> None:
    model = _plain()
    inner = model.model.forward
    model.model.forward = lambda *args, **kwargs: inner(*args, use_cache=False, **kwargs)
    with pytest.raises(ModelError, match=r"model \(LlamaModel\) has a forward set on the instance .*stages"):
        refuse_inexact_stages(model, find_parts(model))
    del model.model.forward
    refuse_inexact_stages(model, find_parts(model))
    _set(model.model.layers[1].mlp)
    with pytest.raises(ModelError, match=r"LlamaDecoderLayer mlp \(LlamaMLP\) has a forward set on the instance"):
        add_mtp(model)


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": SIZES["vocab_size"]}
BYPASSING: dict[str, PreTrainedConfig] = {
    "transformer.h.0.self_attention, transformer.h.1.self_attention (FalconAttention) bypasses": FalconConfig(
        **_SMALL, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "Rwkv": RwkvConfig(**_SMALL, attention_hidden_size=32),
}


class NoAttending(nn.Module):  # its name is no "…Attention": transformers takes a file with such a class for a model's
    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states, None


def _bypassing(*bypassing: int) -> PreTrainedModel:
    model = tiny("llama")
    for layer in bypassing:
        model.get_submodule(f"model.layers.{layer}").self_attn = NoAttending()
    return model


def _refused(model: PreTrainedModel, world: World, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        prepare(model, world, **options)
    return str(caught.value)


def _run(rank: int) -> dict[str, str]:
    messages: dict[str, str] = {}
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        for kind, config in BYPASSING.items():
            messages[kind] = _refused(random_model(config, torch.float32), world, shard_parameters=False)
        messages["LlamaForCausalLM: model.layers.1.self_attn (NoAttending) bypasses"] = _refused(_bypassing(1), world)
        bidirectional = _bypassing()
        bidirectional.get_submodule("model.layers.0.self_attn").is_causal = False
        messages["model.layers.0.self_attn is not causal"] = _refused(bidirectional, world)
    with World(Layout(ranks=2, pp=2), backend=backend(), timeout=60) as world:
        messages["model.layers.0.self_attn (NoAttending) bypasses"] = _refused(_bypassing(0), world)
    return messages


def test_layers_that_do_not_attend_are_refused_on_every_rank() -> None:
    for messages in run_ranks(_run, 2):
        assert len(messages) == len(BYPASSING) + 3
        for says, message in messages.items():
            assert says in message, (says, message)
