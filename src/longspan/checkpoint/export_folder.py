"""The folder that a model is exported to: whether it may be written to, and how its files get there all at once."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longspan.corpus.images.without_torchvision import FILES
from longspan.errors import ModelError
from longspan.model.lora.save import CONFIGURATION
from longspan.model.weights.write import OF_MODEL, partial_folder, put_in_place

_REPLACED = "|".join([OF_MODEL, r"pytorch_model.*\.(bin|json)", r"generation_config\.json", *map(re.escape, FILES)])


@contextmanager
def made_beside(folder: Path) -> Iterator[Path]:
    """A new folder, whose files get their places in `folder` once it is whole; after an error nothing is left of it."""
    partial = partial_folder(folder)
    try:
        yield partial
        put_in_place(partial, folder, _REPLACED)
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
