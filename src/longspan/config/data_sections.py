"""The section [data] with its tables [[data.sources]]. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from longspan.config.keys import AUTO, NOT_GIVEN, AtLeast, NonNegativeInt, PositiveFloat

MAX_TEXT_BYTES = 1 << 26


@dataclass(frozen=True)
class SourceConfig:
    """One of several sources of training data, in place of data.path; flags do not reach these tables."""

    path: str = ""
    """As data.path."""
    weight: PositiveFloat = 1.0
    """How often its documents are trained on, relative to those of the other sources."""


@dataclass(frozen=True)
class DataConfig:
    """The rows of data, how they become documents, and which of them are only evaluated."""

    path: str = ""
    """A file or folder of .txt .md .py (one text each), .jsonl (also .gz and .zst), .parquet or .arrow rows, as a data
    set of the package datasets has them (docs/fine-tuning.md), or stdlib (sources of this Python's standard library).
    Default: stdlib, unless there are tables [[data.sources]]."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources with weights, in place of path: tables [[data.sources]]."""
    on_bad: Literal["error", "skip"] = "error"
    """A row that gives no document is an error that names file and line, or is counted and skipped."""
    max_text_bytes: NonNegativeInt = MAX_TEXT_BYTES
    """A line, a text file or a row of a table (without its images) of more bytes is a bad row, and is not parsed;
    0: any."""
    check_images: Literal["headers", "pixels"] = "headers"
    """How images are looked at when tokens are made: headers and ends of files, by which those that were cut off are
    bad rows; or pixels: every image is decoded once, so that none is found broken in a step.
    """
    cache: str = ""
    """Folder where tokens are kept for all runs that ask for the same; none: they are not kept, and rows are tokenized
    when they are read; empty: longspan/corpora in the user's cache."""
    workers: NonNegativeInt = 0
    """Processes that tokenize; 0: one for each core."""
    turns: Literal["together", "split"] = "together"
    """A conversation is one document, or split: one for each assistant turn, with what stood before it."""
    date_string: str = "26 Jul 2024"
    """The date for chat templates that ask for one, so that a conversation has the same tokens on every day."""
    tokenizer: str = ""
    """A folder with tokenizer.json; empty: the model folder's, else one trained on the corpus."""
    vocab_size: Annotated[int, AtLeast(257)] = 2048  # 256 bytes and the end of text at the least
    """Entries of the byte-pair tokenizer that is trained when no other is given, and of the preset's embedding."""
    parse_special_tokens: bool = False
    """Read the names of special tokens in texts (<|im_start|>, say) as these tokens; false: as plain text."""
    max_document_tokens: NonNegativeInt = NOT_GIVEN
    """Longer texts are cut into documents of at most this many tokens; 0: none is cut, and one that fits no group of
    slots is an error that names it. Default: 0; tiny presets: 2048."""
    eval_documents: Annotated[int | str, AtLeast(0)] = AUTO
    """Texts (rows, conversations) held out for evaluation, chosen by the seed, with all documents that they are cut or
    split into; 0: no evaluation; auto: one text in ten, at most 32."""
    pack_to: NonNegativeInt = 0
    """Training documents stand end to end and are cut every so many tokens, and a step takes whole packs; 0: documents
    stay whole. Held-out documents are never packed."""
    pack_attention: Literal["document", "across"] = "document"
    """In a pack, document: each piece of a document is one of its own, with positions from 0; across: attention and
    positions go on over the documents of a pack."""
