"""Patterns of the names of parameters, by which a run freezes some, or gives them a learning rate of their own."""

import re
from collections.abc import Iterable
from functools import cache

_RANGE = re.compile(r"(\d{1,4})-(\d{1,4})")


@cache
def compile_name_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern whose `fullmatch` meets names, or names of modules around them, from any dot on.

    >>> bool(compile_name_pattern("layers.0-7.*").fullmatch("model.layers.3.mlp.up_proj.weight"))
    True

    `*` stands for anything, dots too; `0-7` between dots for one of these numbers.
    """
    words = list[str]()
    for word in pattern.split("."):
        if numbers := _RANGE.fullmatch(word):
            first, last = map(int, numbers.groups())
            words.append(f"(?:{'|'.join(map(str, range(first, last + 1)))})")
        else:
            words.append(".*".join(map(re.escape, word.split("*"))))
    return re.compile(rf"(?:.*\.)?{'[.]'.join(words)}(?:\..*)?")


def meets_any(patterns: Iterable[str], name: str) -> bool:
    """Return whether one of these patterns (`compile_name_pattern`) meets a name."""
    return any(compile_name_pattern(pattern).fullmatch(name) for pattern in patterns)
