"""Text to token ids: a tokenizer folder's own, or a byte-level byte-pair tokenizer trained on the corpus.

Only the rank that builds the corpus calls this. Every document ends with the end-of-text token, where there is one.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from longspan.errors import DataError

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the token that ends a document (None where it has none)."""

    engine: Tokenizer
    end: int | None

    @cached_property
    def size(self) -> int:
        """Smallest embedding that holds every id: the largest id plus one."""
        return max(self.engine.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its JSON: two tokenizers with equal digests give equal ids."""
        return hashlib.sha256(self.engine.to_str().encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, the end of text included; special tokens in the text are read as plain text."""
        closing = [] if self.end is None else [self.end]
        encodings = self.engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids + closing, dtype=np.int64) for encoding in encodings]

    def save_pretrained(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads too."""
        self.engine.save(str(folder / "tokenizer.json"))
        settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.end is not None:
            settings["eos_token"] = self.engine.id_to_token(self.end)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level byte-pair tokenizer of at most `vocab_size` entries; equal texts give an equal tokenizer."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return _ready(engine, END_OF_TEXT)


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """Load the tokenizer.json of a folder, and the end-of-text token that its tokenizer_config.json names.

    Raises DataError where the folder or the file is missing or unreadable.
    """
    file = Path(folder).expanduser() / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"no tokenizer.json in {str(folder)!r}; give a folder with one, or leave data.tokenizer empty")
    try:
        engine = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises plain Exception
        raise DataError(f"{file} is not a tokenizer: {error}") from error
    return _ready(engine, _end_named(file.with_name("tokenizer_config.json")))


def check_vocabulary(tokenizer_size: int, embedding_rows: int, *, tokenizer: str, model: str) -> None:
    """Raise DataError where a tokenizer has ids that the model's embedding has no row for."""
    if tokenizer_size > embedding_rows:
        raise DataError(
            f"the vocabulary does not match: tokenizer {tokenizer} has ids up to {tokenizer_size - 1}, "
            f"the embedding of {model} has {embedding_rows} rows; use the model's own tokenizer, "
            f"or one of at most {embedding_rows} entries"
        )


def _ready(engine: Tokenizer, end: str | None) -> TextTokenizer:
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True
    return TextTokenizer(engine, None if end is None else engine.token_to_id(end))


def _end_named(settings: Path) -> str | None:
    if not settings.is_file():
        return END_OF_TEXT
    try:
        named = json.loads(settings.read_text(encoding="utf-8")).get("eos_token")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise DataError(f"{settings} is not a JSON object: {error}") from error
    return named.get("content") if isinstance(named, dict) else named
