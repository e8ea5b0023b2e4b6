"""The values of a model's configuration, by name: those that decide the model's numbers, and how two of them differ."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from longspan.model.weights.hf_folder import no_progress_bars, read_configuration

# The keys are dotted names, as text_config.rope_parameters.rope_theta.
Values = dict[str, Any]

# Names of files, versions and classes, and the dtype of files: parameters have that of a run.
_NOT_OF_A_MODEL = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
# Where answers begin and end, what classes are called, and what a forward pass returns. pad_token_id is not among
# them: the embedding of that token has no gradient.
_DECIDE_NO_NUMBER = {
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "sep_token_id"),
    *("id2label", "label2id", "finetuning_task", "task_specific_params", "tokenizer_class"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
}
_LONGEST = 200  # characters of a value in an error


def configuration_values(configuration: PreTrainedConfig) -> Values:
    """Return the values with which a model of this configuration is made, as transformers reads them from the
    configuration's own config.json: older names and values that a file leaves out are those of this version, and 10000
    is 10000.0.

    >>> configuration_values(AutoConfig.from_pretrained(folder))["rope_parameters.rope_theta"]
    10000
    """
    with tempfile.TemporaryDirectory() as folder, no_progress_bars():
        configuration.save_pretrained(folder)
        values = read_configuration(Path(folder)).to_dict()
    return flat_values(json.loads(json.dumps(values, default=str), parse_float=_parse_number))


def flat_values(values: Mapping[str, Any]) -> Values:
    """Return the values of tables in each other by dotted name, without those that say nothing about a model."""
    flat = Values()
    for name, value in values.items():
        if name in _NOT_OF_A_MODEL:
            continue
        if isinstance(value, dict) and value:
            flat |= {f"{name}.{inner}": inner_value for inner, inner_value in flat_values(value).items()}
        else:
            flat[name] = value
    return flat


def decides_numbers(name: str) -> bool:
    """Return whether a value of this dotted name decides numbers of the model."""
    return _DECIDE_NO_NUMBER.isdisjoint(name.split("."))


def changed_values(before: Values, now: Values) -> dict[str, str]:
    """Return what each value that differs was before and is now, in words, by name in order."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return {name: f"{name} was {_text(before, name)} and is {_text(now, name)} now" for name in names}


def _parse_number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _text(values: Values, name: str) -> str:
    text = json.dumps(values.get(name))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
