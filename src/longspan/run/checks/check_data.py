"""Whether [data] and the tables [[eval]] name documents, and packs that a step can hold; paths exist, nothing is read.

Ranks find out themselves what files contain.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path

from longspan.config.sections import RunConfig
from longspan.corpus.files import STDLIB, find_files
from longspan.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_data(config: RunConfig) -> None:
    """Raise ConfigError for sources together with a path or epochs, one without a path, and a weight not above 0."""
    data = config.data
    if data.sources and data.path:
        raise ConfigError(
            f"data.path is {data.path!r} and there are {len(data.sources)} tables [[data.sources]]; give one of them: "
            "the path may be a source too"
        )
    if data.sources and config.train.epochs:
        raise ConfigError(
            f"train.epochs is {config.train.epochs:g} and there are {len(data.sources)} tables [[data.sources]], whose "
            "weights say how often each is read; give train.steps (the run then says how often it reads each source), "
            "or one folder with all files as data.path"
        )
    for number, source in enumerate(data.sources):
        if not source.path:
            raise ConfigError(f"data.sources[{number}].path is empty; name a folder or file of rows")
        if not 0 < source.weight < math.inf:
            raise ConfigError(
                f"data.sources[{number}].weight is {source.weight}; it must be above 0: leave a source out to train on "
                "none of it"
            )


def check_files(config: RunConfig) -> None:
    """Raise ConfigError for a model or a tokenizer that does not exist, DataError for texts that `find_files` refuses.

    Without sources or a path, texts are those of Python's standard library.
    """
    model, data = config.model, config.data
    for key, path in (("model.path", model.path), ("model.config", model.config), ("data.tokenizer", data.tokenizer)):
        if path and not Path(path).expanduser().exists():
            raise ConfigError(f"{key} {path!r} does not exist; give a folder or file of this machine")
    run_dir = (Path(config.run.dir),)
    if not (run_dir[0] / "corpus").exists():  # a run that has its documents reads no texts
        if data.sources:
            for number, source in enumerate(data.sources):
                find_files(source.path, leave_out=run_dir, key=f"data.sources[{number}].path")
        else:
            find_files(data.path or STDLIB, leave_out=run_dir)
    for entry in config.eval:
        find_files(entry.path, leave_out=run_dir, key=f"{entry.prefix}path")


def check_packs(config: RunConfig) -> None:
    """Raise ConfigError for packs that no step or text can fill, and for keys of packing without it."""
    data, tokens = config.data, config.train.tokens_per_step
    if not data.pack_to:
        if data.pack_attention != "document":
            raise ConfigError(
                f'data.pack_attention is "{data.pack_attention}" and data.pack_to is 0, which packs nothing; set '
                "data.pack_to to the tokens of a pack, or leave data.pack_attention out"
            )
        return
    if data.pack_to == 1:
        raise ConfigError("data.pack_to is 1; a pack of one token predicts nothing: use 2 or more")
    if data.pack_to > tokens:
        raise ConfigError(
            f"data.pack_to is {data.pack_to} and a step takes {tokens} tokens (train.tokens_per_step): no pack fits; "
            f"raise train.tokens_per_step to {data.pack_to} or a multiple of it"
        )
    if 0 < data.max_document_tokens < data.pack_to:
        raise ConfigError(
            f"data.max_document_tokens {data.max_document_tokens} would cut texts into documents that are shuffled "
            f"apart before they are packed to {data.pack_to} tokens (data.pack_to); set it to 0: packs cut what is "
            "longer"
        )


def check_eval_sets(config: RunConfig) -> None:
    """Raise ConfigError for sets without a name or path, or of one name, and for metrics without a module."""
    for number, entry in enumerate(config.eval, 1):
        if not _NAME.fullmatch(entry.name):
            raise ConfigError(
                f"the {_ordinal(number)} table [[eval]] has name = {entry.name!r}; give one of letters, digits, -, _ "
                "and dots that begins with a letter or digit: it names lines of metrics.jsonl and a folder"
            )
        if not entry.path:
            raise ConfigError(f"{entry.prefix}path is empty; name a folder or file of texts")
        _check_metric_names(f"{entry.prefix}metrics", entry.metrics)
    names = [entry.name for entry in config.eval]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{names.count(name)} of {len(names)} tables [[eval]] have name = {name!r}; give each a name of its own"
            )
    _check_metric_names("train.eval_metrics", config.train.eval_metrics)


def _check_metric_names(key: str, names: Iterable[str]) -> None:
    """Raise ConfigError for a metric that is not named as a function with its module."""
    for name in names:
        if not all(word.isidentifier() for word in name.split(".")) or "." not in name:
            raise ConfigError(
                f"{key} has {name!r}; give a function with its module, as in 'my_package.my_metrics.top_five'"
            )


def _ordinal(number: int) -> str:
    """Write which table of several is meant."""
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
