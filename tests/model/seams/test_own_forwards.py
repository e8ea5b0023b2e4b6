"""Forwards that are the user's own: run as they are, or refused by name; and what a probe leaves of a module."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import add_mtp, prepare
from longspan.model.parts import find_parts
from longspan.model.pipeline.stages import refuse_inexact
from longspan.model.presets import preset_config
from longspan.model.seams.norms import fuse_norms
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.stock import SIZES, VOCABULARY, at_random, config_of, dense_answer, gradients_of, texts, worst

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


class _Bigram(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if inputs_embeds is None:
            embedded = self.model.embed_tokens(input_ids)
            inputs_embeds = embedded + F.pad(embedded, (0, 0, 1, 0))[:, :-1]
        out = self.model(inputs_embeds=inputs_embeds, position_ids=position_ids, **more)
        return _ends(self.lm_head(out.last_hidden_state))


class _Twice(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **more)[0]
        hidden = self.model(inputs_embeds=hidden, position_ids=position_ids, **more)[0]
        return _ends(self.lm_head(hidden))


class _OtherPlaces(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        places = None if position_ids is None else 2 * position_ids
        return _ends(self.lm_head(self.model(input_ids=input_ids, position_ids=places, **more)[0]))


class _Keyword(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        out = self.model(input_ids=input_ids, position_ids=position_ids, output_hidden_states=True, **more)
        return _ends(self.lm_head(out[0] if out.hidden_states is None else out.hidden_states[-2]))


class _ByIds(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids, position_ids=position_ids, **more)[0])
        return _ends(logits if input_ids is None else logits + F.one_hot(input_ids, VOCABULARY))


class _NormAgain(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **more)[0]
        return _ends(self.lm_head(self.model.norm(hidden)))


class _Warm(LlamaForCausalLM):
    """Its logits are its parent's, at a temperature."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return _ends(0.5 * out.logits)


class _HandsOn(LlamaForCausalLM):
    """Every argument, by its place, and some that say nothing."""

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
    "bigrams of embeddings": (_Bigram, "reads input_ids itself"),
    "the base model twice": (_Twice, "calls its base model 2 times, not once"),
    "other positions": (_OtherPlaces, "reads position_ids itself .*; it gives its base model position_ids of"),
    "another keyword": (_Keyword, "gives its base model output_hidden_states of its own making"),
    "logits by ids": (_ByIds, r"reads input_ids itself \(one_hot\)"),
    "the norm again": (_NormAgain, "makes its logits of model.norm.weight too"),
}
SAME = {"logits at a temperature": _Warm, "arguments handed on": _HandsOn}


def _llama(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 2})
    return kind._from_config(config, dtype=torch.float64).train()


@contextmanager
def _one_rank() -> Iterator[World]:
    with World(Layout(ranks=1), backend=backend()) as world:
        yield world


def _step(model: PreTrainedModel, world: World, **options: Any) -> tuple[float, PreTrainedModel]:
    prepared: Any = prepare(model, world, **options)
    return run_step(prepared, plan_fixed(LENGTHS, world.home, cp=1), texts(LENGTHS), world).loss, prepared


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("probe", [True, False])
def test_what_a_forward_does_before_its_base_model_is_refused(case: str, probe: bool) -> None:
    kind, says = OTHERS[case]
    with _one_rank() as world, pytest.raises(ModelError, match=f"{kind.__name__}: its forward {says}"):
        _step(_llama(kind), world, probe=probe)


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("probe", [True, False])
def test_forwards_that_hand_their_arguments_on_are_exact(case: str, probe: bool) -> None:
    loss, gradients = dense_answer(_llama(SAME[case]), texts(LENGTHS))
    with _one_rank() as world:
        ours, prepared = _step(_llama(SAME[case]), world, probe=probe)
        assert abs(ours - loss) <= EXACT * loss and worst(gradients_of(prepared), gradients) <= EXACT


def _stages(rank: int) -> str:
    with World(Layout(ranks=2, pp=2), backend=backend(), timeout=60) as world:
        with pytest.raises(ModelError) as refused:
            _step(_llama(_NormAgain), world, probe=False)
        return str(refused.value)


@pytest.mark.whole
def test_stages_without_a_probe_refuse_it_on_every_rank() -> None:
    assert all("its forward makes its logits of model.norm.weight too" in said for said in run_ranks(_stages, 2))


# ---- forwards set on an instance, or wrapped


def _hybrid() -> PreTrainedModel:
    return at_random(preset_config("bamba-tiny", vocab_size=VOCABULARY))


def _set(module: Any, factor: float = 1.5) -> None:
    """What a user may do: the module's forward, and something with its result."""
    inner = module.forward
    module.forward = lambda *args, **kwargs: factor * inner(*args, **kwargs)


def _mixer(model: nn.Module) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("mamba"))


def test_a_forward_set_on_a_mixer_is_refused() -> None:
    model = _hybrid()
    _set(_mixer(model))
    with (
        _one_rank() as world,
        pytest.raises(ModelError, match=r"mamba \(BambaMixer\) has a forward set on the instance"),
    ):
        prepare(model, world)


