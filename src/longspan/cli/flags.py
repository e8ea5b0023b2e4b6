"""Words of the command line to a dataclass of flags, for every verb, and what `--help` shows of them.

`train` and `eval` have every key of the configuration as `--section.key value`; a verb's other flags have dashes. A
flag may have dashes or underscores, and "=" or a space before its value. Files that flags name are written here too.
"""

import inspect
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from textwrap import wrap
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from longspan.config.keys import (
    NOT_GIVEN,
    key_value,
    read_own_texts,
    section_keys,
    section_texts,
    with_key_values,
)
from longspan.config.other_names import key_of_other_name
from longspan.config.values import annotation_text, read_words
from longspan.errors import ConfigError
from longspan.files import name_file_in_errors, os_error_text
from longspan.plain_text import nearest_hint, nearest_name

Groups = Mapping[str, Sequence[str]]  # titles, and the flags of each: those that --help shows, as SHOWN of a class
_NAMES = 30  # columns of flags
_WIDEST = 110  # columns in all
_VALUES = {int: "N", float: "X", str: "TEXT", bool: ""}


@dataclass(frozen=True)
class Word:
    """Marks a field as a word without a flag: its name in help, and, if it must be given, what it is and an example."""

    metavar: str
    what: str = ""
    example: str = ""


