"""What plans know of transformers' configuration classes, written from these: names of attributes, types of sections
and defaults, of each attribute that a file of plan/ names.

    python bench/census/class_defaults.py
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import transformers  # noqa: E402
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig  # noqa: E402

PLAN = ROOT / "src" / "longspan" / "plan"
FILE = PLAN / "shape" / "class_defaults.json"
SECTIONS = ("text_config", "vision_config")
NOT_SIZES = {"architectures", "dtype", "layer_types", "model_type", "rope_parameters", "rope_scaling", *SECTIONS}
Row = defaultdict[str, set[str]]


def main() -> None:
    FILE.write_text(json.dumps(read_classes(), indent=1) + "\n", encoding="utf-8")


def read_classes() -> dict[str, Any]:
    """Return the file's content: by attribute and what the class says, the types of model, of the census and of the
    sections of its models. Of values the key is JSON.
    """
    named = attributes_of_plans()
    own_names, sections, untyped, values = (defaultdict[str, Row](lambda: defaultdict(set)) for _ in range(4))
    for kind, config in CONFIG_MAPPING.items():
        for section, section_type, is_fixed in section_types(config):
            (sections if is_fixed else untyped)[section][section_type].add(kind)
        for name, own in config.attribute_map.items():
            if not named.isdisjoint((name, own)):
                own_names[name][own].add(kind)
        for name, value in defaults(config):
            own = config.attribute_map.get(name, name)
            others = (other for other, mapped in config.attribute_map.items() if mapped == own)
            if not named.isdisjoint((name, own, *others)):
                values[own][json.dumps(value)].add(kind)
        if ties_by_text(config):
            values["tied_by_text"]["true"].add(kind)
    return {
        "transformers": transformers.__version__,
        "own_names": as_text(own_names),
        "sections": as_text(sections),
        "sections_without_type": as_text(untyped),
        "values": as_text(values),
    }


def attributes_of_plans() -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in PLAN.rglob("*.py"))
    return {name for text in texts for name in re.findall(r'"([A-Za-z]\w*)"', text)} - NOT_SIZES


def section_types(config: type[PreTrainedConfig]) -> Iterator[tuple[str, str, bool]]:
    """Yield each section of a class, the type of its class, and whether it has no other, whatever a file says."""
    for section in SECTIONS:
        made = config.sub_configs.get(section)
        if made is AutoConfig:
            try:
                yield section, getattr(config(**{section: {}}), section).model_type, False
            except Exception:  # a class may ask for more
                continue
        elif made is not None:
            yield section, made.model_type, True


def defaults(config: type[PreTrainedConfig]) -> Iterator[tuple[str, Any]]:
    for field in fields(config):
        value = field.default if field.default_factory is MISSING else field.default_factory()
        if value is not MISSING and value is not None and not isinstance(value, dict):
            yield field.name, value


def ties_by_text(config: type[PreTrainedConfig]) -> bool:
    """Return whether a class ties embeddings where only the configuration of its text model says so."""
    if "text_config" not in config.sub_configs:
        return False
    try:
        text = config().text_config.to_dict() | {"tie_word_embeddings": True}
        return bool(config(text_config=text, tie_word_embeddings=False).tie_word_embeddings)
    except Exception:
        return False


def as_text(table: Mapping[str, Row]) -> dict[str, dict[str, str]]:
    return {
        name: {key: " ".join(sorted(kinds)) for key, kinds in sorted(table[name].items())} for name in sorted(table)
    }


if __name__ == "__main__":
    main()
