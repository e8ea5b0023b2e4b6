"""Paths and names of the hub in a configuration, put in place as absolute paths of this machine."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from longspan.config.keys import AUTO
from longspan.config.sections import RANDOM, RunConfig
from longspan.hub import find_local_path

# data.path may be this word.
STDLIB = "stdlib"


def with_local_folders(config: RunConfig, *, weights: bool = True) -> RunConfig:
    """Return the configuration with absolute paths in place of those that exist, and the folder of the local cache in
    place of a name of the hub.

    Without `weights` a model's folder need only have its config.json, and paths stay as they are given. What is missing
    is downloaded where model.download says so. Raises ConfigError for a name that is nowhere.
    """
    model = config.model
    data = config.data
    find_any = partial(find_local_path, download=model.download, download_key="model.download")

    def find(path: str, key: str, **options: Any) -> str:
        local = find_any(path, key, **options)
        return absolute_path(local) if weights else local

    find_data = partial(find, kind="dataset")
    sources = [
        replace(source, path=find_data(source.path, f"data.sources[{number}].path"))
        for number, source in enumerate(data.sources)
    ]
    path = find(model.path, "model.path", weights=weights)
    teacher = find(config.teacher.path, "teacher.path", weights=weights)
    source = find(model.config, "model.config")
    tokenizer = find(data.tokenizer, "data.tokenizer")
    rows = find_data(data.path, "data.path")
    prompts = absolute_path(config.evaluation.prompts) if weights else config.evaluation.prompts
    template = absolute_path(data.chat_template) if weights else data.chat_template
    return replace(
        config,
        train=replace(config.train, epochs_of=find_data(config.train.epochs_of, "train.epochs_of")),
        model=replace(model, path=path, config=source),
        teacher=replace(config.teacher, path=teacher),
        evaluation=replace(config.evaluation, prompts=prompts),
        mtp=replace(config.mtp, weights=find(config.mtp.weights, "mtp.weights")),
        data=replace(data, path=rows, sources=tuple(sources), tokenizer=tokenizer, chat_template=template),
    ).with_sets(
        replace(entry, path=find_data(entry.path, f"{entry.prefix}path")) for entry in config.evaluation.sets
    )


def absolute_path(value: Any) -> Any:
    """Return a path that exists here as an absolute one, and any other value of a key as it is."""
    if not isinstance(value, str) or value in ("", STDLIB, AUTO, RANDOM):
        return value
    path = Path(value).expanduser()
    return str(path.absolute()) if path.exists() else value
