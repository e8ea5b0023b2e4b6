"""Whether the tables [[eval]] name distinct sets of documents, and functions as metrics."""

import re
from collections.abc import Iterable

from longspan.config.eval_set import EvalConfig
from longspan.config.passkey_settings import PASSKEY
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, DataError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_eval_sets(config: RunConfig) -> None:
    """Raise ConfigError for a set without a name or path, for two of one name, and for names that are no functions."""
    for number, entry in enumerate(config.eval, 1):
        if not _NAME.fullmatch(entry.name):
            raise ConfigError(
                f"the {_ordinal(number)} table [[eval]] has name = {entry.name!r}; give one of letters, digits, -, _ "
                "and dots that begins with a letter or digit: it names lines of metrics.jsonl and a folder"
            )
        if not entry.path:
            raise ConfigError(f"{entry.prefix}path is empty; name a folder or file of texts")
        _check_passkey(entry)
        _check_metrics(f"{entry.prefix}metrics", entry.metrics)
    names = [entry.name for entry in config.eval]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{names.count(name)} of {len(names)} tables [[eval]] have name = {name!r}; give each a name of its own"
            )
    _check_metrics("train.eval_metrics", config.train.eval_metrics)


def _check_passkey(entry: EvalConfig) -> None:
    if entry.path != PASSKEY:
        if entry.passkey_lengths:
            raise ConfigError(
                f"{entry.prefix}passkey_lengths is {list(entry.passkey_lengths)} and {entry.prefix}path is "
                f'{entry.path!r}; passkey retrieval has path = "{PASSKEY}", and texts have no passkey_lengths'
            )
        return
    try:
        entry.passkey(0).check()
    except DataError as error:
        raise ConfigError(f"{entry.prefix}passkey_lengths, passkey_depths, passkey_samples: {error}") from error


def _check_metrics(key: str, names: Iterable[str]) -> None:
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or "." not in name:
            raise ConfigError(
                f"{key} has {name!r}; give a function with its module, as in 'my_package.my_metrics.top_five'"
            )


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
