"""What the files of a tokenizer and a processor are called in a Hugging Face folder, and which folder has them.

No torch.
"""

from pathlib import Path

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
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *TEMPLATE_FILES,
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def has_processor(folder: Path | None) -> bool:
    """Whether a folder has an image processor."""
    return folder is not None and any((folder / name).is_file() for name in PROCESSOR_FILES[:2])


def vocabulary_files(folder: Path) -> list[str]:
    """List the vocabulary files of a folder, of any kind of tokenizer; empty if it has no tokenizer."""
    return [name for name in VOCABULARIES if (folder / name).is_file()]


def tokenizer_folder(tokenizer: str, model: str) -> Path | None:
    """Return the folder of a run's tokenizer: the one named, else that of the model ("": a preset), if it has one."""
    if tokenizer:
        return Path(tokenizer).expanduser()
    source = Path(model).expanduser()
    folder = source.parent if source.is_file() else source
    return folder if model and vocabulary_files(folder) else None