def word_fields(kind: Any) -> dict[str, Word]:
    """Return the fields of a flags dataclass that are words without a flag, by name, in the order of the words."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: mark for name in marks for mark in marks[name] if isinstance(mark, Word)}


def flag_text(flag: str) -> str:
    """Write a flag as messages and help do: with dashes, but a key of the configuration with its underscores."""
    return flag if "." in flag else flag.replace("_", "-")


def help_text(kind: Any, types: Mapping[str, Any], prog: str, *, whole: bool) -> str:
    """Write the help of a verb: its text, its examples, and the flags of its `SHOWN`, or (`whole`) all `types`."""
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    words = word_fields(kind)
    texts = {name: text for base in reversed(kind.__mro__[:-1]) for name, text in read_own_texts(base).items()}
    for section, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            texts |= {f"{section}.{key}": text for key, text in section_texts(hint).items()}
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    examples = [f"  {text}" for text in paragraphs if text.startswith("longspan ")]
    lines = [" ".join(["usage:", prog, *(word.metavar for word in words.values()), "[flags]"])]
    for paragraph in paragraphs:
        if not paragraph.startswith("longspan "):
            lines += ["", *wrap(" ".join(paragraph.split()), width)]
    lines += ["", "examples:", *examples] if examples else []
    lines += [""] if words else []
    for name, word in words.items():
        lines += _flag_lines(word.metavar, texts[name], width)
    shown: Groups = getattr(kind, "SHOWN", {})
    groups = {title: list(flags) for title, flags in shown.items()}
    if whole or not shown:
        for flag in (flag for flag in types if not any(flag in flags for flags in shown.values())):
            title = "further flags" if shown else "flags"
            if "." in flag:
                title = f"[{flag[2:].partition('.')[0]}]"
            groups.setdefault(title, []).append(flag)
    for title, flags in groups.items():
        lines += ["", f"{title}:"]
        for flag in flags:
            # Verbs without that section have the flag under this name.
            name = "--data" if flag == "--data.path" else flag_text(flag)
            text = texts[flag[2:]] + _default_text(kind, flag, texts[flag[2:]])
            lines += _flag_lines(f"{name} {_accepted_values_text(types[flag])}", text, width)
    if shown and not whole:
        lines += ["", f"{prog} --help-all shows all {len(types)} flags."]
    return "\n".join(lines)


def _flag_lines(name: str, text: str, width: int) -> Iterator[str]:
    """Lines are at most `width` wide; a long name has a line of its own."""
    if len(name) > _NAMES - 4:
        yield f"  {name}"
        name = ""
    yield from wrap(text, width, initial_indent=f"  {name:<{_NAMES - 2}}", subsequent_indent=" " * _NAMES)


def _accepted_values_text(kind: Any) -> str:
    """Such as "auto|cpu|cuda", "N" for a number or "N …" for several."""
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind) if choice)
    if get_origin(kind) is tuple:
        return f"{_accepted_values_text(get_args(kind)[0])} …"
    if kind in _VALUES:
        return _VALUES[kind]
    # The type is one of several.
    return "|".join(map(_accepted_values_text, get_args(kind)))


def _default_text(kind: Any, flag: str, text: str) -> str:
    """No text where the default is empty or false, where a run decides it, and where the `text` says it."""
    name, _, key = flag[2:].partition(".")
    field = next(field for field in fields(kind) if field.name == name)
    value = field.default if field.default_factory is MISSING else field.default_factory()
    value = key_value(value, key) if key else value
    # Without a file, keys have the values of a run.
    of_run = bool(key) and "config" not in word_fields(kind)
    if of_run or "Default" in text or value is False or value in ("", (), NOT_GIVEN):
        return ""
    if isinstance(value, tuple):
        shown = " ".join(map(str, value))
    elif isinstance(value, float):
        shown = f"{value:g}"
    else:
        shown = str(value).lower()
    return f" (default: {shown})"


Flags = TypeVar("Flags", bound=Any)
Defaults = Callable[[Sequence[str]], Mapping[str, Any]]
Repeated = Annotated[tuple[str, ...], "again for more"]  # a flag that is given once for each of its values
# Lists whose entries may hold a comma or a space: paths and NAME=VALUE. Of every other list both part entries.
WHOLE_WORDS = {
    "--plot",
    "--data.rename_columns",
    "--train.loss_arguments",
    "--optimizer.arguments",
    "--optimizer.groups",
}
_WHOLE_HELP = {"--help-all", "--help_all"}
HELP = {"-h", "--help"} | _WHOLE_HELP
OTHER_SPELLING = {"--data": "--data.path", "--data.path": "--data"}  # two spellings of one flag
_FEW = 12  # flags that an error lists
# Flags of plans, and the keys of training that they stand for.
KEY_OF_PLAN_FLAG = {
    "--data": "--data.path",
    "--tokens_per_step": "--train.tokens_per_step",
    "--epochs": "--train.epochs",
    "--machine": "--run.machine",
    "--tp": "--parallel.tp",
    "--pp": "--parallel.pp",
    "--vpp": "--parallel.vpp",
    "--planner": "--context.planner",
    "--cp": "--context.context_parallel_size",
    "--min_cp": "--context.min_dynamic_context_parallel_size",
    "--max_cp": "--context.max_dynamic_context_parallel_size",
    "--max_tokens_per_slot": "--context.max_tokens_per_slot",
    "--cp_comm_type": "--context.cp_comm_type",
    "--hierarchical_context_parallel_sizes": "--context.hierarchical_context_parallel_sizes",
    "--partition": "--context.partition",
    "--mode": "--context.mode",
    "--node_size": "--context.node_size",
}
_PLAN_FLAG_OF_KEY = {key: flag for flag, key in KEY_OF_PLAN_FLAG.items()}


def parse_flags(
    kind: type[Flags], argv: Sequence[str], prog: str, defaults: Defaults | Mapping[str, Any] | None = None
) -> Flags:
    """Parse the flags of a verb from its words; `--help` and `--help-all` print and exit.

    >>> parse_flags(ReportFlags, ["runs/first", "--json"], "longspan report")

    `defaults` are values of fields, in place of those of the class, or a function of the words without flags that
    returns them. Raises ConfigError for flags that do not exist, with the nearest ones, for values that they do not
    take, and for words that are missing or too many.
    """
    types = flag_types(kind)
    hints = get_type_hints(kind, include_extras=True)
    if not HELP.isdisjoint(argv):
        print(help_text(kind, types, prog, whole=not _WHOLE_HELP.isdisjoint(argv)))
        raise SystemExit(0)
    check_flag_names(argv, types, prog)
    words = list[str]()
    values = dict[str, Any]()
    for flag, behind, joined in split_flags(argv):
        name = flag if flag in types else OTHER_SPELLING.get(flag, flag)
        if not name:
            words += behind
            continue
        is_repeated = hints.get(name[2:]) == Repeated
        value, further_words = _read_value(name, behind, str if is_repeated else types[name], joined=joined)
        values[name] = (*values.get(name, ()), value) if is_repeated else value
        words += further_words
    return make_flags(kind, words, values, prog, defaults or {})


def make_flags(
    kind: type[Flags],
    words: Sequence[str],
    values: Mapping[str, Any],
    prog: str,
    defaults: Defaults | Mapping[str, Any],
) -> Flags:
    """Make a flags dataclass of the words without flags and of the values by flag ("--tp" or "--parallel.tp").

    `prog` and `defaults` as of `parse_flags`. Raises ConfigError for words that are missing or too many.
    """
    places = word_fields(kind)
    if len(words) > len(places):
        takes = f"it takes {' and '.join(place.metavar for place in places.values())}, and" if places else "its"
        raise ConfigError(f"{prog} does not know what {words[len(places)]!r} is for: {takes} flags begin with --")
    arguments = {**(defaults(words) if callable(defaults) else defaults), **dict(zip(places, words, strict=False))}
    # fields without a default are words, which must be given
    required = [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
    if missing := [places[name] for name in required if name not in arguments]:
        example = " ".join([prog, *(place.example for place in places.values() if place.example)])
        raise ConfigError(f"{prog} needs {' and '.join(place.what for place in missing)}: {example}")
    sections = dict[str, dict[str, Any]]()  # keys and values of those fields that are sections of a configuration
    for flag, value in values.items():
        field_name, dot, key = flag[2:].partition(".")
        if dot:
            sections.setdefault(field_name, {})[key] = value
        else:
            arguments[field_name] = value
    for field in fields(kind):
        if field.name in sections and field.default_factory is not MISSING:
            start = arguments.get(field.name) or field.default_factory()
            arguments[field.name] = with_key_values(start, sections[field.name])
    return kind(**arguments)


def check_flags_at_least(flags: Any, **least: int) -> None:
    """Raise ConfigError for a flag whose value is below its least one; `least` has these by the names of fields."""
    for name, number in least.items():
        if (value := getattr(flags, name)) < number:
            raise ConfigError(f"{flag_text(f'--{name}')} is {value}; give an integer of at least {number}")


def write_text_file(path: str | Path, text: str) -> None:
    """Write a file that a flag names, in UTF-8, over one that is there.

    Raises ConfigError for what the disk refuses.
    """
    try:
        with name_file_in_errors(Path(path)):
            Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {os_error_text(error)}") from error


def flag_types(kind: Any) -> dict[str, Any]:
    """List every flag of a flags dataclass, with underscores, with the type of its value. Keys that are lists of
    tables, such as [[data.sources]], have no flag.
    """
    types = dict[str, Any]()
    hints = get_type_hints(kind)
    words = word_fields(kind)
    for name in (field.name for field in fields(kind) if field.name not in words):
        if is_dataclass(hints[name]):
            types |= {f"--{name}.{key.name}": key.kind for key in section_keys(hints[name])}
        else:
            types[f"--{name}"] = hints[name]
    return {flag: hint for flag, hint in types.items() if not any(map(is_dataclass, get_args(hint)))}


def split_flags(argv: Sequence[str]) -> Iterator[tuple[str, list[str], bool]]:
    """Yield each flag with underscores, the words behind it, and whether "=" is before the first of them. The words
    before any flag come first, with the flag "".
    """
    flag = ""
    values = list[str]()
    joined = False
    for word in argv:
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag or values:
            yield flag, values, joined
        flag, equals, value = word.partition("=")
        flag = "--" + flag[2:].replace("-", "_")
        joined = bool(equals)
        values = [value] if joined else []
    if flag or values:
        yield flag, values, joined


def _read_value(flag: str, words: Sequence[str], kind: Any, *, joined: bool) -> tuple[Any, Sequence[str]]:
    """Returns the value, and the words that are left. A list takes all words up to the next flag, but behind "="
    (`joined`) only one, unless it begins with "["; 2,2 and [2, 2] are "2 2", but for lists of WHOLE_WORDS."""
    if kind is bool and not joined and (not words or words[0].lower() not in ("true", "false")):
        return True, words
    options = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    list_type = next((option for option in options if get_origin(option) is tuple), None)
    takes_one = list_type is None or (joined and not words[0].startswith("["))
    count = 1 if takes_one else len(words)
    items = list(words[:count])
    text = " ".join(items)
    if list_type is not None and flag not in WHOLE_WORDS:
        inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        items = [item for item in re.split(r"[,\s]+", inside) if item]
    value = read_words(items, kind)
    if value is None:
        found = f"is {text!r}" if items else "has no value"
        raise ConfigError(f"{flag_text(flag)} {found}; it must be {annotation_text(kind)}")
    return value, words[count:]


def check_flag_names(argv: Sequence[str], types: Mapping[str, Any], prog: str) -> None:
    """Raise ConfigError for the flags among the words that a verb with these flags does not have, with the nearest."""
    unknown = dict.fromkeys(
        flag
        for flag, _, _ in split_flags(argv)
        if flag and flag not in types and OTHER_SPELLING.get(flag) not in types
    )
    texts = [f"{flag_text(flag)}: {_flag_hint(flag, types, prog)}" for flag in unknown]
    if texts:
        raise ConfigError(f"{prog} has no flag {'; no flag '.join(texts)}")


def _flag_hint(flag: str, types: Mapping[str, Any], prog: str) -> str:
    def flags_of_keys(keys: Iterable[str]) -> list[str]:
        # A flag of this verb is the key itself, or its flag of plans.
        return [flag_text(name) for key in keys for name in (key, _PLAN_FLAG_OF_KEY.get(key, key)) if name in types]

    if other := key_of_other_name(flag[2:]):
        if not other.key:
            return other.remark
        if flags := flags_of_keys([f"--{other.key}"]):
            return f"here it is {flags[0]} {other.remark}".rstrip()
    # --steps and --data.steps are --train.steps.
    last_part = f".{flag[2:].rpartition('.')[2]}"
    if flags := flags_of_keys(key for key in (*types, *_PLAN_FLAG_OF_KEY) if key.endswith(last_part)):
        return f"did you mean {flags[0]!r}?"
    names = [*map(flag_text, types)]
    if len(names) > _FEW and nearest_name(flag_text(flag), names, prefix="--") is None:
        return f"{prog} --help-all lists those that it has"
    return nearest_hint(flag_text(flag), names, prefix="--")
