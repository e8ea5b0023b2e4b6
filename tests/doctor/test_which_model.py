"""Names of models: folders, classes, model types."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longspan.doctor.which_model import find_configuration
from longspan.errors import ConfigError, ModelError
from longspan.model.seams.doctor_hint import doctor_hint


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):  # a model outside transformers
    config_class = OwnConfig


class UnnamedForCausalLM(LlamaForCausalLM):
    """One that has no configuration of its own."""


def test_a_model_has_many_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 7}))
    names = ("qwen3", "Qwen3ForCausalLM", "Qwen3Config", "transformers.Qwen3ForCausalLM", str(tmp_path))
    configs = [find_configuration(name) for name in names]
    assert {config.model_type for config in configs} == {"qwen3"} and configs[-1].num_hidden_layers == 7
    assert isinstance(find_configuration(f"{__name__}.OwnForCausalLM"), OwnConfig)


def test_a_message_names_a_model_that_can_be_found() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with torch.device("meta"):
        own, stock = OwnForCausalLM(OwnConfig(**sizes)), LlamaForCausalLM(LlamaConfig(**sizes))
        unknown = OwnForCausalLM(LlamaConfig(**sizes))  # the doctor would try transformers' own class
    for model, name in ((own, f"{__name__}.OwnForCausalLM"), (stock, "llama")):
        assert doctor_hint(model).startswith(f"; longspan doctor --model {name} tries")
        assert find_configuration(name).model_type == model.config.model_type
    assert doctor_hint(unknown) == ""


WRONG = [
    ("mistrall", ConfigError, "no folder, class of transformers or model_type 'mistrall'; did you mean mistral"),
    ("Qwen3ForCausal", ConfigError, "did you mean .*Qwen3ForCausalLM"),
    ("BertForMaskedLM", ConfigError, "which is BertLMHeadModel; use --model BertLMHeadModel"),
    (f"{__name__}.UnnamedForCausalLM", ConfigError, "give it a config_class of its own: a subclass of LlamaConfig"),
    ("clip", ConfigError, "no causal language model for CLIPConfig"),
    ("no_such_package.Model", ConfigError, "no_such_package cannot be imported"),
    ("no/such/folder", ModelError, "there is no model folder no/such/folder"),
]


@pytest.mark.parametrize(("name", "kind", "says"), WRONG)
def test_names_that_are_refused(name: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        find_configuration(name)
