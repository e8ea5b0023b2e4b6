"""The files of a Hugging Face folder that a run copies: tokenizer, image processor, and generation settings."""

import shutil
from pathlib import Path

from longspan.corpus.images.without_torchvision import FILES
from longspan.errors import DataError, short_text
from longspan.files import read_json
from longspan.model.weights.file_names import TOKENIZER_FILES

GENERATION = "generation_config.json"


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy the files of the tokenizer, with chat templates, and of the image processor, byte for byte.

    Files of the same names in `target` are replaced, or removed where the source has none.
    """
    for name in (*TOKENIZER_FILES, *FILES):
        _replace_with_copy(source / name, target / name)


class RunFolderFiles:
    """The files of a run's folder that its models' folders get: tokenizer, image processor, generation settings."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save_pretrained(self, folder: str | Path) -> None:
        """Copy these files into a model's folder, which is made if it is not there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        copy_tokenizer_files(self._folder, folder)
        if (self._folder / GENERATION).is_file():
            _replace_with_copy(self._folder / GENERATION, folder / GENERATION)


def copy_generation_settings(source: Path | None, folder: Path) -> None:
    """Copy the generation settings of a source folder into a run's folder; if there are none, remove the run's."""
    if source is None or not (source / GENERATION).is_file():
        (folder / GENERATION).unlink(missing_ok=True)
    else:
        _replace_with_copy(source / GENERATION, folder / GENERATION)


def ends_of_generation(folder: Path) -> set[int]:
    """Read the ids at which a folder's model stops generating; an empty set without generation settings.

    Raises DataError for values that are no ids.
    """
    file = folder / GENERATION
    if not file.is_file():
        return set()
    try:
        value = read_json(file).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{file} is no JSON object: {error}") from error
    ids = [i for i in (value if isinstance(value, list) else [value]) if i is not None]
    # Tokenizers count ids in 32 bits.
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < 1 << 32]:
        raise DataError(f"{file} has eos_token_id {short_text(wrong[0])}; give the id of a token, or a list of them")
    return {*ids}


def _replace_with_copy(source: Path, target: Path) -> None:
    """Put a copy of a file or folder in place of the target; remove the target if there is no source."""
    if source.exists() and target.exists() and source.samefile(target):
        return  # to remove the target would remove the source
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copyfile(source, target)
