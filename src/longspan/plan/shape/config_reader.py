"""Reads values and counts of a transformers configuration, by the names of every family."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from longspan.adapter_folder import adapter_folder_advice
from longspan.errors import PlanError
from longspan.files import read_json
from longspan.plan.shape.class_defaults import class_default
from longspan.plan.shape.families import Family, find_family

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_IN_FILES = {  # of GPT-2
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


@dataclass(eq=False)
class ConfigReader:
    """Reads a transformers configuration, of the language model of one that also sees or hears."""

    _config: Any
    where: str

    @classmethod
    def read_language_model(cls, config: Any) -> "ConfigReader":
        """Read the language model's configuration in an object, a dict, a config.json or its folder."""
        read = cls.read_whole_model(config)
        text = read.value("text_config")
        if isinstance(text, dict):  # one may leave its type out
            text = {"model_type": read.model_type} | cast(dict[str, Any], text)
        return read if text is None else cls(text, f"text_config of {read.where}")

    @classmethod
    def read_whole_model(cls, config: Any) -> "ConfigReader":
        """Read a whole model's configuration, which may have those of a text model and of encoders as sections. Raises
        PlanError for a file that cannot be read or holds none.
        """
        if not isinstance(config, (str, Path)):
            return cls(config, type(config).__name__)
        path = Path(config)
        file = path / "config.json" if path.is_dir() else path
        try:
            values = read_json(file)
        except (OSError, ValueError) as error:
            fault = error.strerror if isinstance(error, OSError) else f"it is not JSON ({error})"
            advice = adapter_folder_advice(file.parent)
            raise PlanError(
                f"cannot read a model's configuration from {file}: {fault}{f'; {advice}' if advice else ''}"
            ) from error
        if not isinstance(values, dict):
            raise PlanError(f"{file} holds no model's configuration: it is not an object")
        return cls(values, str(file))

    @property
    def model_type(self) -> str:
        return str(self.value("model_type") or "")

    @property
    def family(self) -> Family:
        return find_family(self.model_type)

    def value(self, *names: str) -> Any:
        """Return the first of these attributes that is set, by these names or by GPT-2's; else, if a dict has none of
        them, its class's default (class_defaults.py); None if there is none. In place of an intermediate_size that is
        not set, in families that name it otherwise: their attribute, or four times the hidden size.
        """
        config = self._config
        is_object = not isinstance(config, dict)
        for name in (*names, *[_IN_FILES[name] for name in names if name in _IN_FILES]):
            value = getattr(config, name, None) if is_object else cast(dict[str, Any], config).get(name)
            if value is not None:
                return value
        # A null in a config.json is a value of its own, and no default stands in for it.
        for name in () if is_object else names:
            if name not in config and (default := class_default(config.get("model_type") or "", name)) is not None:
                return default
        if "intermediate_size" in names and (attribute := self.family.mlp_width):
            return self.value(attribute) or 4 * self.count("hidden_size")
        return None

    def count(self, *names: str) -> int:
        """Return the first of these attributes that is set, as a count; 0 if none is. Raises PlanError for no count."""
        value = self.value(*names)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            name = next(name for name in names if self.value(name) is not None)
            text = repr(value)
            raise PlanError(f"{name} of {self.where} is {text[:40]}{'…' * (len(text) > 40)}; it must be a count")
        return value

    def section(self, name: str) -> "ConfigReader":
        """Return a reader of the configuration in this attribute; of an empty one if it is not set."""
        return ConfigReader(self.value(name) or {}, f"{name} of {self.where}")

    def experts_attribute_and_count(self) -> tuple[str, int]:
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
        """Return the first of these counts that is not 0. Raises PlanError if each is missing or 0."""
        self.check_counts(one_of=names)
        return next(count for name in names if (count := self.count(name)))
