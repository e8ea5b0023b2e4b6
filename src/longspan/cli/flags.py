"""Words of the command line to a dataclass of flags, for every verb.

Names, and values of choices, numbers and booleans, are checked here, other values by tyro. `train` and `eval` have
every key of the configuration as `--section.key value`; help texts are the docstrings of the fields.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, fields, is_dataclass, replace
from io import StringIO
from itertools import takewhile
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Fixed, FlagConversionOff, FlagCreatePairsOff, Positional, Suppress
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from longspan.cli.processes import Device, count_ranks
from longspan.config.defaults import find_folders, resolve_defaults
from longspan.config.file import kind_text, nearest_hint, read_choice_word, read_file
from longspan.config.keys import key_value, section_keys, section_texts, set_key_values
from longspan.config.plan_section import ContextConfig, EvalConfig
from longspan.config.sections import (
    DataConfig,
    EncoderSection,
    ModelConfig,
    MtpSection,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from longspan.errors import ConfigError
from longspan.files import name_file_in_errors, os_error_text

Flags = TypeVar("Flags")
_BOOLEANS = ("true", "false", "True", "False")
_NUMBERS = {int: "an integer", float: "a number"}
_FEW = 12  # flags that an error lists
_EXAMPLES = {int: "2 4", float: "0.9 0.95", str: "first second"}  # of lists


_SECTIONS = ConstructorRegistry()


@_SECTIONS.struct_rule
def _section_flags(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Give tyro a flag for each key of [context]; None leaves any other type to tyro.

    Files have the keys of evaluation in the same table, as eval_KEY; in code they are a dataclass inside ContextConfig,
    for which tyro by itself would make flags --context.evaluation.KEY.
    """
    kind: Any = info.type
    if kind is not ContextConfig:
        return None
    section = info.default if isinstance(info.default, ContextConfig) else ContextConfig()
    texts = section_texts(kind)
    flags = (
        StructFieldSpec(key.name, key.kind, key_value(section, key.name), helptext=texts[key.name])
        for key in section_keys(kind)
    )
    return StructConstructorSpec(lambda **values: set_key_values(section, values), tuple(flags))


def parse_flags(kind: type[Flags], argv: Sequence[str], prog: str, default: Flags | None = None) -> Flags:
    """Parse the flags of a verb from its words; `--help` prints and exits.

    >>> parse_flags(ReportFlags, ["runs/first", "--json"], "longspan report")

    Raises ConfigError, with the nearest flag for one that does not exist, or with tyro's text.
    """
    words = _read_words(argv, flag_types(kind), prog)
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    refusal = StringIO()
    try:
        with redirect_stderr(refusal), _SECTIONS:
            return tyro.cli(kind, prog=prog, args=words, use_underscores=True, **defaults)
    except SystemExit as end:
        if not end.code:
            raise
        # an empty choice would be listed as nothing before a comma
        text = _box_text(refusal.getvalue()).replace("options: , ", "options: ")
        raise ConfigError(f"{text}; see {prog} --help") from None


def _box_text(text: str) -> str:
    """Return tyro's error in one line: what stands between the rule with its title and the next rule.

    A rule is a side of a box or a row of dashes, by tyro's version. Without any rule all lines count.
    """
    lines = [line.strip("│ ") for line in text.splitlines() if line.strip()]
    is_rule = [line.startswith("╭") or not line.strip("─╰╯-") for line in lines]
    lines_below = lines[is_rule.index(True) + 1 :] if True in is_rule else lines
    message = list(takewhile(lambda line: line.strip("─╰╯-"), lines_below))
    return " ".join(" ".join(message or lines).split()).rstrip(".")


def check_least(flags: Any, **least: int) -> None:
    """Raise ConfigError where the value of a flag is below the least that it may be."""
    for name, number in least.items():
        if (value := getattr(flags, name)) < number:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give an integer of at least {number}")


