"""Builds a folder of documents: files are read in order, encoded by several processes, and written.

A `Recipe` contains everything that decides the documents. Rows do not stay in memory. How rows become documents is in
`document_encoder.py`; which files and encodings there are is in `corpus_settings.py`.
"""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longspan.config.sections import MAX_TEXT_BYTES
from longspan.corpus.document_encoder import DocumentEncoder, Encoded, FileChunk, Notes, encode_batches
from longspan.corpus.files import CorpusFile, LogLine
from longspan.corpus.rows.sample import PAIRS
from longspan.data.images import ImageWriter
from longspan.data.manifest import SHORTEST, GrowingArray, GrowingCodes, LeftOut, Manifest, SourceFile, SourceFiles
from longspan.errors import DataError, plural
from longspan.files import name_file_in_errors
from longspan.host import usable_cores

if TYPE_CHECKING:
    from longspan.corpus.rows.encoding import RowEncoding


_POLL_SECONDS, _WAIT_NEWS_SECONDS = 0.2, 30.0


def cache_folder(setting: str) -> Path:
    """Return the folder that `data.cache_dir` names; empty: longspan/corpora in the user's cache (XDG_CACHE_HOME)."""
    if setting == "none":
        raise DataError('data.cache_dir is "none", and tokens are always kept; name a folder, or leave it empty')
    if setting:
        return Path(setting).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "longspan" / "corpora"


