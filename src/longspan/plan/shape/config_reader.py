"""Attributes of a model's configuration, which is an object or dict like transformers', a file or a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from longspan.errors import PlanError
from longspan.files import read_json

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_IN_FILES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}  # of GPT-2
_WIDTHS = {"gpt2": "n_inner", "gpt_bigcode": "n_inner", "opt": "ffn_dim"}  # of MLPs; null: four times the hidden size


class ConfigReader:
    """Reads a transformers configuration, of the language model of one that also sees or hears.

    >>> ConfigReader.of({"text_config": {"hidden_size": 64}}).count("hidden_size")
    64
    """

    def __init__(self, config: Any, where: str) -> None:
        """Read this object or dict; `where` names it in messages."""
        self.where: str = where
        self._config = config

    @classmethod
    def of(cls, config: Any) -> "ConfigReader":
        """Read the language model's configuration in an object or dict, a config.json or its folder.

        Raises PlanError for a file without a configuration.
        """
        read = cls.read_whole(config)
        text = read.value("text_config")
        return read if text is None else cls(text, f"text_config of {read.where}")

    @classmethod
    def read_whole(cls, config: Any) -> "ConfigReader":
        """Read a whole model's configuration, which may have those of a text model and of encoders as sections."""
        if not isinstance(config, (str, Path)):
            return cls(config, type(config).__name__)
        path = Path(config)
        file = path / "config.json" if path.is_dir() else path
        try:
            values = read_json(file)
        except (OSError, ValueError) as error:
            fault = error.strerror if isinstance(error, OSError) else f"it is not JSON ({error})"
            raise PlanError(f"cannot read a model's configuration from {file}: {fault}") from error
        if not isinstance(values, dict):
            raise PlanError(f"{file} holds no model's configuration: it is not an object")
        return cls(values, str(file))

    @property
    def family(self) -> str:
        """The model type; "" if there is none."""
        return str(self.value("model_type") or "")

    def value(self, *names: str) -> Any:
        """Return the first of these attributes that is set, perhaps by its family's name; None if none is."""
        for name in (*names, *(_IN_FILES[name] for name in names if name in _IN_FILES)):
            config = self._config
            value = cast(dict[str, Any], config).get(name) if isinstance(config, dict) else getattr(config, name, None)
            if value is not None:
                return value
        if "intermediate_size" in names and self.family in _WIDTHS:
            return self.value(_WIDTHS[self.family]) or 4 * self.count("hidden_size")
        return None

    def count(self, *names: str) -> int:
        """Return the first of these attributes that is set, as a count; 0 if none is. Raises PlanError for no count."""
        value = self.value(*names)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            name, text = next(name for name in names if self.value(name) is not None), repr(value)
            raise PlanError(f"{name} of {self.where} is {text[:40]}{'…' * (len(text) > 40)}; it must be a count")
        return value

    def section(self, name: str) -> "ConfigReader":
        """Return a configuration inside this one; an empty one if there is none."""
        return ConfigReader(self.value(name) or {}, f"{name} of {self.where}")

    def experts(self) -> tuple[str, int]:
        """Return the attribute that counts a layer's experts, and its count; "" and 0 without experts."""
        return next(((name, count) for name in _EXPERTS if (count := self.count(name))), ("", 0))

    def check_counts(self, *names: str, one_of: Sequence[str] = ()) -> None:
        """Raise PlanError if one of these counts is missing or 0, or if all of `one_of` are."""
        missing = [name for name in names if not self.count(name)]
        if one_of and not any(self.count(name) for name in one_of):
            missing.append(" or ".join(one_of))
        if missing:
            raise PlanError(f"{self.where} has no {', no '.join(missing)}; the cost of a model needs them")

    def require_count(self, *names: str) -> int:
        """Return a count under the first of these names that is set. Raises PlanError if none is."""
        self.check_counts(one_of=names)
        return self.count(*names)
