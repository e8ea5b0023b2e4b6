"""Families with state-space layers equal the stock model: loss and every gradient at several degrees, in every home."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_next import modeling_qwen3_next

from longspan.doctor.cases import Case
from longspan.doctor.proof import prove
from longspan.errors import ModelError
from longspan.model.exactness.check_model import check_model_on_this_rank
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.kinds import find_mixers, is_mixer

FAMILIES = {
    "qwen3_next": "gated delta nets, attention and experts",
    "qwen3_5_text": "the same, of another class",
    "qwen3_5_moe_text": "with experts",
    "olmo_hybrid": "betas up to 2",
    "kimi_linear": "a decay for each number of a key, MLA",
    "bamba": "Mamba 2 and attention",
    "mamba2": "Mamba 2 alone; its language model hands no keywords down",
    "granitemoehybrid": "Mamba 2, attention, experts",
    "nemotron_h": "Mamba 2, attention, experts and MLPs, each a layer",
    "falcon_h1": "Mamba 2 and attention side by side",
    "lfm2": "short convolutions",
    "lfm2_moe": "and experts",
    "lfm3": "with gates after attention",
    "bailing_hybrid": "Kimi's delta attention with gates of full rank",
    "zamba2": "Mamba 2, and attention of one block in two layers, with adapters",
}
KINDS: dict[str, dict[str, Any]] = {  # what a class's defaults lack of its released models
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "zamba2": {"use_shared_attention_adapter": True, "use_mem_rope": True},
}
CASES = (
    Case(cp=3, plan="several", recompute="full"),
    Case(cp=3, cp_comm_type="all_gather", partition="contiguous"),
    Case(plan="dynamic"),
)
IN_CI = {  # convolution and both scans; every family in every case is in make test-all
    "qwen3_next": Case(cp=2, plan="several", recompute="full"),
    "mamba2": Case(cp=2, partition="contiguous"),
}
HOMES = (
    Case(tp=2, cp=2),
    Case(tp=2, cp=2, sequence_parallel=True),
    Case(tp=2, cp=2, plan="several", recompute="full"),
    Case(pp=2, cp=2, plan="several"),
    Case(cp=4, cp_comm_type="a2a", partition="contiguous"),
    Case(tp=2, cp=2, partition="contiguous", plan="several"),
    Case(ep=2, cp=2),
    Case(cp=4, evaluation=True),
)


def small_config(family: str) -> PreTrainedConfig:
    return shrink_configuration(CONFIG_MAPPING[family](**KINDS.get(family, {})))


def here(families: Sequence[str]) -> list[str]:
    return [family for family in families if family in CONFIG_MAPPING]


@pytest.mark.parametrize("family", here(tuple(IN_CI)))
def test_a_family_is_exact(family: str) -> None:
    for outcome in prove(small_config(family), [IN_CI[family]], 2):
        assert outcome.status == "exact", (outcome.case.name, outcome)


@pytest.mark.whole
@pytest.mark.parametrize("family", here(tuple(FAMILIES)))
def test_every_family_in_every_home(family: str) -> None:
    """pp and ep where the class has them, what it has not is refused."""
    for outcome in prove(small_config(family), [*CASES, *HOMES], 4):
        exact = outcome.status == "exact" or outcome.case.tp == 1
        assert outcome.good and exact, (outcome.case.name, outcome)


# ---- what is not known is refused


def _stock(family: str) -> PreTrainedModel:
    return make_tiny_model(small_config(family), torch.float32)


@pytest.mark.parametrize("family", ["falcon_mamba", "jamba"])
def test_mamba_1_is_refused_by_name(family: str) -> None:
    with pytest.raises(
        ModelError, match=r"conv1d \(Conv1d of \w*MambaMixer\) mixes neighbouring rows outside attention"
    ):
        check_model_on_this_rank(_stock(family), ())


def test_keys_and_classes_stay() -> None:
    model = _stock("qwen3_5_text")
    scans = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
    assert list(find_mixers(model)) == [f"model.layers.{i}.linear_attn" for i in scans]
    assert not any(is_mixer(module) for module in _stock("llama").modules())


def _of_a_package(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def wrapped(*args: object, **kwargs: object) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    return wrapped


def test_a_small_copy_runs_in_torch_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        plain = getattr(modeling_qwen3_next, name)
        monkeypatch.setattr(modeling_qwen3_next, name, _of_a_package(getattr(plain, "__wrapped__", plain)))
    assert _stock("qwen3_next")(input_ids=torch.arange(9)[None]).logits.isfinite().all()