class Cache:
    """The cache in a folder, which is created. Raises OSError if it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable for this user", str(folder))  # 13: EACCES

    def sums_file(self, path: str) -> Path:
        """Return the file with the SHA-256 sums of the files at a path."""
        name = hashlib.sha256(str(Path(path).absolute()).encode()).hexdigest()[:32]
        return self.folder / "files" / f"{name}.jsonl"

    def open_or_build_documents(
        self, key: str, is_whole: Callable[[Path], bool], build: Callable[[Path], object], log: LogLine
    ) -> tuple[Path, bool]:
        """Return the folder of the documents with this key, and whether it was built now; other runs wait meanwhile."""
        folder = self.folder / key[:40]  # of 64 hexadecimal digits: enough to be different
        if folder.is_dir() and is_whole(folder):
            return folder, False
        with self._lock_documents(folder, log) as locked:
            if folder.is_dir() and is_whole(folder):  # another run made it in the meantime
                return folder, False
            if locked:  # then no other run builds, and what is unfinished is left of one that ended
                for unfinished in self.folder.glob(f"{folder.name}.partial*"):
                    shutil.rmtree(unfinished, ignore_errors=True)
            if folder.is_dir():
                log(f"{folder} is damaged: its documents are made again")
                shutil.rmtree(folder)
            partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:8]}")
            try:
                with name_file_in_errors(partial):
                    build(partial)
                    try:
                        partial.rename(folder)
                    except OSError:  # without locks another run may have made it first
                        if not folder.is_dir():
                            raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return folder, True

    @contextmanager
    def _lock_documents(self, folder: Path, log: LogLine) -> Iterator[bool]:
        """Lock these documents, after waiting for a run that has; yields False if the file system has no locks."""
        last_log_time = 0.0
        with folder.with_suffix(".lock").open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() - last_log_time > _WAIT_NEWS_SECONDS:
                        log("another run tokenizes the same corpus: waiting for it")
                        last_log_time = time.monotonic()
                    time.sleep(_POLL_SECONDS)
                except OSError:
                    yield False
                    return
            yield True


def cache_error(folder: Path, error: OSError) -> DataError:
    free = ""
    with suppress(OSError):
        free = f" ({shutil.disk_usage(folder).free:,} bytes are free)"
    return DataError(
        f"the corpus cannot be kept in {folder}: {error.strerror or error}{free}; set data.cache_dir to a folder with "
        f"room "
        "for its tokens"
    )


# A recipe with another version has another key, so that its documents are built again: of rows of a chat template, and
# of texts and token ids alone, which changes of chats leave as they are.
VERSION, TEXT_VERSION = 4, 2
# Larger corpora are encoded by several processes: by the kind of rows.
_IN_PROCESS_BYTES = {"text": 32 << 20, "input_ids": 32 << 20}
_CHATS_BYTES = 4 << 20  # of rows of other kinds


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the documents of a corpus.

    `files` and `sources` correspond: a path, and its size, time and SHA-256 sum. `encodings` has the encoding of each
    source's rows. `longest` is the most tokens of a document, `most_bytes` of a row (0: any). A bad row is an error, or
    left out with `skip_bad`. `path` names the corpus in messages.
    """

    path: str
    files: Sequence[CorpusFile]
    sources: Sequence[SourceFile]
    encodings: "tuple[RowEncoding, ...]"
    longest: int
    skip_bad: bool = False
    most_bytes: int = MAX_TEXT_BYTES

    @cached_property
    def key(self) -> str:
        """The SHA-256 of all that decides the documents; equal for equal files, unless rows may have images."""
        digests = [encoding.digest for encoding in self.encodings]
        # Defaults add nothing, so that these settings change the key only of a corpus that uses them.
        further_settings = [self.most_bytes] * (self.most_bytes != MAX_TEXT_BYTES)
        further_settings += ["texts"] * self.records_texts
        version = TEXT_VERSION if {encoding.kind for encoding in self.encodings} <= {"text", "input_ids"} else VERSION
        digest = hashlib.sha256(json.dumps([version, digests, self.longest, self.skip_bad, *further_settings]).encode())
        for file, source in zip(self.files, self.sources, strict=True):
            rows = "" if file.rows is None else f" {file.rows}"
            digest.update(f"{file.source} {source.sha256} {source.name}{rows}\n".encode())
            if self.has_images:  # relative paths of images begin in the file's folder
                digest.update(f"{file.path.absolute().parent}\n".encode())
        return digest.hexdigest()

    @property
    def has_images(self) -> bool:
        return any(encoding.images is not None for encoding in self.encodings)

    @property
    def records_texts(self) -> bool:
        """Whether a text may become several documents, and it is recorded which."""
        splits = any(encoding.settings.turns == "split" or encoding.kind == PAIRS for encoding in self.encodings)
        return splits or self.longest > 0

    @property
    def encoder(self) -> DocumentEncoder:
        """Tokens have two bytes if the tokenizers' ids fit, and no row has ids of its own; else four."""
        fits_uint16 = all(e.kind != "input_ids" and e.tokenizer.size <= 1 << 16 for e in self.encodings)
        return DocumentEncoder(self.encodings, self.longest, "<u2" if fits_uint16 else "<u4", self.skip_bad)

    @property
    def processes(self) -> int:
        """How many processes encode: one if the corpus is so small that it is done before others start."""
        size = sum(source.bytes for source in self.sources)
        small_bytes = min(_IN_PROCESS_BYTES.get(encoding.kind, _CHATS_BYTES) for encoding in self.encodings)
        return 1 if size <= small_bytes else usable_cores()


BATCH_BYTES = 1 << 20  # of rows that are encoded together
_LONG_BYTES = 16 << 20
_NEWS_SECONDS = 5.0


def build_documents(recipe: Recipe, folder: Path, log: LogLine) -> Manifest:
    """Write the documents of a recipe to a folder, which is created; progress is logged.

    Raises DataError for a bad row that is not left out, if no row gives a document, and for files that changed.
    """
    folder.mkdir(parents=True)
    progress = _Progress(recipe, log)
    with _Writer(folder, recipe) as writer:
        for batch, encoded in encode_batches(recipe.encoder, _batch_rows(recipe, log), recipe.processes):
            writer.write_rows(encoded)
            progress.log_batch(batch, writer)
        log(progress.line(writer, progress.ends[-1]))
    manifest = writer.finish_manifest()
    _check_unchanged(recipe)
    if not manifest.documents:
        raise DataError(_no_documents_text(recipe, manifest))
    SourceFiles.write(folder, recipe.sources)
    (folder / "corpus.json").write_text(manifest.to_json(), encoding="utf-8")
    return manifest