def write_text(path: str | Path, text: str) -> None:
    """Write a file that a flag names. Raises ConfigError where it cannot be written."""
    try:
        with name_file_in_errors(Path(path)):
            Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {os_error_text(error)}") from error


def flag_types(kind: type) -> dict[str, Any]:
    """List every flag of a flags dataclass, as on the command line, with the type of its value; tables have none."""
    types, marked = dict[str, Any](), get_type_hints(kind, include_extras=True)
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            keys = (key for key in section_keys(hint) if not any(map(is_dataclass, get_args(key.kind))))
            types |= {f"--{name}.{key.name}": key.kind for key in keys}
        elif {"Positional", "Fixed"}.isdisjoint(map(repr, getattr(marked[name], "__metadata__", ()))):  # tyro's marks
            types[f"--{name}"] = hint
    return types


def split_flags(argv: Sequence[str]) -> Iterator[tuple[str, list[str], bool]]:
    """Yield each flag with underscores, the words behind it, and whether "=" is before the first of them.

    The words before any flag come first, with the flag "".
    """
    flag, values, joined = "", list[str](), False
    for word in argv:
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag or values:
            yield flag, values, joined
        flag, equals, value = word.partition("=")
        flag, values, joined = "--" + flag[2:].replace("-", "_"), [value] * bool(equals), bool(equals)
    if flag or values:
        yield flag, values, joined


def _read_words(argv: Sequence[str], types: dict[str, Any], prog: str) -> list[str]:
    """Return the words as tyro reads them: true and false as in Python, and every number of a list a word of its own.

    A list takes all words up to the next flag, or the one behind "="; lists of numbers may be written 2,2 or [2, 2].
    """
    words = list[str]()
    for flag, values, joined in split_flags(argv):
        if not flag:
            words += values
            continue
        _check_name(flag, types, prog)
        kind = types.get(flag)
        value = values[0] if values else None
        if kind is bool and not joined and value not in _BOOLEANS:
            words += [flag, *["True"] * ("." in flag), *values]  # a key needs a value, --json takes none
        elif (list_type := _list_type(kind)) is not None:
            count = 1 if joined and not values[0].startswith("[") else len(values)
            items = values[:count]
            if get_args(list_type)[0] in _NUMBERS:
                items = [number for item in items for number in re.split(r"[\[\],\s]+", item) if number]
            _check_list(flag, items, kind)
            first = [f"{flag}={items[0]}"] if joined and len(items) == 1 else [flag, *items]
            words += [*first, *values[count:]]
        else:
            _check_value(flag, value, kind)
            if value is None:  # --help
                words.append(flag)
                continue
            text = value.capitalize() if kind is bool else str(read_choice_word(value, kind))
            words += [f"{flag}={text}", *values[1:]] if joined else [flag, text, *values[1:]]
    return words


def _check_value(flag: str, value: str | None, kind: Any) -> None:
    if kind is None:  # --help
        return
    if get_origin(kind) is Literal and read_choice_word(value, kind) not in get_args(kind):
        advice = f"use one of {', '.join(map(str, filter(None, get_args(kind))))}"  # "" is not listed
    elif kind in _NUMBERS and not _is_number(value or "", kind):
        advice = f"it must be {_NUMBERS[kind]}"
    elif kind is bool and value not in _BOOLEANS:
        advice = "it must be true or false"
    elif value is None:
        advice = "write one behind it"
    else:
        return
    raise ConfigError(f"{flag} is {value!r}; {advice}" if value is not None else f"{flag} has no value; {advice}")


def _list_type(kind: Any) -> Any:
    options = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return next((option for option in options if get_origin(option) is tuple), None)


def _check_list(flag: str, words: Sequence[str], kind: Any) -> None:
    item_type, *further_types = get_args(_list_type(kind))
    count = len(words) if further_types == [...] else 1 + len(further_types)
    values = words[:count]
    if not values or len(values) < count or not all(item_type is str or _is_number(word, item_type) for word in values):
        text = f"is {' '.join(values)!r}" if values else "has no value"
        raise ConfigError(f"{flag} {text}; it must be {kind_text(kind)}, as in {flag} {_EXAMPLES[item_type]}")


