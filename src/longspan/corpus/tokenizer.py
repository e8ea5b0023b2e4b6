"""Text to token ids, by a folder's tokenizer or a byte-level byte-pair tokenizer that is trained on the corpus.

The ids are those of transformers' tokenizer, and the end-of-text token, if there is one. The names of special tokens
in a text are plain text unless they are to be parsed. Long texts are encoded in `long_texts.py`.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from longspan.corpus.long_texts import PIECE, can_encode_in_pieces, encode_with_spans
from longspan.errors import DataError
from longspan.files import write_atomically
from longspan.layout import Integers
from longspan.model.weights.tokenizer_files import (
    FAST_TOKENIZER,
    TEMPLATE_FILES,
    copy_tokenizer_files,
    read_json_object,
    replace_with_copy,
    vocabulary_files,
)

_TAIL = 8  # ids at the end of a text among which its own end is looked for
END_OF_TEXT = "<|endoftext|>"
_OWN_CODE_ADVICE = (
    "where its tokenizer.json alone makes the tokenizer, take auto_map and tokenizer_class out of "
    "tokenizer_config.json, or name the folder of a tokenizer in transformers' own format"
)


def any_name_pattern(names: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for any of these names, the longest first; without names it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer, the token that ends a text, and the one that pads (None: it has none).

    Two tokenizers with equal `digest` (SHA-256 of the engine without its post-processor) and `surrounding_tokens` give
    equal ids. It was read from `folder` (None: it was trained here) by the class `kind` of transformers. Chats are
    written by the template in `template_file` (None: by the folder's).
    """

    engine: Tokenizer
    end: int | None
    digest: str
    folder: Path | None = None
    kind: str = "Tokenizer"
    template_file: Path | None = None
    pad: int | None = None

    @cached_property
    def size(self) -> int:
        """Rows of the smallest embedding with every id: the largest id plus one."""
        return max(self.engine.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def own_size(self) -> int:
        """The `size` without added tokens, which a model's own tokenizer may have beyond the model's embedding."""
        return max(self.engine.get_vocab(with_added_tokens=False).values(), default=-1) + 1

    @cached_property
    def surrounding_ids(self) -> tuple[list[int], list[int]]:
        """The ids before and after a text: those of the tokenizer's post-processor, read off a text "a", and `end`."""
        text_ids, ids_with_special = (
            self.engine.encode("a", add_special_tokens=special).ids for special in (False, True)
        )
        start = next(i for i in range(len(ids_with_special)) if ids_with_special[i : i + len(text_ids)] == text_ids)
        closing = ids_with_special[start + len(text_ids) :]
        if self.end is not None and self.end not in closing:
            closing.append(self.end)
        return ids_with_special[:start], closing

    @property
    def surrounding_tokens(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tokens that every text begins with, and those that it ends with."""
        opening, closing = (tuple(map(str, map(self.engine.id_to_token, ids))) for ids in self.surrounding_ids)
        return opening, closing

    def encode(self, texts: Sequence[str]) -> list[Integers]:
        """Encode short texts together, each with the tokens around it."""
        return [self.surround(e.ids) for e in self.engine.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_text(self, text: str) -> Integers:
        """Encode a text with the tokens around it, in pieces if it is long and that is possible, to bound memory."""
        return self.surround(self.encode_with_spans(text)[0])

    def surround(self, ids: Sequence[int] | Integers) -> Integers:
        """Put the tokenizer's ids before and after the ids of a text, without those that the text itself has there.

        Only a text whose special tokens were parsed can have them. Blanks may follow its end, as in a rendered chat.
        """
        array = np.asarray(ids, dtype=np.int64)
        opening, closing = self.surrounding_ids
        tail = array[-_TAIL:].tolist()
        if closing and closing[-1] in tail:
            ids_behind = tail[len(tail) - tail[::-1].index(closing[-1]) :]
            if not self.engine.decode(ids_behind, skip_special_tokens=False).strip():  # the text has its end
                closing = []
        if array[: len(opening)].tolist() == opening:
            opening = []
        return np.concatenate([opening, array, closing]).astype(np.int64)

    def encode_with_spans(self, text: str, borders: Sequence[int] = ()) -> tuple[Integers, Integers]:
        """Encode a text without the tokens around it: its ids (n,), and the characters (n, 2) of each token.

        No token lies across one of the `borders`, ascending, in characters, unless `joins_parts` is false.
        """
        # Not every kind of tokenizer can encode in pieces, so the whole text may be one.
        whole_length = max(len(text), 1)
        piece = PIECE if can_encode_in_pieces(self.engine) else whole_length
        edges = (0, *(borders if self.joins_parts else ()), len(text))
        parts = [encode_with_spans(self.engine, text[start:stop], piece=piece) for start, stop in pairwise(edges)]
        spans = [spans + start for (_, spans), start in zip(parts, edges, strict=False)]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate(spans)

    @cached_property
    def joins_parts(self) -> bool:
        """Whether parts that are encoded apart give the text again: sentencepiece often begins each with a space."""
        ids = self.engine.encode("a", add_special_tokens=False).ids
        return self.engine.decode([*ids, *ids], skip_special_tokens=False) == "aa"

    def set_parsing(self, parse: bool) -> "TextTokenizer":
        """Set, until the next call, whether names of special tokens in a text are read as these tokens; return self.

        It changes the engine, which all copies of this tokenizer share.
        """
        self.engine.encode_special_tokens = not parse
        return self

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The names of the special tokens."""
        return frozenset(
            token.content for token in self.engine.get_added_tokens_decoder().values() if token.special
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files for transformers' AutoTokenizer into a folder, which is made if it is not there.

        They are copies of those in the tokenizer's own folder, with the chat template of `template_file`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder is not None:
            # The template is read before files in `folder` are replaced.
            template = self.template_file and self.template_file.read_bytes()
            copy_tokenizer_files(self.folder, folder)
            if template is not None:
                for name in TEMPLATE_FILES:  # removed, as there is no such source
                    replace_with_copy(folder / "no template", folder / name)
                (folder / TEMPLATE_FILES[0]).write_bytes(template)
            return
        write_atomically(folder / "tokenizer.json", self.engine.to_str(pretty=True))
        settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.end is not None:
            settings["eos_token"] = self.engine.id_to_token(self.end)
        write_atomically(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")


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
    return _make_tokenizer(engine, engine.token_to_id(END_OF_TEXT))


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """Load the tokenizer of a folder, as transformers does by its tokenizer_config.json.

    Files of another kind than tokenizer.json (tokenizer.model, vocab.json with merges.txt) are read by transformers.
    Without a tokenizer_config.json a text ends with <|endoftext|> if tokenizer.json has it. Raises DataError if the
    folder or its files are missing or unreadable.
    """
    folder = Path(folder).expanduser()
    file = folder / FAST_TOKENIZER
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        read_json_object(settings)
    if not file.is_file():
        return _load_other_files(folder)
    try:  # first, also where transformers reads the file again: its error for a damaged one names no file
        engine = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises plain Exception
        raise DataError(f"{file} is not a tokenizer: {error}") from error
    if settings.is_file():
        return _load_by_transformers(folder)
    return replace(_make_tokenizer(engine, engine.token_to_id(END_OF_TEXT)), folder=folder)


def _load_other_files(folder: Path) -> TextTokenizer:
    files = vocabulary_files(folder)
    if not files:
        raise DataError(
            f"no tokenizer.json in {str(folder)!r}, nor a tokenizer of another kind; give a folder with one, or leave "
            "data.tokenizer empty"
        )
    hint = (
        f"it holds {', '.join(files)} and no tokenizer.json: pip install sentencepiece tiktoken protobuf may be needed "
        "to read them, or save it once where it loads with AutoTokenizer.from_pretrained(…).save_pretrained(…)"
    )
    try:
        tokenizer = _load_by_transformers(folder)
    except DataError as error:
        raise DataError(f"{error}; {hint}") from error
    if len(tokenizer.engine.get_vocab(with_added_tokens=False)) < 2:  # nothing, or one entry for unknown words
        raise DataError(f"transformers reads no vocabulary from the tokenizer in {folder}; {hint}")
    return tokenizer


def _load_by_transformers(folder: Path) -> TextTokenizer:
    from transformers import AutoTokenizer

    # torch, which processes do without
    from longspan.model.weights.hf_folder import FOLDER_OPTIONS, folder_error_text

    try:
        stock = AutoTokenizer.from_pretrained(folder, **FOLDER_OPTIONS)
        engine = stock.backend_tokenizer
        end = stock.eos_token_id
        pad = stock.pad_token_id
    except Exception as error:  # json, tokenizers, huggingface_hub and transformers each raise their own
        raise DataError(
            f"the tokenizer in {folder} cannot be loaded by transformers: {folder_error_text(error, _OWN_CODE_ADVICE)}"
        ) from error
    return replace(_make_tokenizer(engine, end), folder=folder, kind=type(stock).__name__, pad=pad)


def check_vocabulary(tokenizer_size: int, embedding_rows: int, *, tokenizer: str, model: str) -> None:
    """Raise DataError if a tokenizer has ids, added tokens aside, without a row in the model's embedding."""
    if tokenizer_size > embedding_rows:
        raise DataError(
            f"the vocabulary does not match: tokenizer {tokenizer} has ids up to {tokenizer_size - 1}, "
            f"the embedding of {model} has {embedding_rows} rows; use the model's own tokenizer, "
            f"or one of at most {embedding_rows} entries"
        )


def _make_tokenizer(engine: Tokenizer, end: int | None) -> TextTokenizer:
    """The tokenizer neither cuts nor pads, and takes names of special tokens as text; `engine` is changed."""
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True
    settings: dict[str, object] = json.loads(engine.to_str())
    del settings["post_processor"]  # transformers writes an empty one in two ways
    return TextTokenizer(engine, end, hashlib.sha256(json.dumps(settings).encode()).hexdigest())
