"""What transformers' configuration classes make of a config.json: names, types of sections, and values it leaves out.

`class_defaults.json` is written from the classes (bench/census/class_defaults.py); transformers is not imported here.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

# What classes put into lists of layers where a file has no such list; by value, the types of model.
_LIST_VALUES: Mapping[tuple[str, Any], str] = {
    (
        "first_k_dense_replace",
        1,
    ): "axk1 axk2 dots3_note_text glm4_moe_lite hy_v3 hy_v4 hy_v4_vl_text kimi_linear laguna "
    "mimo_v2_flash unlimited_ocr_text",
    ("first_k_dense_replace", 3): "beam glm5_next_text step3p5",
    ("index_topk_freq", 4): "hy_v4 hy_v4_vl_text",
    ("mlp_only_layers", (0, 1)): "flint",
}


_Key = tuple[str, str]  # a type of model, and an attribute of its class


def class_default(model_type: str, attribute: str) -> Any:
    """Return what a class makes of an attribute that a file leaves out, or the class of its text model, if that has one
    class alone; None if neither names a value.
    """
    own = _find_default(model_type, attribute)
    text = _tables()["sections"].get((model_type, "text_config"))
    return _find_default(text, attribute) if own is None and text else own


def names_in_files(model_type: str, attribute: str) -> tuple[str, ...]:
    """Return the names that an attribute may have in a file of this type, the one that counts first."""
    own = _tables()["own_names"].get((model_type, attribute), attribute)
    return (*_other_names().get((model_type, own), ()), own)


def section_type(model_type: str, section: str, named: str | None) -> str:
    """Return the type of model of a section: that of its only class, or else the one `named` in the file, or else the
    one that the class takes; "" if none is known.
    """
    return _tables()["sections"].get((model_type, section)) or named or default_section_type(model_type, section)


def default_section_type(model_type: str, section: str) -> str:
    """Return the type that a class gives a section of any type, where a file says none; "" for another class."""
    return _tables()["sections_without_type"].get((model_type, section), "")


def _find_default(model_type: str, attribute: str) -> Any:
    own = _tables()["own_names"].get((model_type, attribute), attribute)
    return _values().get((model_type, own))


@cache
def _values() -> Mapping[_Key, Any]:
    rows = {text: json.loads(text) for text in set(_tables()["values"].values())}
    values = {key: rows[text] for key, text in _tables()["values"].items()}
    of_lists = {(kind, name): value for (name, value), kinds in _LIST_VALUES.items() for kind in kinds.split()}
    return values | of_lists


@cache
def _other_names() -> Mapping[_Key, list[str]]:
    """Return the other names of a class's attributes."""
    names = dict[_Key, list[str]]()
    for (model_type, name), own in _tables()["own_names"].items():
        if name != own:
            names.setdefault((model_type, own), []).append(name)
    return names


@cache
def _tables() -> Mapping[str, Mapping[_Key, str]]:
    """Return the tables of the file by type of model and attribute; values are JSON."""
    tables = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {
        name: {
            (kind, attribute): entry
            for attribute, row in tables[name].items()
            for entry, kinds in row.items()
            for kind in kinds.split()
        }
        for name in ("own_names", "sections", "sections_without_type", "values")
    }
