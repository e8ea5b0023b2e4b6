"""Builds a folder of documents: files are read in order, encoded by several processes, and written.

Rows do not stay in memory. How rows become documents is in `document_encoder.py`; which files and encodings there are
is in `recipe.py`.
"""

import shlex
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import accumulate
from pathlib import Path

import numpy as np

from longspan.corpus.document_encoder import EncodedDocuments, FileChunk, Notes
from longspan.corpus.encoding_processes import encode_batches
from longspan.corpus.mismatched_answers import MismatchedAnswers
from longspan.corpus.recipe import Recipe
from longspan.data.array_files import COLUMN_TYPES, GrowingArray, GrowingCodes
from longspan.data.image_table import ImageWriter
from longspan.data.manifest import FILE, SHORTEST, LeftOut, Manifest, SourceFiles
from longspan.errors import DataError, plural
from longspan.files import file_stamp
from longspan.host import usable_cores
from longspan.plain_text import LogLine, bytes_text

# Rows of this many bytes are encoded together.
BATCH_BYTES = 1 << 20
# A line says that a chunk of this many bytes or more takes a while.
_LONG_BYTES = 16 << 20
# This time passes between two lines of progress.
_NEWS_SECONDS = 5.0
# Bytes of a corpus, by the kind of its rows, up to which one process encodes it; larger ones are shared by several.
_IN_PROCESS_BYTES = {"text": 32 << 20, "input_ids": 32 << 20}
# Rows of other kinds have this limit.
_CHATS_BYTES = 4 << 20


