"""The settings of a corpus: keys of [data] or of an evaluation set, the recipe that follows, and lines about both."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from longspan.config.sections import DataConfig
from longspan.corpus.files import STDLIB, CorpusFile, SourceFile, files_of_other_kinds, find_files, kind_of_files
from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.rows.lines import left_out_lines, missing_end_line, names_line, others_line, rows_line, unseen_line
from longspan.corpus.rows.sample import RowSettings
from longspan.corpus.store.builder import Recipe, cache_folder
from longspan.corpus.tokenizer import TextTokenizer
from longspan.data.manifest import Manifest

# Keys of [data] that decide documents, with the paths and RowSettings.
_DECIDING = ("max_document_tokens", "on_bad", "max_text_bytes")


@dataclass(frozen=True)
class CorpusSettings:
    """The settings of a corpus of a run: keys of [data], or those of an evaluation set.

    `folder`, in the run's folder, is where the corpus is recorded. `prefix` is the table of the keys `path` and
    `max_document_tokens` in messages, which an evaluation set has for itself.
    """

    data: DataConfig
    folder: str = "corpus"
    prefix: str = "data."

    def paths(self) -> tuple[tuple[str, str], ...]:
        """Return the key and the path of each source; without any, the standard library is the only one."""
        if not self.data.sources:
            return ((f"{self.prefix}path", self.data.path or STDLIB),)
        return tuple((f"data.sources[{i}].path", source.path) for i, source in enumerate(self.data.sources))

    def files(self, run_dir: Path) -> tuple[CorpusFile, ...]:
        """Find the source files in order, without those in the run's folder and in the cache.

        With data.sources, the name of a file in a source's folder begins with the name of that folder. Raises DataError
        for a source without files.
        """
        leave_out = (run_dir, cache_folder(self.data.cache))
        files = list[CorpusFile]()
        for number, (key, path) in enumerate(self.paths()):
            folder = f"{Path(path).name}/" if self.data.sources and not Path(path).is_file() else ""
            by_name = find_files(path, leave_out=leave_out, key=key)
            files += (CorpusFile(number, folder + name, file) for name, file in by_name.items())
        return tuple(files)

    def deciding_values(self) -> dict[str, Any]:
        """Return the settings that decide the documents, by key, as values that JSON can hold."""
        values = {name: getattr(self.data, name) for name in _DECIDING} | self.row_settings().deciding_values
        values |= {"chat_template": self.data.chat_template} if self.data.chat_template else {}
        paths = [path for _, path in self.paths()]
        return ({"sources": paths} if self.data.sources else {"path": self.data.path}) | values

    def row_settings(self) -> RowSettings:
        """Return the settings by which rows become tokens."""
        return RowSettings(**{field.name: getattr(self.data, field.name) for field in fields(RowSettings)})

    def other_kinds(self, run_dir: Path) -> dict[str, int]:
        """Count the files of all sources that are of kinds not read, by the endings of their names.

        Those in the run's folder do not count.
        """
        counts = Counter[str]()
        for _, path in self.paths():
            counts.update(files_of_other_kinds(path, leave_out=(run_dir,)))
        return dict(counts.most_common())


def describe_left_out(settings: CorpusSettings, run_dir: Path, manifest: Manifest, *, key: str) -> Iterator[str]:
    """Yield lines about what is cut or left out; `key` names the setting of the longest document, which cuts texts."""
    other_kinds, most_tokens = settings.other_kinds(run_dir), settings.data.max_document_tokens
    yield from left_out_lines(manifest.left_out, most_tokens, other_kinds, manifest.skipped, key=key, bad=manifest.bad)
    yield from (names_line(name, texts) for name, texts in manifest.names_as_text.items())
    if (unseen := unseen_line(manifest.left_out, settings.data.turns)) is not None:
        yield unseen
    if manifest.unseen:
        yield others_line(manifest.unseen)


def describe_rows(settings: CorpusSettings, recipe: Recipe) -> Iterator[str]:
    """Yield a line about the rows and tokens of each source, and another if the last turn of chats has no end."""
    for (key, _), encoding in zip(settings.paths(), recipe.encodings, strict=True):
        source_text = f"{key}: " if settings.data.sources else ""
        yield source_text + rows_line(encoding)
        if (line := missing_end_line(encoding)) is not None:
            yield source_text + line


def make_recipe(
    settings: CorpusSettings, files: Sequence[CorpusFile], sources: Sequence[SourceFile], tokenizer: TextTokenizer
) -> Recipe:
    """Make the recipe of the documents of these files. Raises DataError for different kinds of rows in one source."""
    data, encodings = settings.data, list[RowEncoding]()
    for number, _ in enumerate(settings.paths()):
        source_files = [file for file in files if file.source == number]
        kind = kind_of_files(
            source_files, skip_bad=data.on_bad == "skip", most_bytes=data.max_text_bytes, columns=data.columns
        )
        encodings.append(RowEncoding(kind, tokenizer, settings.row_settings()))
    return Recipe(
        path=" and ".join(f"{key} {path!r}" for key, path in settings.paths()),
        files=files,
        sources=sources,
        encodings=tuple(encodings),
        longest=data.max_document_tokens,
        skip_bad=data.on_bad == "skip",
        most_bytes=data.max_text_bytes,
    )