class _Writer:
    """Writes the files of a folder of documents from their beginnings to their ends."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._recipe, self._folder = recipe, folder
        columns = {"lengths": "<i4", "origins": "<i4", "targets": "<i4", "offsets": "<i8", "hashes": "<i8"}
        if len(recipe.encodings) > 1:
            columns["source_of"] = "<i2"
        if recipe.records_texts:
            columns["texts"] = "<i4"
        if any(encoding.settings.num_labels for encoding in recipe.encodings):
            columns["labels"] = "<f8"
        self._columns = {name: GrowingArray(folder / f"{name}.npy", dtype) for name, dtype in columns.items()}
        self._source_of_file = np.array([file.source for file in recipe.files], dtype=np.int16)
        self._tokens = (folder / "tokens.bin").open("wb")
        self._codes, self._has_codes = GrowingCodes(folder / "codes.bin"), False
        self._images = ImageWriter(folder) if recipe.has_images else None
        self._notes = Notes()
        self.tokens = self._targets = self._texts = 0  # written so far

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for column in (*self._columns.values(), self._codes):
            column.close()
        for file in (self._tokens, self._images):
            if file is not None:
                file.close()

    def write_rows(self, encoded: Encoded) -> None:
        # A text is a row: a file and a position there.
        begins = np.diff(encoded.files, prepend=-1) | np.diff(encoded.positions, prepend=-1) != 0
        values = {  # of all columns that a corpus can have; this one may lack some
            "lengths": encoded.lengths,
            "origins": encoded.files,
            "targets": encoded.targets,
            "source_of": self._source_of_file[encoded.files],
            "offsets": self.tokens + np.cumsum(encoded.lengths) - encoded.lengths,
            "texts": self._texts + np.cumsum(begins) - 1,
            "hashes": encoded.hashes,
            "labels": np.array(encoded.numbers),
        }
        if self._images is not None:  # before the columns grow: `images` count documents from 0 in these rows
            self._images.append(encoded.images, self._columns["lengths"].count)
        for name, column in self._columns.items():
            column.append(values[name])
        self._has_codes |= encoded.codes is not None
        self._tokens.write(encoded.ids.data)
        self._codes.append(encoded.codes, len(encoded.ids))
        self.tokens += len(encoded.ids)
        self._targets += int(encoded.targets.sum())
        self._texts = int(values["texts"][-1]) + 1 if len(encoded.lengths) else self._texts
        self._notes.add_notes(encoded.notes)
        if len(sizes := self._notes.sizes) > 1:
            places = " and ".join(f"{where} {plural(size, 'number')}" for size, where in sizes.items())
            raise DataError(f"labels of documents are of several kinds: {places}; give as many in each row")

    def finish_manifest(self) -> Manifest:
        """Removes `targets.npy` if all tokens are targets, and `texts.npy` if each document is a text."""
        if not self._has_codes and "labels" not in self._columns:
            (self._folder / "targets.npy").unlink()
        if self._texts == self._columns["lengths"].count:
            (self._folder / "texts.npy").unlink(missing_ok=True)
        notes, encoding = self._notes, self._recipe.encodings[0]  # all sources have one tokenizer and settings
        return Manifest(
            tokenizer_digest=encoding.tokenizer.digest,
            tokenizer_size=encoding.tokenizer.size,
            dtype=self._recipe.encoder.dtype,
            max_document_tokens=self._recipe.longest,
            key=self._recipe.key,
            kinds=tuple(encoding.kind for encoding in self._recipe.encodings),
            encodings=tuple(encoding.digest for encoding in self._recipe.encodings),
            files=len(self._recipe.files),
            parse_special_tokens=encoding.settings.parse_special_tokens,
            columns=encoding.settings.columns,
            opening=encoding.tokenizer.opening,
            closing=encoding.tokenizer.closing,
            codes=self._codes.dtype,
            rows=notes.rows,
            documents=self._columns["lengths"].count,
            tokens=self.tokens,
            images=0 if self._images is None else self._images.count,
            targets=self._targets,
            labels=next(iter(notes.sizes), 0),
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


class _Progress:
    """Logs the progress of a build every few seconds."""

    def __init__(self, recipe: Recipe, log: LogLine) -> None:
        self._log = log
        self.ends: list[int] = [*accumulate((source.bytes for source in recipe.sources), initial=0)]  # of files
        self._start_time = self._last_log_time = time.monotonic()

    def log_batch(self, batch: Sequence[FileChunk], writer: _Writer) -> None:
        """A chunk's `end` counts the bytes read of its own file."""
        bytes_read = self.ends[batch[-1].file] + batch[-1].chunk.end
        if time.monotonic() - self._last_log_time > _NEWS_SECONDS:
            self._last_log_time = time.monotonic()
            seconds = self._last_log_time - self._start_time
            left = seconds * (self.ends[-1] - bytes_read) / max(bytes_read, 1)
            left_text = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
            self._log(f"{self.line(writer, bytes_read)}, about {left_text} left")

    def line(self, writer: _Writer, bytes_read: int) -> str:
        seconds = max(time.monotonic() - self._start_time, 1e-3)
        scale, unit = (1e6, "MB") if self.ends[-1] >= 1e6 else (1e3, "kB")
        return (
            f"tokenized {bytes_read / scale:,.1f} of {self.ends[-1] / scale:,.1f} {unit}: "
            f"{plural(writer.tokens, 'token')}, {writer.tokens / seconds:,.0f} a second"
        )


