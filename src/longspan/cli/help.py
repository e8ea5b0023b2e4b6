"""What `longspan VERB --help` and `--help-all` show: the flags of a verb, with the texts under its fields.

Keys of the configuration are written as in files, --train.tokens_per_step; a verb's other flags have dashes, --dry-run.
"""

import inspect
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

from longspan.config.keys import NOT_GIVEN, class_texts, key_value, section_texts

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


def find_words(kind: Any) -> dict[str, Word]:
    """Find the fields of a class of flags that are words without a flag."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: mark for name in marks for mark in marks[name] if isinstance(mark, Word)}


def shown_flag(flag: str) -> str:
    """Write a flag as messages and help do.

    >>> shown_flag("--dry_run"), shown_flag("--train.save_every")
    ('--dry-run', '--train.save_every')
    """
    return flag if "." in flag else flag.replace("_", "-")


def help_text(kind: Any, types: Mapping[str, Any], prog: str, *, whole: bool) -> str:
    """Write the help of a verb: its text, its examples, and the flags of its `SHOWN`, or (`whole`) all `types`."""
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    words, texts = find_words(kind), _flag_texts(kind)
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    examples = [f"  {text}" for text in paragraphs if text.startswith("longspan ")]
    lines = [" ".join(["usage:", prog, *(word.metavar for word in words.values()), "[flags]"])]
    for paragraph in paragraphs:
        if not paragraph.startswith("longspan "):
            lines += ["", *wrap(" ".join(paragraph.split()), width)]
    lines += ["", "examples:", *examples] if examples else []
    lines += [""] if words else []
    for name, word in words.items():
        lines += _entry(word.metavar, texts[name], width)
    shown: Groups = getattr(kind, "SHOWN", {})
    groups = {title: list(flags) for title, flags in shown.items()}
    if whole or not shown:
        for flag in (flag for flag in types if not any(flag in flags for flags in shown.values())):
            title = f"[{flag[2:].partition('.')[0]}]" if "." in flag else "further flags" if shown else "flags"
            groups.setdefault(title, []).append(flag)
    for title, flags in groups.items():
        lines += ["", f"{title}:"]
        for flag in flags:
            name = "--data" if flag == "--data.path" else shown_flag(flag)  # as in verbs without that section
            text = texts[flag[2:]] + _default_text(kind, flag, texts[flag[2:]])
            lines += _entry(f"{name} {_value_text(types[flag])}", text, width)
    if shown and not whole:
        lines += ["", f"{prog} --help-all shows all {len(types)} flags."]
    return "\n".join(lines)


def _entry(name: str, text: str, width: int) -> Iterator[str]:
    first, *further = wrap(text, width - _NAMES)
    if len(name) > _NAMES - 4:
        yield f"  {name}"
        name = ""
    yield f"  {name:<{_NAMES - 2}}{first}"
    yield from (f"{'':<{_NAMES}}{line}" for line in further)


def _flag_texts(kind: Any) -> dict[str, str]:
    texts = {name: text for base in reversed(kind.__mro__[:-1]) for name, text in class_texts(base).items()}
    sections = {name: hint for name, hint in get_type_hints(kind).items() if is_dataclass(hint)}
    keys = {f"{name}.{key}": text for name, hint in sections.items() for key, text in section_texts(hint).items()}
    return texts | keys


def _value_text(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind) if choice)
    if get_origin(kind) is tuple:
        item, *further = get_args(kind)
        return f"{_VALUES[item]} …" if further == [...] else " ".join(_VALUES[item] for item in get_args(kind))
    if kind in _VALUES:
        return _VALUES[kind]
    return "|".join(map(_value_text, get_args(kind)))  # of several types


def _default_text(kind: Any, flag: str, text: str) -> str:
    name, _, key = flag[2:].partition(".")
    (field,) = (field for field in fields(kind) if field.name == name)
    value = field.default if field.default_factory is MISSING else field.default_factory()
    value = key_value(value, key) if key else value
    of_run = bool(key) and "config" not in find_words(kind)  # without a file, keys have the values of a run
    if of_run or "Default" in text or value is False or value in ("", (), NOT_GIVEN):
        return ""
    shown = value if isinstance(value, tuple) else (f"{value:g}" if isinstance(value, float) else str(value).lower(),)
    return f" (default: {' '.join(map(str, shown))})"