def _is_number(word: str, kind: type[int] | type[float]) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True


def check_flag_names(argv: Sequence[str], types: dict[str, Any], prog: str) -> None:
    """Raise ConfigError for a flag among the words that a verb with these flags does not have, with the nearest one."""
    for flag, _, _ in split_flags(argv):
        if flag:
            _check_name(flag, types, prog)


def _check_name(flag: str, types: dict[str, Any], prog: str) -> None:
    if flag in types or flag == "--help":
        return
    flags_in_sections = [name for name in types if name.endswith("." + flag[2:])]  # --train.steps for --steps
    hint = f"did you mean {flags_in_sections[0]!r}?" if flags_in_sections else nearest_hint(flag, types, prefix="--")
    if hint.startswith("known: ") and len(types) > _FEW:
        hint = f"{prog} --help lists those that it has"
    raise ConfigError(f"{prog} has no flag {flag}: {hint}")


Switch = Annotated[bool, FlagCreatePairsOff]


@dataclass(frozen=True)
class TrainFlags(RunConfig):
    """Train a model. Values come from the defaults, then from CONFIG.toml, then from flags.

    Without --world it starts a process for each GPU of this machine, or one where there are none. With --world N it
    starts N processes; under torchrun it uses those of torchrun. Each has a GPU where there are any. The configuration,
    metrics, checkpoints, plans and report.html are written to the run's folder. If the folder holds a run already, that
    run continues from its newest checkpoint. Where the default of a key depends on the model, its text says so, and
    --help shows -1 or ''.
    """

    model: FlagConversionOff[ModelConfig] = field(default_factory=ModelConfig)
    data: FlagConversionOff[DataConfig] = field(default_factory=DataConfig)
    parallel: FlagConversionOff[ParallelConfig] = field(default_factory=ParallelConfig)
    train: FlagConversionOff[TrainConfig] = field(default_factory=TrainConfig)
    mtp: FlagConversionOff[MtpSection] = field(default_factory=MtpSection)
    encoder: FlagConversionOff[EncoderSection] = field(default_factory=EncoderSection)
    eval: Suppress[Fixed[tuple[EvalConfig, ...]]] = ()
    config: Annotated[Positional[str], tyro.conf.arg(metavar="CONFIG.toml")] = ""
    """Configuration file; without one, the demo of `make train`."""
    world: int = 0
    """Processes to start on this machine; 0: one for each GPU (CUDA_VISIBLE_DEVICES), one without GPUs, or those of
    torchrun."""
    device: Device = "auto"
    """auto: a GPU for each process where there are any; cpu: processes on CPUs; cuda: GPUs, or an error."""
    json: Switch = False
    """Print the result as one JSON object on standard output; progress goes to standard error."""
    show: int = 0
    """Train nothing: print the first so many rows of each source as tokens, with the targets marked."""
    dry_run: Switch = False
    """Train nothing: print what the run would hold on each GPU, with which measures, its steps and hours."""


def parse_train(argv: Sequence[str]) -> tuple[TrainFlags, RunConfig]:
    """Parse the flags of `train`, and the configuration that file, flags and the number of ranks make together."""
    flags = parse_flags(TrainFlags, argv, "longspan train", TrainFlags())
    if flags.config:  # again, with the file's values as defaults: flags win over them
        file = read_file(flags.config)
        sections = {field.name: getattr(file, field.name) for field in fields(RunConfig)}
        flags = parse_flags(TrainFlags, argv, "longspan train", replace(TrainFlags(), **sections))
    config = RunConfig(**{field.name: getattr(flags, field.name) for field in fields(RunConfig)})
    config = find_folders(config, weights=not (flags.dry_run or flags.show))
    return flags, resolve_defaults(config, count_ranks(flags.world, flags.device))
