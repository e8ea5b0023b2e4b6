"""Making a folder of documents: files are read in order, encoded side by side, and written as they come.

Nothing of a row stays in memory, so a corpus may be larger than that.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from longspan.corpus.formats.row_file import row_file
from longspan.corpus.store.document_encoder import Encoded, Notes, Piece
from longspan.corpus.store.recipe import Recipe
from longspan.corpus.store.workers import encode_batches
from longspan.data.left_out import SHORTEST, LeftOut
from longspan.data.store.arrays import GrowingArray, GrowingCodes
from longspan.data.store.images import ImageWriter
from longspan.data.store.manifest import Manifest, SourceLines
from longspan.data.store.sources import CorpusFile, LogLine
from longspan.errors import DataError, counted

BATCH_BYTES = 1 << 20  # of rows that are encoded together
_NEWS_SECONDS = 5.0


def build_documents(recipe: Recipe, folder: Path, log: LogLine) -> Manifest:
    """Write the documents of a recipe to a folder, which is made; progress is logged.

    Raises DataError where there are none, for rows that give none, and for files that change meanwhile.
    """
    folder.mkdir(parents=True)
    progress = _Progress(recipe, log)
    with _Writer(folder, recipe) as writer:
        for batch, encoded in encode_batches(recipe.encoder, _batches(recipe.files), recipe.processes):
            writer.add(encoded)
            progress.say(batch, writer)
        progress.say_all(writer)
    manifest = writer.manifest()
    _check_unchanged(recipe)
    if not manifest.documents:
        raise DataError(_empty(recipe, manifest))
    SourceLines.write(folder, recipe.sources)
    (folder / "corpus.json").write_text(manifest.to_json(), encoding="utf-8")
    return manifest


class _Writer:
    """The files of a folder of documents, written from their beginnings to their ends."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._recipe, self._folder = recipe, folder
        columns = {"lengths": "<i4", "origins": "<i4", "targets": "<i4"}
        if len(recipe.encodings) > 1:
            columns["source_of"] = "<i2"
        columns |= {"offsets": "<i8"} if recipe.stored else {"positions": "<i8", "starts": "<i4"}
        self._columns = {name: GrowingArray(folder / f"{name}.npy", dtype) for name, dtype in columns.items()}
        self._source_of_file = np.array([file.source for file in recipe.files], dtype=np.int16)
        self._tokens = (folder / "tokens.bin").open("wb") if recipe.stored else None
        self._codes, self._masked = GrowingCodes(folder / "codes.bin"), False
        self._images = ImageWriter(folder) if recipe.images else None
        self._notes = Notes()
        self.tokens = self._targets = 0

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for column in (*self._columns.values(), self._codes):
            column.close()
        for file in (self._tokens, self._images):
            if file is not None:
                file.close()

    def add(self, encoded: Encoded) -> None:
        """Write the documents of some rows behind the others."""
        values = {
            "lengths": encoded.lengths,
            "origins": encoded.files,
            "targets": encoded.targets,
            "source_of": self._source_of_file[encoded.files],
            "offsets": self.tokens + np.cumsum(encoded.lengths) - encoded.lengths,
            "positions": encoded.positions,
            "starts": encoded.starts,
        }
        if self._images is not None:
            self._images.append(encoded.images, self._columns["lengths"].count)
        for name, column in self._columns.items():
            column.append(values[name])
        self._masked |= encoded.codes is not None
        if self._tokens is not None:
            self._tokens.write(encoded.ids.data)
            self._codes.append(encoded.codes, len(encoded.ids))
        self.tokens += len(encoded.ids)
        self._targets += int(encoded.targets.sum())
        self._notes.add(encoded.notes)

    def manifest(self) -> Manifest:
        """What the closed files hold; targets are no file where all tokens are."""
        if not self._masked:
            (self._folder / "targets.npy").unlink()
        notes = self._notes
        return replace(
            _manifest_of(self._recipe),
            codes=self._codes.dtype,
            rows=notes.rows,
            documents=self._columns["lengths"].count,
            tokens=self.tokens,
            images=0 if self._images is None else self._images.count,
            targets=self._targets,
            skipped=tuple(notes.skipped),
            special=dict(notes.special.most_common()),
            names_as_text=dict(sorted(notes.names_as_text.items())),
            bad=tuple(notes.bad),
            left_out=LeftOut(**notes.left_out),
        )


