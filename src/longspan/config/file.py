"""Configuration files: TOML to a RunConfig and back. Unknown names are refused with the nearest known one."""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from longspan.config.defaults import resolve_defaults
from longspan.config.keys import NOT_GIVEN, section_keys, with_key_values
from longspan.config.other_names import key_of_other_name
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig, SourceConfig, section_kinds
from longspan.config.values import convert_value
from longspan.errors import ConfigError
from longspan.plain_text import nearest_hint, nearest_name

SETS = "evaluation.sets"
# Tables of an array, which are no values.
TABLES: dict[str, type[Any]] = {"data.sources": SourceConfig, SETS: EvalConfig}
Value = TypeVar("Value")


def load_config(path: str | Path | None = None, overrides: Mapping[str, object] | None = None) -> RunConfig:
    """Read a configuration: the file, then `overrides` ("section.key": value), then defaults for what is in neither.

    >>> load_config(None, {"train.steps": 10}).train.steps
    10

    Raises ConfigError for a file that is missing or not TOML, and one for all unknown sections and keys (each with the
    nearest name) and values of the wrong type. Whether the values fit together is checked by `check_config`.
    """
    config = RunConfig() if path is None else read_file(path)
    tables = dict[str, Any]()
    for key, value in (overrides or {}).items():
        section, _, name = key.partition(".")
        # without a name: the values of a whole section
        tables[section] = {**tables.get(section, {}), name: value} if name else value
    config = _with_sections(config, tables, source="the overrides")
    return resolve_defaults(config)


def read_file(path: str | Path) -> RunConfig:
    """Read the keys that a file gives, without defaults. Raises ConfigError as `load_config` does."""
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        nearest = nearest_name(path.name, [file.name for file in path.parent.glob("*.toml") if file.is_file()])
        advice = "give a TOML file" if nearest is None else f"did you mean {nearest!r}?"
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}; {advice}") from error
    except (ValueError, RecursionError) as error:
        # a ValueError also of integers with thousands of digits, and of bytes not UTF-8
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return _with_sections(RunConfig(), tables, source=str(path))


def config_keys() -> tuple[str, ...]:
    """List every "section.key", in order."""
    names = (f"{section}.{key.name}" for section, kind in section_kinds().items() for key in section_keys(kind))
    return tuple(name for name in names if name not in TABLES)


def to_toml(config: RunConfig, chosen: RunConfig | None = None) -> str:
    """Return the configuration as TOML; `load_config` of it gives an equal one back.

    `chosen` is the same configuration with the values that a run chose for open keys ("auto", 0): where a key's value
    differs, a comment behind the key has the chosen one.
    """
    texts = list[str]()
    for (title, keys), (_, values) in zip(_tables(config), _tables(chosen or config), strict=True):
        lines = [title]
        for key, value in keys.items():
            if value is NOT_GIVEN:
                continue
            comment = f"  # chosen: {_toml_text(values[key])}" if values[key] != value else ""
            lines.append(f"{key} = {_toml_text(value)}{comment}")
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


def _tables(config: RunConfig) -> list[tuple[str, dict[str, Any]]]:
    """Tables of an array come behind the sections."""
    values = config.tables()
    arrays = list[tuple[str, dict[str, Any]]]()
    for name in TABLES:
        section, _, key = name.partition(".")
        arrays += [(f"[[{name}]]", table) for table in values[section].pop(key)]
    return [(f"[{name}]", values[name]) for name in section_kinds()] + arrays


def _toml_text(value: Any) -> str:
    # JSON of strings, numbers, true and false, and lists of them is TOML too, except DEL, which JSON leaves bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _with_sections(config: RunConfig, tables: Mapping[str, Any], source: str) -> RunConfig:
    calls = (
        partial(_section_with_values, config, section, values, source=source) for section, values in tables.items()
    )
    return replace(config, **dict(zip(tables, _collect_values_or_errors(calls), strict=True)))


def _collect_values_or_errors(calls: Iterable[Callable[[], Value]]) -> tuple[Value, ...]:
    """One ConfigError has the texts of all that calls have raised."""
    values = list[Value]()
    problems = list[str]()
    for call in calls:
        try:
            values.append(call())
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(problems))
    return tuple(values)