def _batch_rows(recipe: Recipe, log: LogLine) -> Iterator[list[FileChunk]]:
    """A chunk without rows only shows progress, so its batch is yielded at once."""
    batch, size = list[FileChunk](), 0
    for number, file in enumerate(recipe.files):
        for chunk in file.read_chunks(recipe.most_bytes):
            batch.append(FileChunk(file.source, number, chunk))
            size += len(chunk.data)
            if len(chunk.data) > _LONG_BYTES:
                log(
                    f"tokenizing {len(chunk.data) / 1e6:,.0f} MB of {chunk.name} in one piece, which takes a while and "
                    "memory: its rows are long"
                )
            if size >= BATCH_BYTES or not chunk.data:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _check_unchanged(recipe: Recipe) -> None:
    for file, source in zip(recipe.files, recipe.sources, strict=True):
        stat = file.path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (source.bytes, source.modified_ns):
            raise DataError(f"{file.name} of the corpus ({file.path}) changed while it was read; start again")


def _no_documents_text(recipe: Recipe, manifest: Manifest) -> str:
    skipped, left_out = len(manifest.skipped), manifest.left_out
    rows = f" ({left_out.masked_rows:,} rows without a target, {left_out.bad_rows:,} bad ones)"
    if skipped == len(recipe.files):
        name = recipe.files[0].path.name
        return (
            f"{recipe.path} is not UTF-8 ({plural(skipped, 'file')}); iconv -f LATIN1 -t UTF-8 {shlex.quote(name)} > "
            f"{shlex.quote(f'utf8-{name}')} converts a text, if it is Latin-1, and so for other encodings"
        )
    return (
        f"{recipe.path} is empty: of {plural(len(recipe.files), 'file')} {skipped} {'is' if skipped == 1 else 'are'} "
        f"not UTF-8, and the rest holds no text of {SHORTEST} tokens or more"
        f"{rows if left_out.masked_rows or left_out.bad_rows else ''}; give text"
    )