def build_documents(recipe: Recipe, folder: Path, log: LogLine) -> Manifest:
    """Write the documents of a recipe to a folder, which is created, and return their manifest, which is written last.

    Progress is logged. Raises DataError for a bad row that is not left out, if no row gives a document, and for files
    that changed.
    """
    folder.mkdir(parents=True)
    file_ends = [*accumulate((source.bytes for source in recipe.sources), initial=0)]
    start_time = last_log_time = time.monotonic()
    small_bytes = min(_IN_PROCESS_BYTES.get(encoding.kind, _CHATS_BYTES) for encoding in recipe.encodings)
    # One process is done with a small corpus before others have started.
    processes = 1 if file_ends[-1] <= small_bytes else usable_cores()
    with closing(_Writer(folder, recipe)) as writer:
        for batch, encoded in encode_batches(recipe.encoder, _batch_rows(recipe, log), processes):
            writer.append_documents(encoded)
            if time.monotonic() - last_log_time > _NEWS_SECONDS:
                last_log_time = time.monotonic()
                seconds = last_log_time - start_time
                bytes_read = file_ends[batch[-1].file] + batch[-1].chunk.end  # `end` counts those of its own file
                seconds_left = seconds * (file_ends[-1] - bytes_read) / max(bytes_read, 1)
                left_text = f"{seconds_left:.0f} s" if seconds_left < 100 else f"{seconds_left / 60:.0f} min"
                progress = _progress_text(bytes_read, file_ends[-1], writer.tokens, seconds)
                log(f"{progress}, about {left_text} left")
        log(_progress_text(file_ends[-1], file_ends[-1], writer.tokens, time.monotonic() - start_time))
    manifest = writer.finish_manifest()
    for file, source in zip(recipe.files, recipe.sources, strict=True):
        if file_stamp(file.path) != (source.bytes, source.modified_ns):
            raise DataError(f"{file.name} of the corpus ({file.path}) changed while it was read; start again")
    if not manifest.documents:
        raise DataError(_no_documents_text(recipe, manifest))
    SourceFiles.write(folder, recipe.sources)
    (folder / FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _progress_text(bytes_read: int, all_bytes: int, tokens: int, seconds: float) -> str:
    return (
        f"tokenized {bytes_text(bytes_read)} of {bytes_text(all_bytes)}: "
        f"{plural(tokens, 'token')}, {tokens / max(seconds, 1e-3):,.0f} a second"
    )


class _Writer:
    """Writes the files of a folder of documents from their beginnings to their ends."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        """Open the files that documents of this recipe need, without a value in them."""
        self._recipe = recipe
        self._folder = folder
        columns = ["lengths", "origins", "targets", "offsets", "hashes"]
        if len(recipe.encodings) > 1:
            columns.append("source_of")
        if recipe.records_texts:
            columns.append("texts")
        preference = recipe.settings.preference
        self._mismatched = None
        if preference == "kto":
            self._mismatched = MismatchedAnswers(recipe.settings.data.max_document_tokens)
        if recipe.settings.num_labels or preference in ("orpo", "kto"):
            columns.append("labels")
        self._columns = {name: GrowingArray(folder / f"{name}.npy", COLUMN_TYPES[name]) for name in columns}
        self._source_of_file = np.array([file.source for file in recipe.files], dtype=np.int16)
        self._tokens = (folder / "tokens.bin").open("wb")
        # This stays None while every token is its own label.
        self._codes: GrowingCodes | None = None
        self._images = ImageWriter(folder) if recipe.has_images else None
        self._notes = Notes()
        # written so far
        self.tokens = 0
        self._texts = 0

    def close(self) -> None:
        for column in self._columns.values():
            column.close()
        if self._codes is not None:
            self._codes.close(self.tokens)
        for file in (self._tokens, self._images):
            if file is not None:
                file.close()

    def append_documents(self, encoded: EncodedDocuments) -> None:
        """Append the documents of a batch to all files; for KTO each with a mismatched one behind it.

        Raises DataError, once they are written, if labels of rows have different sizes.
        """
        if self._mismatched is not None:
            encoded = self._mismatched.add_mismatched_documents(encoded)
        # A text is a row, which a file and a position there name: it begins where either is another than before.
        begins_text = (np.diff(encoded.files, prepend=-1) | np.diff(encoded.positions, prepend=-1)) != 0
        # These are all columns that a corpus can have; this one may lack some.
        values = {
            "lengths": encoded.lengths,
            "origins": encoded.files,
            "targets": encoded.targets,
            "source_of": self._source_of_file[encoded.files],
            "offsets": self.tokens + np.cumsum(encoded.lengths) - encoded.lengths,
            "texts": self._texts + np.cumsum(begins_text) - 1,
            "hashes": encoded.hashes,
            "labels": np.array(encoded.numbers),
        }
        # `images` count documents from 0 in these rows, so they are appended before the columns grow.
        if self._images is not None:
            self._images.append(encoded.images, self._columns["lengths"].count)
        for name, column in self._columns.items():
            column.append(values[name])
        self._tokens.write(encoded.ids.data)
        if encoded.codes is not None:
            self._codes = self._codes or GrowingCodes(self._folder / "codes.bin")
            self._codes.write(encoded.codes, self.tokens)
        self.tokens += len(encoded.ids)
        self._texts = int(values["texts"][-1]) + 1 if len(encoded.lengths) else self._texts
        self._notes.add_notes(encoded.notes)
        if len(sizes := self._notes.sizes) > 1:
            places = " and ".join(f"{where} {plural(size, 'number')}" for size, where in sizes.items())
            raise DataError(f"labels of documents are of several kinds: {places}; give as many in each row")

    def finish_manifest(self) -> Manifest:
        """Return the manifest of all that was written, once the files are closed.

        Removes `targets.npy` if all tokens are targets and documents have no labels, and `texts.npy` if each document
        is a text.
        """
        if self._codes is None and "labels" not in self._columns:
            (self._folder / "targets.npy").unlink()
        if self._texts == self._columns["lengths"].count:
            (self._folder / "texts.npy").unlink(missing_ok=True)
        notes = self._notes
        # All sources have one tokenizer and settings.
        encoding = self._recipe.encodings[0]
        return Manifest(
            tokenizer_size=encoding.tokenizer.size,
            dtype=self._recipe.encoder.dtype,
            kinds=tuple(encoding.kind for encoding in self._recipe.encodings),
            columns=encoding.settings.columns,
            codes="" if self._codes is None else self._codes.dtype,
            rows=notes.rows,
            documents=self._columns["lengths"].count,
            tokens=self.tokens,
            images=0 if self._images is None else self._images.count,
            labels=next(iter(notes.sizes), 0),
            preference=self._recipe.settings.preference,
            pad_id=next((i for i in (encoding.tokenizer.pad, encoding.tokenizer.end) if i is not None), -1),
            largest_id=notes.largest[0],
            largest_at=notes.largest[1],
            skipped=tuple(notes.skipped),
            unseen=dict(notes.unseen.most_common()),
            unread=dict(notes.unread.most_common()),
            bad=tuple(notes.bad),
            ends=notes.ends,
            left_out=LeftOut(**notes.left_out),
        )


def _batch_rows(recipe: Recipe, log: LogLine) -> Iterator[list[FileChunk]]:
    """About BATCH_BYTES of rows at a time. A chunk without rows only shows progress, so its batch is
    yielded at once."""
    batch = list[FileChunk]()
    size = 0
    for number, file in enumerate(recipe.files):
        for chunk in file.read_chunks(recipe.settings.data.max_text_bytes):
            batch.append(FileChunk(file.source, number, chunk))
            size += len(chunk.data)
            if len(chunk.data) > _LONG_BYTES:
                log(
                    f"tokenizing {len(chunk.data) / 1e6:,.0f} MB of {chunk.name} in one piece, which takes a while and "
                    "memory: its rows are long"
                )
            if size >= BATCH_BYTES or not chunk.data:
                yield batch
                batch = []
                size = 0
    if batch:
        yield batch


def _no_documents_text(recipe: Recipe, manifest: Manifest) -> str:
    paths = " and ".join(f"{key} {path!r}" for key, path in recipe.settings.source_paths())
    skipped = len(manifest.skipped)
    if skipped == len(recipe.files):
        name = recipe.files[0].path.name
        return (
            f"{paths} is not UTF-8 ({plural(skipped, 'file')}); iconv -f LATIN1 -t UTF-8 {shlex.quote(name)} > "
            f"{shlex.quote(f'utf8-{name}')} converts a text, if it is Latin-1, and so for other encodings"
        )
    left_out = manifest.left_out
    rows_text = ""
    if left_out.masked_rows or left_out.bad_rows:
        rows_text = f" ({left_out.masked_rows:,} rows without a target, {left_out.bad_rows:,} bad ones)"
    return (
        f"{paths} is empty: of {plural(len(recipe.files), 'file')} {skipped} {'is' if skipped == 1 else 'are'} "
        f"not UTF-8, and the rest holds no text of {SHORTEST} tokens or more{rows_text}; give text"
    )
