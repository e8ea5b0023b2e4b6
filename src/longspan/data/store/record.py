"""What a run keeps of its corpus, in RUN/corpus/corpus.json: where its documents lie, and what was asked for."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longspan.data.store.manifest import Manifest, SourceLines
from longspan.data.store.sources import Source

FILE = "corpus.json"


@dataclass(frozen=True)
class Record:
    """The documents of a corpus of a run.

    `documents` is their folder (relative ones begin at the record's), `key` what they must be, `asked` the keys of the
    configuration that decide it, and `tokenizer` the folder of the run's tokenizer. `row_settings` are those of
    RowSettings. Of an older version's corpus, which lies beside its record, the files that it was made of are `old`.
    """

    documents: str
    key: str
    asked: dict[str, Any]
    tokenizer_digest: str
    tokenizer_size: int
    around: tuple[str, ...] | None  # the tokens before and behind a text
    tokenizer: str = ".."
    row_settings: dict[str, Any] = field(default_factory=dict[str, Any])
    old: tuple[Source, ...] = ()

    def sources(self, folder: Path) -> Sequence[Source] | None:
        """The files that it was made of; None where its documents are gone."""
        if self.old:
            return self.old
        try:
            return SourceLines(folder / self.documents)
        except (OSError, ValueError):
            return None

    def to_json(self) -> str:
        """The record as JSON; `read_record` gives an equal one back."""
        values = asdict(self)
        del values["old"]
        return json.dumps(values, indent=1)


def read_record(folder: Path) -> Record | None:
    """The record of a folder; None where there is none that can be read."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
        values: dict[str, Any] = json.loads(text)
        if "sources" in values:
            return _of_older_version(values, Manifest.from_json(text))
        return Record(**{**values, "around": tuple(values["around"])})
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _of_older_version(values: dict[str, Any], manifest: Manifest) -> Record:
    settings = {
        "path": values["path"],
        "max_document_tokens": manifest.max_document_tokens,
        "parse_special_tokens": manifest.parse_special_tokens,
    }
    around = None if manifest.opening is None else (*manifest.opening, "…", *manifest.closing)
    old = tuple(Source(**source) for source in values["sources"])
    return Record(".", "", settings, manifest.tokenizer_digest, manifest.tokenizer_size, around, old=old)
