"""Making a corpus folder: read, tokenize, cut into documents, write. One rank does it, once for each run folder.

Texts stream through in batches, so a corpus may be larger than memory. Reading it back is `documents.py`'s business.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longspan.errors import DataError, counted
from longspan.train.config.sections import DataConfig
from longspan.train.data.documents import Corpus, Manifest
from longspan.train.data.files import (
    Source,
    changed_files,
    describe,
    files_of_other_kinds,
    find_files,
    read_file,
    read_texts,
)
from longspan.train.data.left_out import SHORTEST, LeftOut, documents_of, left_out_lines
from longspan.train.data.tokenizer import TextTokenizer, train_tokenizer

SAMPLE_CHARACTERS = 4_000_000  # what the byte-pair tokenizer is trained on, at most
BATCH_CHARACTERS = 4_000_000  # what is tokenized at once

LogLine = Callable[[str], None]


@dataclass(frozen=True)
class CorpusSettings:
    """What a corpus of a run is made from: keys of [data], or those of an evaluation set.

    `folder` is where it lies in the run's folder; messages begin the names of the keys `path` and
    `max_document_tokens` with `prefix`.
    """

    data: DataConfig
    folder: str = "corpus"
    prefix: str = "data."

    def files(self, run_dir: Path) -> dict[str, Path]:
        """Its source files by name; those of the run are none. Raises DataError where there are none."""
        return find_files(self.data.path, leave_out=run_dir, key=f"{self.prefix}path")


def ensure_corpus(
    settings: CorpusSettings, run_dir: Path, *, tokenizer: TextTokenizer | None, resumed: bool, log: LogLine
) -> Corpus:
    """A corpus in the run's folder, which is built again where its sources or settings changed.

    Without a `tokenizer` one is trained. What happens is logged, at least once a batch. Raises DataError for sources
    that are missing, empty or unreadable, and, where the run is `resumed`, for sources or settings that changed since
    it began: its order would not hold.
    """
    data, files = settings.data, settings.files(run_dir)
    corpus = _corpus_of_run(settings, files, run_dir, resumed=resumed, tokenizer=tokenizer, log=log)
    manifest, other_kinds = corpus.manifest, files_of_other_kinds(data.path, leave_out=run_dir)
    longest, key = data.max_document_tokens, f"{settings.prefix}max_document_tokens"
    for line in left_out_lines(manifest.left_out, longest, other_kinds, manifest.skipped, key=key):
        log(line)
    return corpus


def _corpus_of_run(
    settings: CorpusSettings,
    files: dict[str, Path],
    run_dir: Path,
    *,
    tokenizer: TextTokenizer | None,
    resumed: bool,
    log: LogLine,
) -> Corpus:
    """The corpus that is there, where nothing changed, or a new one."""
    folder = run_dir / settings.folder
    if (folder / "corpus.json").is_file():
        corpus = Corpus(folder)
        changes = _changes(corpus.manifest, settings, files, tokenizer)
        if not resumed and corpus.manifest.opening is None:  # a run that it belongs to goes on with it
            changes.append("an older version of longspan built it")
        if not changes:
            return corpus
        if resumed:
            raise DataError(_changed_message(run_dir, changes))
        log(f"the corpus changed ({changes[0]}): building it again")
    elif resumed:
        raise DataError(f"{run_dir} has checkpoints but no corpus: restore {folder}, or set run.dir to a new folder")
    return build_corpus(settings, files, run_dir, tokenizer=tokenizer, log=log)


def build_corpus(
    settings: CorpusSettings, files: dict[str, Path], run_dir: Path, *, tokenizer: TextTokenizer | None, log: LogLine
) -> Corpus:
    """Write the corpus's folder and `run_dir/tokenizer.json`; an interrupted build leaves neither half-made."""
    data, folder = settings.data, run_dir / settings.folder
    partial = folder.with_name(f"{folder.name}.partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    reader = _Reader(files)
    if tokenizer is None:
        log(f"training a tokenizer of {data.vocab_size} entries on {data.path}")
        tokenizer = train_tokenizer(_sample(files), data.vocab_size)
    tokenizer.parsing(data.parse_special_tokens).save_pretrained(run_dir)
    log(_around(tokenizer))
    special = Counter[str]()
    texts = _counting(reader.texts(), tokenizer, special)
    lengths, origins = _write_tokens(reader, texts, tokenizer, data.max_document_tokens, partial / "tokens.bin", log)
    if not lengths:
        no = f"{len(reader.skipped)} {'is' if len(reader.skipped) == 1 else 'are'}"
        raise DataError(
            f"{settings.prefix}path {data.path!r} is empty: of {counted(len(files), 'file')} {no} not UTF-8, and the "
            f"rest holds no text of {SHORTEST} tokens or more; give text"
        )
    np.save(partial / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    np.save(partial / "origins.npy", np.array(origins, dtype=np.int32))
    manifest = _manifest(data, tokenizer, reader)
    (partial / "corpus.json").write_text(manifest.to_json(), encoding="utf-8")
    partial.rename(folder)
    if special:
        log(_special(special, data))
    return Corpus(folder)


class _Reader:
    """Texts of files in order; remembers what was read, what was not UTF-8, and what was cut or left out of texts."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files
        self.sources: list[Source] = []
        self.skipped: list[str] = []
        self.left_out = Counter[str]()  # of the fields of LeftOut

    def texts(self) -> Iterator[tuple[int, str]]:
        """(index of the source, text), file after file."""
        for name, file in self.files.items():
            raw = read_file(name, file)
            self.sources.append(describe(name, file, raw))
            try:
                for text in read_texts(name, raw):
                    yield len(self.sources) - 1, text
            except UnicodeDecodeError:
                self.skipped.append(name)


def _counting(
    texts: Iterable[tuple[int, str]], tokenizer: TextTokenizer, special: Counter[str]
) -> Iterator[tuple[int, str]]:
    """The texts, and meanwhile how often the name of each special token stands in them."""
    for origin, text in texts:
        special.update(tokenizer.count_special([text]))
        yield origin, text


def _around(tokenizer: TextTokenizer) -> str:
    opening, closing = " ".join(tokenizer.opening), " ".join(tokenizer.closing)
    parts = [f"begins with {opening}"] * bool(opening) + [f"ends with {closing}"] * bool(closing)
    if not parts:
        return "nothing is put around a text: the tokenizer names no token for its beginning or its end"
    return f"each text {' and '.join(parts)}, as the tokenizer says" if opening else f"each text {parts[0]}"


def _special(special: Counter[str], data: DataConfig) -> str:
    named = ", ".join(f"{name} ({count:,})" for name, count in special.most_common(5))
    more = f" and {len(special) - 5} others" if len(special) > 5 else ""
    times = counted(special.total(), "time")
    read = "are read as these tokens" if data.parse_special_tokens else "are read as plain text"
    hint = "data.parse_special_tokens = " + (
        "false reads plain text" if data.parse_special_tokens else "true parses them"
    )
    return f"names of special tokens stand in the texts {times}: {named}{more}; they {read} ({hint})"


def _write_tokens(
    reader: _Reader,
    texts: Iterable[tuple[int, str]],
    tokenizer: TextTokenizer,
    longest: int,
    file: Path,
    log: LogLine,
) -> tuple[list[int], list[int]]:
    """Write the ids of all documents end to end; returns each document's length and source."""
    dtype, lengths, origins = _dtype(tokenizer), list[int](), list[int]()
    with file.open("wb") as out:
        for batch in _batches(texts):
            for origin, ids in zip((o for o, _ in batch), tokenizer.encode([t for _, t in batch]), strict=True):
                for document in documents_of(ids, longest, reader.left_out):
                    out.write(document.astype(dtype).tobytes())
                    lengths.append(len(document))
                    origins.append(origin)
            files, tokens = counted(len(reader.files), "file"), counted(sum(lengths), "token")
            log(f"tokenized {len(reader.sources)} of {files}, {tokens}")
    return lengths, origins


def _batches(texts: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch, size = list[tuple[int, str]](), 0
    for origin, text in texts:
        batch.append((origin, text))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _sample(files: dict[str, Path]) -> Iterator[str]:
    """Texts to train a tokenizer on: files in a fixed shuffled order, until SAMPLE_CHARACTERS are together."""
    names, left = list(files), SAMPLE_CHARACTERS
    order = np.argsort(np.random.PCG64(0).random_raw(len(names)), kind="stable")
    reader = _Reader({names[i]: files[names[i]] for i in order})
    for _, text in reader.texts():
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _manifest(data: DataConfig, tokenizer: TextTokenizer, reader: _Reader) -> Manifest:
    return Manifest(
        path=data.path,
        max_document_tokens=data.max_document_tokens,
        tokenizer_digest=tokenizer.digest,
        tokenizer_size=tokenizer.size,
        dtype=_dtype(tokenizer),
        sources=tuple(reader.sources),
        skipped=tuple(reader.skipped),
        parse_special_tokens=data.parse_special_tokens,
        opening=tokenizer.opening,
        closing=tokenizer.closing,
        left_out=LeftOut(**reader.left_out),
    )


def _dtype(tokenizer: TextTokenizer) -> str:
    return "<u2" if tokenizer.size <= 2**16 else "<u4"


def _changes(
    old: Manifest, settings: CorpusSettings, files: dict[str, Path], tokenizer: TextTokenizer | None
) -> list[str]:
    """Why the corpus would come out differently today; nothing where it would not."""
    data, prefix, changes = settings.data, settings.prefix, list[str]()
    for key, before, now in (
        (f"{prefix}path", old.path, data.path),
        (f"{prefix}max_document_tokens", old.max_document_tokens, data.max_document_tokens),
        ("data.parse_special_tokens", old.parse_special_tokens, data.parse_special_tokens),
    ):
        if before != now:
            changes.append(f"{key} was {before!r} and is {now!r}")
    if tokenizer is not None and tokenizer.digest != old.tokenizer_digest:
        changes.append("the tokenizer is another one")
    elif tokenizer is not None and old.opening is not None:
        before, now = (*old.opening, "…", *old.closing), (*tokenizer.opening, "…", *tokenizer.closing)
        if before != now:
            changes.append(f"a text stood in {' '.join(before)} and stands in {' '.join(now)}")
    if tokenizer is None and data.vocab_size < old.tokenizer_size:
        changes.append(f"data.vocab_size is {data.vocab_size}, the tokenizer has {old.tokenizer_size} entries")
    return changes or changed_files(list(old.sources), files)


def _changed_message(run_dir: Path, changes: list[str]) -> str:
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return (
        f"the corpus of {run_dir} changed since the run began: {'; '.join(changes[:3])}{more}; "
        f"restore it, or set run.dir to a new folder"
    )
