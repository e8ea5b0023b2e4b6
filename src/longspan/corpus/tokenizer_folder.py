"""Which folder has the tokenizer of a run. No torch."""

from pathlib import Path

from longspan.config.sections import RunConfig
from longspan.model.weights.file_names import VOCABULARIES


def vocabulary_files(folder: Path) -> list[str]:
    """List the vocabulary files of a folder, of any kind of tokenizer; empty if it has no tokenizer."""
    return [name for name in VOCABULARIES if (folder / name).is_file()]


def tokenizer_folder(config: RunConfig) -> Path | None:
    """Return the folder of the tokenizer that data.tokenizer names, or the model's (that of its config.json).

    None if neither has one, and for a preset.
    """
    if config.data.tokenizer:
        return Path(config.data.tokenizer).expanduser()
    source = Path(config.model.source).expanduser()
    folder = source.parent if source.is_file() else source
    return folder if config.model.source and vocabulary_files(folder) else None