def _section_with_values(config: RunConfig, section: str, values: object, *, source: str) -> Any:
    """One ConfigError names all keys that are wrong."""
    names = [field.name for field in fields(RunConfig)]
    if section not in names:
        raise ConfigError(
            f"unknown section [{section}] in {source}: {_unknown_section_hint(section, values, names)}"
        )
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{section} is {values!r} in {source}; it is a section: write [{section}] and its keys below"
        )
    if section == "data" and isinstance(columns := values.get("rename_columns"), Mapping):
        pairs = [f"{ours}={theirs}" if isinstance(theirs, str) else theirs for ours, theirs in columns.items()]
        values = {**values, "rename_columns": pairs}
    keys = {key: value for key, value in values.items() if f"{section}.{key}" not in TABLES}
    arrays = {key: value for key, value in values.items() if key not in keys}
    calls = [partial(_with_keys, getattr(config, section), section, keys, source)]
    calls += [partial(_read_tables, value, f"{section}.{key}", source) for key, value in arrays.items()]
    changed, *tables = _collect_values_or_errors(calls)
    return replace(changed, **dict(zip(arrays, tables, strict=True)))


def _unknown_section_hint(section: str, values: object, names: Iterable[str]) -> str:
    """It may be a key without its section, another library's key, or another library's section."""
    if owners := [key for key in config_keys() if key.endswith(f".{section}")]:
        return f"did you mean {owners[0]!r}?"
    if hint := _other_name_hint(section):
        return hint
    keys = values if isinstance(values, Mapping) else ()
    hints = [f"{key}: {hint}" for key in keys if (hint := _other_name_hint(f"{section}.{key}"))]
    return "; ".join(hints) or nearest_hint(section, names)


def _other_name_hint(name: str) -> str:
    other = key_of_other_name(name)
    if other is None:
        return ""
    if not other.key:
        return other.remark
    value, _, more = other.remark.partition(" ")
    # A remark is a value, as in "context.planner dynamic", or a text in brackets.
    if value and not value.startswith("("):
        return f"here it is {other.key} = {json.dumps(value)} {more}".rstrip()
    return f"here it is {other.key} {other.remark}".rstrip()


def _read_tables(tables: object, name: str, source: str) -> tuple[Any, ...]:
    is_set = name == SETS
    if not isinstance(tables, list | tuple) or not all(isinstance(table, Mapping) for table in tables):
        content = "name, path and other keys of the set" if is_set else "path and weight"
        title = "evaluation sets" if is_set else "sources"
        raise ConfigError(
            f"{name} is {tables!r} in {source}; {title} are tables of an array: write [[{name}]], and below "
            f"it {content}"
        )
    labels = [
        f"{name}.{table.get('name') or number + 1}" if is_set else f"{name}[{number}]"
        for number, table in enumerate(tables)
    ]
    pairs = zip(labels, tables, strict=True)
    return _collect_values_or_errors(
        partial(_with_keys, TABLES[name](), label, table, source) for label, table in pairs
    )


def _with_keys(section: Any, label: str, values: Mapping[str, object], source: str) -> Any:
    types = {key.name: key.kind for key in section_keys(type(section))}

    def refuse(key: str) -> object:
        raise ConfigError(f"unknown key {label}.{key} in {source}: {_unknown_key_hint(section, label, key, types)}")

    calls = [
        partial(convert_value, f"{label}.{key}", value, types[key], source)
        if key in types
        else partial(refuse, key)
        for key, value in values.items()
    ]
    return with_key_values(section, dict(zip(values, _collect_values_or_errors(calls), strict=True)))


def _unknown_key_hint(section: Any, label: str, key: str, siblings: Iterable[str]) -> str:
    if hint := _other_name_hint(key):
        return hint
    if isinstance(section, EvalConfig) and f"evaluation.{key}" in config_keys():
        return f"did you mean 'evaluation.{key}', which is for all sets?"
    if isinstance(section, SourceConfig | EvalConfig):
        return nearest_hint(key.removeprefix("eval_"), siblings)
    elsewhere = [known_key for known_key in config_keys() if known_key.endswith(f".{key}")]
    return (
        f"did you mean {elsewhere[0]!r}?"
        if elsewhere
        else nearest_hint(key, siblings).replace("'", f"'{label}.", 1)
    )
