"""The files of a Hugging Face folder that a run keeps: tokenizer, image processor, and how the model generates."""

import json
import shutil
from pathlib import Path

from longspan.corpus.images.without_torchvision import FILES
from longspan.errors import DataError, shortened
from longspan.model.hf_folder import TOKENIZER_FILES, VOCABULARIES

GENERATION = "generation_config.json"


def vocabulary_files(folder: Path) -> list[str]:
    """The files of a folder that hold a tokenizer's vocabulary, of whatever kind; empty where it has no tokenizer."""
    return [name for name in VOCABULARIES if (folder / name).is_file()]


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy the tokenizer's files byte for byte, chat templates too, in place of those of another one in `target`."""
    for name in (*TOKENIZER_FILES, *FILES):
        _replace(source / name, target / name)


class KeptFiles:
    """The files that a run's folder keeps for the folders of its models: its tokenizer, and how the model generates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save_pretrained(self, folder: Path) -> None:
        """Copy them into a model's folder."""
        copy_tokenizer_files(self._folder, folder)
        if (self._folder / GENERATION).is_file():
            _replace(self._folder / GENERATION, folder / GENERATION)


def keep_generation(source: Path | None, folder: Path) -> None:
    """Copy how the model of a source folder generates into a run's folder, where that is written down."""
    if source is None or not (source / GENERATION).is_file():
        (folder / GENERATION).unlink(missing_ok=True)
    else:
        _replace(source / GENERATION, folder / GENERATION)


def ends_of_generation(folder: Path) -> set[int]:
    """The ids at which a folder's model stops generating, none where that is not written down.

    Raises DataError for what is no id.
    """
    file = folder / GENERATION
    if not file.is_file():
        return set()
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{file} is no JSON object: {error}") from error
    ids = [i for i in (named if isinstance(named, list) else [named]) if i is not None]
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < 1 << 32]:
        raise DataError(f"{file} has eos_token_id {shortened(wrong[0])}; give the id of a token, or a list of them")
    return {*ids}


def _replace(source: Path, target: Path) -> None:
    if source.exists() and target.exists() and source.samefile(target):
        return
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copyfile(source, target)
