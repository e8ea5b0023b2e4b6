"""All that decides the documents of a corpus: what is encoded, how, and by how many processes."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from longspan.corpus.store.document_encoder import DocumentEncoder
from longspan.data.store.sources import CorpusFile, Source
from longspan.launch.launch import usable_cores

if TYPE_CHECKING:
    from longspan.corpus.rows.encoding import RowEncoding

VERSION = 2  # of what the same recipe makes
_IN_PROCESS_BYTES = {"text": 32 << 20, "input_ids": 32 << 20}  # corpora that one process encodes; 4 MiB of other kinds
_WITH_PIXELS_BYTES = 1 << 18  # likewise, where each row names images that are decoded


@dataclass(frozen=True)
class Recipe:
    """All that decides the documents of a corpus, and how they are made: with `stored` tokens, by so many `workers`.

    `sources` are what `files` hold, `encodings` how rows of each source become tokens, `longest` the most tokens of a
    document (0: any); with `skip_bad` a bad row is left out. `path` names the corpus in messages.
    """

    path: str
    files: Sequence[CorpusFile]
    sources: Sequence[Source]
    encodings: "tuple[RowEncoding, ...]"
    longest: int
    skip_bad: bool = False
    workers: int = 0
    stored: bool = True

    @cached_property
    def key(self) -> str:
        """SHA-256 of everything that decides the documents: equal recipes have equal keys, wherever their files lie."""
        digests = [encoding.digest for encoding in self.encodings]
        checked = ["pixels"] * self.checks_pixels
        digest = hashlib.sha256(json.dumps([VERSION, digests, self.longest, self.skip_bad, *checked]).encode())
        for file, source in zip(self.files, self.sources, strict=True):
            digest.update(f"{file.source} {source.sha256} {source.name}\n".encode())
            if self.images:  # paths of images begin there
                digest.update(f"{file.path.absolute().parent}\n".encode())
        return digest.hexdigest()

    @property
    def images(self) -> bool:
        """Whether rows may have images."""
        return any(encoding.images is not None for encoding in self.encodings)

    @property
    def checks_pixels(self) -> bool:
        """Whether images are decoded."""
        return self.images and any(encoding.check_pixels for encoding in self.encodings)

    @property
    def encoder(self) -> DocumentEncoder:
        """What encodes rows, in any process."""
        small = all(e.kind != "input_ids" and e.tokenizer.size <= 1 << 16 for e in self.encodings)
        return DocumentEncoder(self.encodings, self.longest, "<u2" if small and self.stored else "<u4", self.skip_bad)

    @property
    def processes(self) -> int:
        """How many processes encode: one where it is done before others have started."""
        size = sum(source.bytes for source in self.sources)
        small = min(_IN_PROCESS_BYTES.get(encoding.kind, 4 << 20) for encoding in self.encodings)
        small = min(small, _WITH_PIXELS_BYTES) if self.checks_pixels else small
        return 1 if size <= small else self.workers or usable_cores()