def test_a_wrapped_forward_of_a_mixer_s_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _hybrid()
    kind = type(_mixer(model))
    inner: Callable[..., Any] = kind.forward

    @functools.wraps(inner)
    def louder(*args: Any, **kwargs: Any) -> Any:
        return 1.5 * inner(*args, **kwargs)

    monkeypatch.setattr(kind, "forward", louder)
    with _one_rank() as world, pytest.raises(ModelError, match="forward in a wrapper that is not transformers' own"):
        prepare(model, world)


def test_a_forward_set_on_the_model_is_refused() -> None:
    model = at_random(config_of("llama"))
    _set(model)
    with _one_rank() as world, pytest.raises(ModelError, match=r"the model itself \(LlamaForCausalLM\) has a forw"):
        prepare(model, world)


def test_a_model_that_could_not_be_prepared_can_be_prepared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards that longspan itself has set are none of the user's."""

    def fail(_: object) -> None:
        raise ModelError("no weights")

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for model in (at_random(LlamaConfig(**SIZES, rope_parameters=rope)), _hybrid()):
        fuse_norms(model)
        with _one_rank() as world:
            with monkeypatch.context() as patched, pytest.raises(ModelError, match="no weights"):
                patched.setattr("longspan.model.prepared.pop_deferred_weights", fail)
                prepare(model, world)
            prepare(model, world)


def test_a_forward_set_on_a_rotary_module_that_goes_by_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model: Any = at_random(LlamaConfig(**SIZES, rope_parameters=rope))
    _set(model.model.rotary_emb)
    with _one_rank() as world, pytest.raises(ModelError, match=r"rotary_emb .* has a forward set on the instance"):
        prepare(model, world)


def test_a_norm_with_a_forward_of_its_own_is_not_fused() -> None:
    model: Any = at_random(config_of("llama"))
    norms = fuse_norms(deepcopy(model))
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


def _kept(rank: int, ranks: int, **home: int) -> list[tuple[str, float]]:
    """The error of a model with a forward set on an instance, beside the same stock model."""
    errors = list[tuple[str, float]]()
    with World(Layout(ranks=ranks, **home), backend=backend()) as world:
        for name, module in KEPT.items():
            stock = at_random(config_of("llama"))
            _set(module(stock))
            model = at_random(config_of("llama"))
            _set(module(model))
            exact = dense_answer(stock, texts(LENGTHS))[0]
            ours = _step(model, world)[0]
            errors.append((name, abs(ours - exact) / exact))
    return errors


def test_forwards_set_on_other_modules_are_run() -> None:
    assert all(error <= EXACT for _, error in _kept(0, 1)), _kept(0, 1)


@pytest.mark.whole
@pytest.mark.parametrize("home", [{"tp": 2}, {"pp": 2}], ids=str)
def test_forwards_set_on_other_modules_are_run_under_every_home(home: dict[str, int]) -> None:
    for errors in run_ranks(functools.partial(_kept, ranks=2, **home), 2):
        assert all(error <= EXACT for _, error in errors), errors


def test_stages_refuse_a_base_model_with_a_forward_of_its_own() -> None:
    model: Any = at_random(config_of("llama"))
    inner = model.model.forward
    model.model.forward = lambda *args, **kwargs: inner(*args, use_cache=False, **kwargs)
    with pytest.raises(ModelError, match=r"model \(LlamaModel\) has a forward set on the instance .*stages"):
        refuse_inexact(model, find_parts(model))
    del model.model.forward
    refuse_inexact(model, find_parts(model))


def test_depths_refuse_a_layer_whose_forward_they_would_share() -> None:
    model: Any = at_random(config_of("llama"))
    _set(model.model.layers[1].mlp)
    with pytest.raises(ModelError, match=r"LlamaDecoderLayer mlp \(LlamaMLP\) has a forward set on the instance"):
        add_mtp(model)


# ---- what a probe leaves of a module


class _Remembering(LlamaModel):
    """Notes things of the call before, for a log."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(32), persistent=False)
        self.last: Tensor | None = None
        self.lengths = list[Tensor]()
        self.by_name = {"calls": 0}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        hidden = out.last_hidden_state.detach()
        self.mean = hidden.mean((0, 1)) if self.last is None else 0.9 * self.mean + 0.1 * hidden.mean((0, 1))
        self.last = hidden.mean()
        self.lengths.append(hidden.sum())
        self.by_name |= {"calls": self.by_name["calls"] + 1, "size": hidden.norm()}
        return out


def test_a_probe_leaves_attributes_of_modules_as_they_were() -> None:
    model = _llama(LlamaForCausalLM)
    base: Any = _Remembering(model.config).double()
    base.load_state_dict(model.model.state_dict(), strict=False)
    model.model = base
    exact = dense_answer(AutoModelForCausalLM.from_config(model.config).double(), texts(LENGTHS))[0]
    with _one_rank() as world:
        prepared: Any = prepare(model, world, shard_parameters=False)
        assert (base.last, base.lengths, base.by_name) == (None, [], {"calls": 0})
        assert not any(tensor.is_meta for tensor in base.buffers())
        run_step(prepared, plan_fixed(LENGTHS, world.home, cp=1), texts(LENGTHS), world)
        assert base.by_name["calls"] == len(base.lengths) == 1 and exact > 0
