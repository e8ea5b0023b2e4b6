"""What decides the documents of a corpus: keys of [data], files, and how the rows of each source are encoded."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from longspan.config.preference_losses import RowForm
from longspan.config.sections import MAX_TEXT_BYTES, DataConfig, RunConfig
from longspan.corpus.cache import cache_folder
from longspan.corpus.document_encoder import DocumentEncoder
from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.kinds import CHATS, KIND_TEXTS, Kind
from longspan.corpus.rows.sample import DATE, RowSettings
from longspan.corpus.sources.find_files import STDLIB, CorpusFile, find_rows
from longspan.corpus.sources.first_rows import find_kind_of_rows
from longspan.corpus.tokenizer import TextTokenizer
from longspan.data.manifest import PAIRS, SourceFile
from longspan.errors import DataError

# A recipe with another version has another key, so that its documents are built again: of rows of a chat template, and
# of texts and token ids alone, which changes of chats leave as they are.
VERSION = 5
TEXT_VERSION = 2
# Rows for a loss of preferences have this version beside that of chats.
PREFERENCE_VERSION = 2


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the documents of a corpus.

    `files` and `sources` correspond: a path, and its size, time and SHA-256 sum. `encodings` has the encoding of each
    source's rows.
    """

    settings: "CorpusSettings"
    files: Sequence[CorpusFile]
    sources: Sequence[SourceFile]
    encodings: tuple[RowEncoding, ...]

    @cached_property
    def key(self) -> str:
        """The SHA-256 of all that decides the documents; equal for equal files, unless rows may have images."""
        data = self.settings.data
        is_text = {encoding.kind for encoding in self.encodings} <= {"text", "input_ids"}
        digests = [encoding.digest for encoding in self.encodings]
        deciding = [
            TEXT_VERSION if is_text else VERSION,
            digests,
            data.max_document_tokens,
            data.on_bad_row == "skip",
        ]
        # Defaults add nothing, so that these settings change the key only of a corpus that uses them.
        if data.max_text_bytes != MAX_TEXT_BYTES:
            deciding.append(data.max_text_bytes)
        if self.records_texts:
            deciding.append("texts")
        if self.settings.preference:
            deciding.append(PREFERENCE_VERSION)
        digest = hashlib.sha256(json.dumps(deciding).encode())
        for file, source in zip(self.files, self.sources, strict=True):
            rows = "" if file.rows is None else f" {file.rows}"
            digest.update(f"{file.source} {source.sha256} {source.name}{rows}\n".encode())
            if self.has_images:  # relative paths of images begin in the file's folder
                digest.update(f"{file.path.absolute().parent}\n".encode())
        return digest.hexdigest()

    @property
    def has_images(self) -> bool:
        """Whether rows may have images: a tokenizer's folder has a processor of them."""
        return any(encoding.images is not None for encoding in self.encodings)

    @property
    def records_texts(self) -> bool:
        """Whether a text may become several documents, and it is recorded which."""
        splits = any(encoding.settings.turns == "split" or encoding.kind == PAIRS for encoding in self.encodings)
        return splits or self.settings.data.max_document_tokens > 0

    @property
    def encoder(self) -> DocumentEncoder:
        """What makes documents of rows. Tokens have two bytes if the tokenizers' ids fit, and no row has ids of its
        own; else four.
        """
        fits_uint16 = all(e.kind != "input_ids" and e.tokenizer.size <= 1 << 16 for e in self.encodings)
        longest = self.settings.data.max_document_tokens
        skip_bad = self.settings.data.on_bad_row == "skip"
        return DocumentEncoder(self.encodings, longest, "<u2" if fits_uint16 else "<u4", skip_bad)


# Keys of [data] that decide documents, beside the paths. Those of the second tuple are recorded only where they are
# set, so that records from before version 0.4, which lack them, still fit.
_DECIDING = ("max_document_tokens", "on_bad_row", "max_text_bytes", "parse_special_tokens", "split_turns")
_WHERE_SET = ("end_of_chat_token", "rename_columns", "chat_template")


