"""The folder that a model is exported to: whether it may be written to, and how its files get there all at once."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longspan.errors import ModelError
from longspan.model.lora.save import CONFIGURATION
from longspan.model.save import put_in_place
from longspan.train.data.tokenizer_files import KeptFiles

_REPLACED = (  # of a model or an adapter that another takes the place of
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*",
    "config.json",
    "generation_config.json",
    "adapter_model*",
    CONFIGURATION,
)


@contextmanager
def made_beside(folder: Path) -> Iterator[Path]:
    """A new folder, which takes the place of `folder` once it is whole; after an error nothing is left of it."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Raise ModelError for a folder that cannot be written to: no folder, or one that holds something."""
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file; name a folder to write the model to")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise ModelError(f"{folder} is not empty; name another folder, or replace the model in it with --overwrite")
    if not any((folder / name).is_file() for name in ("config.json", CONFIGURATION)):
        raise ModelError(f"{folder} is not empty and holds no model (no config.json), so nothing in it is replaced")


def _publish(partial: Path, folder: Path) -> None:
    """Give a finished folder its name; into one that holds a model, its files are put in place of that model's."""
    if not folder.is_dir() or not any(folder.iterdir()):
        put_in_place(partial, folder)
        return
    for pattern in _REPLACED:
        for old in folder.glob(pattern):
            old.unlink()
    KeptFiles(partial).save_pretrained(folder)
    for file in partial.iterdir():
        if file.is_file():
            file.replace(folder / file.name)
