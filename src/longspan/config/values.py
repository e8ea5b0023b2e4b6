"""Values of keys by their types: read from TOML and from the words of a flag, and the types in words.

Bounds are checked where a section is made (`keys.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from longspan.errors import ConfigError
from longspan.plain_text import nearest_hint


def convert_value(key: str, value: object, kind: Any, source: str) -> object:
    """Return a value of TOML as the type of its key. Raises ConfigError, with the key and its `source`, if it does not
    fit.
    """
    value = choice_of_bool(value, kind)
    if value in ([], ()) and get_origin(kind) is tuple:
        return ()  # not by `_value_if_it_fits`: where a list is one of several types, an empty list fits none
    for option in get_args(kind) if isinstance(kind, UnionType) else (kind,):
        fitting = _value_if_it_fits(value, option)
        if fitting is not None:
            return fitting
    is_choice = get_origin(kind) is Literal and isinstance(value, str)
    hint = f" ({nearest_hint(str(value), get_args(kind))})" if is_choice else ""
    raise ConfigError(f"{key} is {value!r} in {source}; it must be {annotation_text(kind)}{hint}")


def choice_of_bool(value: object, kind: Any) -> object:
    """Return the choice that true ("full" or "layers") or false ("none") stands for in a type of choices, whichever of
    them it has; other values, and values of other types, are unchanged.
    """
    if (
        get_origin(kind) is not Literal
        or not isinstance(value, bool | str)
        or str(value).lower() not in ("true", "false")
    ):
        return value
    words = ("full", "layers") if str(value).lower() == "true" else ("none",)
    return next((word for word in words if word in get_args(kind)), value)


def read_words(words: Sequence[str], kind: Any) -> object | None:
    """Return the words of a flag as a value of this type, or of the first that fits of several; None if none fits."""
    for option in get_args(kind) if isinstance(kind, UnionType) else (kind,):
        if get_origin(option) is tuple:
            value = _value_if_it_fits([read_words([word], get_args(option)[0]) for word in words], option)
        else:
            candidates = _word_values(words[0], option) if len(words) == 1 else ()
            fitting = (_value_if_it_fits(candidate, option) for candidate in candidates)
            value = next((candidate for candidate in fitting if candidate is not None), None)
        if value is not None:
            return value
    return None


def _word_values(word: str, kind: Any) -> Iterator[object]:
    """A word "true" or "false" is a bool; None for another word."""
    for read in (int, float):
        with suppress(ValueError):
            yield read(word)
    yield {"true": True, "false": False}.get(word.lower())
    yield choice_of_bool(word, kind)


def _value_if_it_fits(value: object, option: Any) -> object | None:
    """An int becomes a float; None for a value of another type."""
    if get_origin(option) is Literal:
        return value if value in get_args(option) else None
    if get_origin(option) is tuple:
        items = value if isinstance(value, list | tuple) else ()
        inner = [_value_if_it_fits(item, get_args(option)[0]) for item in items]
        return tuple(inner) if inner and None not in inner else None
    # To Python a bool is an int, too.
    if isinstance(value, bool) is not (option is bool):
        return None
    if option is float and isinstance(value, int):
        return float(value)
    return value if isinstance(value, option) else None


def annotation_text(kind: Any) -> str:
    """Write the type of a key in words."""
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    if isinstance(kind, UnionType):
        return " or ".join(annotation_text(option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        names = {int: "integers", str: "strings", float: "numbers"}
        return f"a list of {names[item] if item in names else ', '.join(map(repr, get_args(item)))}"
    return words[kind]
