"""Hugging Face folders on disk: the configuration that one holds, its files of weights, and what its files are called.

Nothing is downloaded.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

from longspan.errors import ModelError
from longspan.model.presets import PRESETS

FAST_TOKENIZER = "tokenizer.json"
VOCABULARIES = (  # of tokenizers of any kind
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
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_configuration(path: Path) -> PreTrainedConfig:
    """The configuration in a folder, or in a config.json itself.

    Raises ModelError for a path that is missing and for what transformers cannot read.
    """
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ModelError(f"there is no model folder {path}; {_folder_or_preset()}")
    if not file.is_file():
        raise ModelError(f"{path} has no config.json; {instead_of(path) or _folder_or_preset()}")
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except Exception as error:  # json, huggingface_hub and transformers each raise their own
        raise ModelError(f"the model in {path} cannot be loaded: {type(error).__name__}: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """A folder's files of weights. Raises ModelError where there are none, or where some of its index are missing."""
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}; {_folder_or_preset()}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; {instead_of(folder) or _folder_or_preset()}")
    weights = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise ModelError(
            f"{folder} has no weights; expected one of {', '.join(_WEIGHTS)} (model.config = FOLDER draws random ones)"
        )
    return _indexed(folder, folder / weights) if weights.endswith(".index.json") else [folder / weights]


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged: {type(error).__name__}: {error}") from error
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing[:4])}")
    return [folder / name for name in files]


def instead_of(folder: Path) -> str:
    """What to give instead of a folder that holds an adapter of peft; nothing for another folder."""
    if not (folder / "adapter_config.json").is_file():
        return ""
    run = folder.resolve().parent
    name = str(run) if (run / "config.toml").is_file() else "RUN"
    return (
        f"it holds an adapter of peft, without the model that it belongs to. Name the run that trained it ({name}), or "
        f"give a folder with both in one: longspan export {name} FOLDER --merge"
    )


def _folder_or_preset() -> str:
    return f"give a folder in Hugging Face format, or use a preset: {', '.join(PRESETS)}"


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside, transformers shows no progress of files."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
