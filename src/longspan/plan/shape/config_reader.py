"""Reads values and counts of a transformers configuration, by the names of every family."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from longspan.adapter_folder import adapter_folder_advice
from longspan.errors import PlanError
from longspan.files import read_json
from longspan.plan.shape.class_defaults import class_default, default_section_type, names_in_files, section_type
from longspan.plan.shape.families import Family, find_family
from longspan.plan.shape.quantization import find_quantization_settings, remove_quantization_settings

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(eq=False)
class ConfigReader:
    """Reads a transformers configuration, of the language model of one that also sees or hears."""

    _config: Any
    where: str

    @classmethod
    def read_language_model(cls, config: Any) -> "ConfigReader":
        """Read the language model's configuration in an object, a dict, a config.json or its folder."""
        read = cls.read_whole_model(config)
        if read.value("text_config") is not None:
            return read.section("text_config")
        # A file without the section may hold the values itself, unless its class takes a text model of any type.
        if isinstance(config, (str, Path, dict)) and default_section_type(read.model_type, "text_config"):
            return cls({}, f"text_config of {read.where}")
        return read

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

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output projection of this model, or of its language model, is the embedding."""
        text = self.read_language_model(self._config)
        return bool(
            self.value("tie_word_embeddings") or (self.value("tied_by_text") and text.value("tie_word_embeddings"))
        )

    def value(self, *names: str) -> Any:
        """Return the first of these attributes that is set, by each name that files of this type have for it; if a dict
        leaves one out, its class's default (class_defaults.py) is set, and goes before the names behind it, as in an
        object of that class. None if none is. In place of an intermediate_size that is not set, in families that name
        it otherwise: their attribute, or four times the hidden size.
        """
        for name in names:
            if (value := self._find_value(name)) is not None:
                return value
        if "intermediate_size" in names and (attribute := self.family.mlp_width):
            return self.value(attribute) or 4 * self.count("hidden_size")
        return None

    def _find_value(self, name: str) -> Any:
        config = self._config
        if not isinstance(config, dict):
            try:
                return getattr(config, name, None)
            except RuntimeError:
                # transformers hands out no value that some layers have another of (Gemma 4's heads): others have it.
                return object.__getattribute__(config, name)
        values = cast(dict[str, Any], config)
        model_type = str(values.get("model_type") or "")
        in_file = [key for key in names_in_files(model_type, name) if key in values]
        # A null in a config.json is a value of its own, and no default stands in for it.
        return values[in_file[0]] if in_file else class_default(model_type, name)

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
        section: Any = self.value(name) or {}
        if isinstance(section, dict) and section:
            values = cast(dict[str, Any], section)
            section = values | {"model_type": section_type(self.model_type, name, values.get("model_type"))}
        return ConfigReader(section, f"{name} of {self.where}")

    def quantization_settings(self) -> dict[str, Any]:
        """Return the `quantization_config`, also of one of the configuration's parts; {} without one."""
        return find_quantization_settings(self._config)

    def values_without_quantization(self) -> dict[str, Any]:
        """Return the values of a file without a `quantization_config`, also of its parts: of weights that are drawn."""
        return remove_quantization_settings(self._config)

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
