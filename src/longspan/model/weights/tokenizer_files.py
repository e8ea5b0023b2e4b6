"""The files of tokenizer, processor and generation settings in a Hugging Face folder: their names, and copies of them.

No torch.
"""

import shutil
from pathlib import Path
from typing import Any

from longspan.errors import DataError
from longspan.files import read_json
from longspan.plain_text import short_text

FAST_TOKENIZER = "tokenizer.json"
# These files belong to tokenizers of any kind.
VOCABULARIES = (
    FAST_TOKENIZER,
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tiktoken.model",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *TEMPLATE_FILES,
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
GENERATION = "generation_config.json"


def has_image_processor(folder: Path | None) -> bool:
    """Return whether a folder has an image processor."""
    return folder is not None and any((folder / name).is_file() for name in PROCESSOR_FILES[:2])


def vocabulary_files(folder: Path) -> list[str]:
    """List the vocabulary files of a folder, of any kind of tokenizer, by name in the order of VOCABULARIES; empty
    if it has no tokenizer.
    """
    return [name for name in VOCABULARIES if (folder / name).is_file()]


def tokenizer_folder(tokenizer: str, model: str) -> Path | None:
    """Return the folder of a run's tokenizer: the one named, else that of the model ("": a preset), if it has one."""
    if tokenizer:
        return Path(tokenizer).expanduser()
    source = Path(model).expanduser()
    folder = source.parent if source.is_file() else source
    return folder if model and vocabulary_files(folder) else None


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy the files of tokenizer, chat templates and image processor; from the target, remove those that the source
    lacks.
    """
    for name in (*TOKENIZER_FILES, *PROCESSOR_FILES):
        replace_with_copy(source / name, target / name)


class RunFolderFiles:
    """The files of a run's folder that its models' folders get: tokenizer, image processor, generation settings."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        """Raise DataError for one of these files that is damaged: JSON that is no object, a template that is none."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        for name in (*TOKENIZER_FILES, *PROCESSOR_FILES, GENERATION):
            if name.endswith(".json") and (self._folder / name).is_file():
                read_json_object(self._folder / name)
        templates = [self._folder / TEMPLATE_FILES[0], *sorted((self._folder / TEMPLATE_FILES[2]).glob("*.jinja"))]
        for file in filter(Path.is_file, templates):
            try:
                render_jinja_template([], chat_template=file.read_text(encoding="utf-8"))
            except (ValueError, TemplateError) as error:
                raise DataError(f"{file} is no chat template: {error}; restore it") from error

    def save_pretrained(self, folder: str | Path) -> None:
        """Copy these files into a model's folder, which is made if it is not there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        copy_tokenizer_files(self._folder, folder)
        if (self._folder / GENERATION).is_file():
            replace_with_copy(self._folder / GENERATION, folder / GENERATION)


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises DataError for a damaged one."""
    try:
        value = read_json(file)
        if not isinstance(value, dict):
            raise ValueError("it holds something else")
    except ValueError as error:
        raise DataError(f"{file} is not a JSON object: {error}") from error
    return value


def read_stop_token_ids(folder: Path) -> set[int]:
    """Read the ids at which a folder's model stops generating; an empty set without generation settings.

    Raises DataError for a damaged file, and for ids that are none.
    """
    file = folder / GENERATION
    if not file.is_file():
        return set()
    value = read_json_object(file).get("eos_token_id")
    ids = [i for i in (value if isinstance(value, list) else [value]) if i is not None]
    # Tokenizers count ids in 32 bits.
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < 1 << 32]:
        raise DataError(
            f"{file} has eos_token_id {short_text(wrong[0])}; give the id of a token, or a list of them"
        )
    return {*ids}


def replace_with_copy(source: Path, target: Path) -> None:
    """Put a copy of a file or folder in place of the target; remove the target if there is no source."""
    if source.exists() and target.exists() and source.samefile(target):
        # To remove the target would remove the source.
        return
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copyfile(source, target)