@dataclass(frozen=True)
class CorpusSettings:
    """The settings of a corpus of a run: keys of [data], or those of an evaluation set.

    `folder`, in the run's folder, is where the corpus is recorded; `prefix` is the table of its own keys in messages;
    `num_labels` is the model's. `preference` says what rows become for train.loss.
    """

    data: DataConfig
    folder: str = "corpus"
    prefix: str = "data."
    num_labels: int = 0
    preference: RowForm = ""

    @classmethod
    def for_run(cls, config: RunConfig) -> "CorpusSettings":
        """Return the settings of the documents that a run trains on."""
        return cls(config.data, num_labels=config.model.num_labels, preference=config.train.row_form)

    @classmethod
    def for_set(cls, config: RunConfig, path: str, split: str, longest: int, **fields: str) -> "CorpusSettings":
        """Return the settings of an evaluation set: those of the run, but for its rows and where texts are cut.

        `longest` is the most tokens of a document (0: any); `fields` are the set's `folder` and `prefix`.
        """
        data = replace(config.data, path=path, split=split, sources=(), max_document_tokens=longest)
        return replace(cls.for_run(replace(config, data=data)), **fields)

    def source_paths(self) -> tuple[tuple[str, str], ...]:
        """Return the key and the path of each source; without any, the standard library is the only one."""
        if not self.data.sources:
            return ((f"{self.prefix}path", self.data.path or STDLIB),)
        return tuple((f"data.sources[{i}].path", source.path) for i, source in enumerate(self.data.sources))

    def find_source_files(self, run_dir: Path) -> tuple[CorpusFile, ...]:
        """Find the source files in order, without those in the run's folder and in the cache.

        With data.sources, the name of a file in a source's folder begins with the name of that folder.
        """
        leave_out = (run_dir, cache_folder())
        files = list[CorpusFile]()
        sources = zip(self.source_paths(), self.data.sources or (self.data,), strict=True)
        for number, ((key, path), source) in enumerate(sources):
            folder = f"{Path(path).name}/" if self.data.sources and not Path(path).is_file() else ""
            for file in find_rows(path, source.split, leave_out=leave_out, key=key):
                files.append(replace(file, source=number, name=folder + file.name))
        return tuple(files)

    def deciding_values(self) -> dict[str, Any]:
        """Return the settings that decide the documents, by key, as values that JSON can hold."""
        data = self.data
        values = {"date_string": DATE} | {key: getattr(data, key) for key in _DECIDING}
        optional = {key: getattr(data, key) for key in _WHERE_SET}
        optional |= {"num_labels": self.num_labels, "preference": self.preference}
        values |= {key: [*value] if isinstance(value, tuple) else value for key, value in optional.items() if value}
        if not data.sources:
            return {"path": data.path, "split": data.split} | values
        return {"sources": [f"{source.path} {source.split}".strip() for source in data.sources]} | values


def find_kinds(settings: CorpusSettings, files: Sequence[CorpusFile]) -> list[Kind]:
    """Find the kind of rows of each source by their first rows.

    Raises DataError for pairs beside other kinds, and for kinds that train.loss or the model's head cannot take.
    """
    kinds = list[Kind]()
    for number, _ in enumerate(settings.source_paths()):
        source_files = [file for file in files if file.source == number]
        kinds.append(find_kind_of_rows(source_files, settings.data))
    form = settings.preference
    allowed_kinds = {PAIRS} | ({"prompt+completion", *CHATS} if form == "kto" else set())
    other_kinds = " and ".join(KIND_TEXTS[kind] for kind in sorted({*kinds} - allowed_kinds))
    paths = " and ".join(path for _, path in settings.source_paths())
    if form and other_kinds:
        required = (
            "a label beside prompt and completion, or a chat, or chosen and rejected"
            if form == "kto"
            else "chosen and rejected"
        )
        raise DataError(
            f"rows of {paths} hold {other_kinds}, and train.loss needs {required}; give such rows, or leave train.loss "
            "out"
        )
    if PAIRS in kinds and settings.num_labels != 1 and not form:
        raise DataError(
            f"rows of {paths} are pairs (chosen and rejected), and model.num_labels is {settings.num_labels}; set it "
            'to 1 to train a model that scores, or train.loss = "dpo" to train a language model on preferences '
            '(docs/preferences.md); data.rename_columns = ["chosen=", "rejected="] reads messages beside them'
        )
    if PAIRS in kinds and other_kinds:
        raise DataError(f"rows of {paths} are pairs and also {other_kinds}; train on one of them")
    return kinds


def make_recipe(
    settings: CorpusSettings, files: Sequence[CorpusFile], sources: Sequence[SourceFile], tokenizer: TextTokenizer
) -> Recipe:
    """Make the recipe of the documents of these files. Raises DataError for rows that do not go together."""
    data = settings.data
    row_settings = RowSettings(
        parse_special_tokens=data.parse_special_tokens,
        turns="split" if data.split_turns else "together",
        end_of_chat=data.end_of_chat_token,
        columns=data.rename_columns,
        num_labels=settings.num_labels,
        preference=settings.preference,
    )
    encodings = tuple(RowEncoding(kind, tokenizer, row_settings) for kind in find_kinds(settings, files))
    return Recipe(settings, files, sources, encodings)
