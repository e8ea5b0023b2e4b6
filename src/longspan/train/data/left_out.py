"""What of the sources of a corpus is cut, or is in no document: said in lines, whenever a run starts.

Nothing here decides: files are chosen in `files.py`, texts become documents in `build.py`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from longspan.errors import counted

SHORTEST = 2  # a document of one token predicts nothing


@dataclass(frozen=True)
class LeftOut:
    """What became of texts that are no document as they stand: those that were cut, and tokens in no document."""

    cut_texts: int = 0
    cut_tokens: int = 0  # of these texts
    cut_documents: int = 0  # that they became
    short_texts: int = 0
    lost_tokens: int = 0  # of short texts, and of ends of cut texts


def documents_of(ids: np.ndarray, longest: int, counts: Counter[str]) -> list[np.ndarray]:
    """The documents that a text's ids (T,) become: of at most `longest` tokens (0: one); counts fields of LeftOut."""
    step = longest or max(len(ids), 1)
    documents = [ids[start : start + step] for start in range(0, len(ids), step)]
    documents = [document for document in documents if len(document) >= SHORTEST]
    if len(ids) > step:
        counts.update(cut_texts=1, cut_tokens=len(ids), cut_documents=len(documents))
    elif not documents:
        counts.update(short_texts=1)
    counts.update(lost_tokens=len(ids) - sum(map(len, documents)))
    return documents


def left_out_lines(
    left_out: LeftOut,
    longest: int,
    other_kinds: Mapping[str, int],
    not_utf8: tuple[str, ...],
    *,
    key: str = "data.max_document_tokens",
) -> Iterator[str]:
    """A line for each way in which something is cut or left out, with its numbers and the `key` that decides it."""
    if left_out.cut_texts:
        yield (
            f"cut {counted(left_out.cut_texts, 'text')} of {counted(left_out.cut_tokens, 'token')} into "
            f"{counted(left_out.cut_documents, 'document')} of at most {longest:,} tokens "
            f"({key}; 0 cuts none)"
        )
    if left_out.short_texts or left_out.lost_tokens:
        yield (
            f"left out {counted(left_out.short_texts, 'text')} of fewer than {SHORTEST} tokens, and ends of cut texts: "
            f"{counted(left_out.lost_tokens, 'token')} in all"
        )
    if other_kinds:
        kinds = ", ".join(f"{kind} ({count:,})" for kind, count in list(other_kinds.items())[:5])
        yield f"left out {counted(sum(other_kinds.values()), 'file')} of kinds that are not read: {kinds}"
    if not_utf8:
        yield f"left out {counted(len(not_utf8), 'file')}, not UTF-8: {', '.join(not_utf8[:5])}"