def _manifest_of(recipe: Recipe) -> Manifest:
    """What is known before anything is read."""
    encoding = recipe.encodings[0]
    tokenizer = encoding.tokenizer
    return Manifest(
        tokenizer_digest=tokenizer.digest,
        tokenizer_size=tokenizer.size,
        dtype=recipe.encoder.dtype if recipe.stored else "",
        max_document_tokens=recipe.longest,
        key=recipe.key,
        kinds=tuple(encoding.kind for encoding in recipe.encodings),
        encodings=tuple(encoding.digest for encoding in recipe.encodings),
        files=len(recipe.files),
        parse_special_tokens=encoding.settings.parse_special_tokens,
        opening=tokenizer.opening,
        closing=tokenizer.closing,
    )


class _Progress:
    """Lines that say how far a build is, every few seconds."""

    def __init__(self, recipe: Recipe, log: LogLine) -> None:
        self._log, self._sizes = log, [source.bytes for source in recipe.sources]
        self._total, self._file, self._before = sum(self._sizes), 0, 0
        self._began = self._said = time.monotonic()
        self._read = 0

    def say(self, batch: Sequence[Piece], writer: _Writer) -> None:
        """Say how far it is once this batch is written, where it is time to."""
        last = batch[-1]
        while self._file < last.file:
            self._before += self._sizes[self._file]
            self._file += 1
        self._read = self._before + last.chunk.end
        if time.monotonic() - self._said > _NEWS_SECONDS:
            self._said = time.monotonic()
            left = (self._said - self._began) * (self._total - self._read) / max(self._read, 1)
            self._log(f"{self._line(writer, self._read)}, about {_duration(left)} left")

    def say_all(self, writer: _Writer) -> None:
        """Say what was done in all."""
        self._log(self._line(writer, self._total))

    def _line(self, writer: _Writer, read: int) -> str:
        seconds = max(time.monotonic() - self._began, 1e-3)
        return (
            f"tokenized {read / 1e6:,.1f} of {self._total / 1e6:,.1f} MB: {counted(writer.tokens, 'token')}, "
            f"{writer.tokens / seconds:,.0f} a second"
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _batches(files: Iterable[CorpusFile]) -> Iterator[list[Piece]]:
    """The rows of files in order, some megabytes at a time."""
    batch, size = list[Piece](), 0
    for number, file in enumerate(files):
        for chunk in row_file(file.name, file.path).chunks():
            batch.append(Piece(file.source, number, chunk))
            size += len(chunk.data)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _check_unchanged(recipe: Recipe) -> None:
    """Raise DataError where a file was written while it was read."""
    for file, source in zip(recipe.files, recipe.sources, strict=True):
        stat = file.path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (source.bytes, source.modified_ns):
            raise DataError(f"{file.name} of the corpus ({file.path}) changed while it was read; start again")


def _empty(recipe: Recipe, manifest: Manifest) -> str:
    skipped, left_out = len(manifest.skipped), manifest.left_out
    rows = f" ({left_out.masked_rows:,} rows without a target, {left_out.bad_rows:,} bad ones)"
    return (
        f"{recipe.path} is empty: of {counted(len(recipe.files), 'file')} {skipped} {'is' if skipped == 1 else 'are'} "
        f"not UTF-8, and the rest holds no text of {SHORTEST} tokens or more"
        f"{rows if left_out.masked_rows or left_out.bad_rows else ''}; give text"
    )
