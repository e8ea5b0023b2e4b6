"""What of the sources of a corpus is cut, or is in no document: said in lines, whenever a run starts.

Nothing here decides: files are chosen in `files.py`, texts become documents in `build.py`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longspan.errors import counted

SHORTEST = 2  # a document of one token predicts nothing


@dataclass(frozen=True)
class LeftOut:
    """What became of rows that are no document as they stand: those that were cut, and what is in no document."""

    cut_texts: int = 0
    cut_tokens: int = 0  # of these texts
    cut_documents: int = 0  # that they became
    short_texts: int = 0
    lost_tokens: int = 0  # of short texts, and of ends of cut texts
    masked_parts: int = 0  # of cut texts: documents without a target
    masked_rows: int = 0
    bad_rows: int = 0
    unseen_thoughts: int = 0  # of assistant turns, which the chat template leaves out
    unseen_texts: int = 0  # answers and tool calls, likewise
    blank_turns: int = 0  # of assistants, with neither text nor tool calls


def parts_of(
    length: int,
    codes: npt.NDArray[np.int64] | None,
    longest: int,
    counts: Counter[str],
    uncut: Sequence[tuple[int, int]] = (),
) -> list[slice]:
    """The documents that a row of so many tokens becomes: of at most `longest` tokens (0: one); counts fields of
    LeftOut. Where tokens have `codes`, a part in which none but the first is predicted is no document. Each of the
    `uncut` spans (start, stop), ascending and none longer than `longest`, stays in one part."""
    step = longest or max(length, 1)
    whole = _cut(length, step, uncut)
    parts = [part for part in whole if part.stop - part.start >= SHORTEST]
    lost = length - sum(part.stop - part.start for part in parts)
    if codes is not None:
        targets = [part for part in parts if (codes[part][1:] != 1).any()]
        counts.update(masked_parts=len(parts) - len(targets))
        parts = targets
    if length > step:
        counts.update(cut_texts=1, cut_tokens=length, cut_documents=len(parts))
    elif length < SHORTEST:
        counts.update(short_texts=1)
    counts.update(lost_tokens=lost)
    return parts


def _cut(length: int, step: int, uncut: Sequence[tuple[int, int]]) -> list[slice]:
    """Parts of at most `step` tokens; one that would end inside an uncut span ends before it."""
    parts, start = list[slice](), 0
    while start < length:
        stop = min(start + step, length)
        stop = next((a for a, b in uncut if start < a < stop < b), stop)
        parts.append(slice(start, stop))
        start = stop
    return parts


def left_out_lines(
    left_out: LeftOut,
    longest: int,
    other_kinds: Mapping[str, int],
    not_utf8: Sequence[str],
    *,
    key: str = "data.max_document_tokens",
    bad: Sequence[str] = (),
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
    if left_out.masked_parts:
        yield f"left out {counted(left_out.masked_parts, 'part')} of cut texts in which no token is a target ({key})"
    if left_out.masked_rows:
        yield f"left out {counted(left_out.masked_rows, 'row')} in which no token is a target"
    if left_out.bad_rows:
        more = f"; and {left_out.bad_rows - len(bad):,} more" if left_out.bad_rows > len(bad) else ""
        yield f'left out {counted(left_out.bad_rows, "bad row")} (data.on_bad = "skip"): {"; ".join(bad)}{more}'
    if other_kinds:
        kinds = ", ".join(f"{kind} ({count:,})" for kind, count in list(other_kinds.items())[:5])
        yield f"left out {counted(sum(other_kinds.values()), 'file')} of kinds that are not read: {kinds}"
    if not_utf8:
        yield f"left out {counted(len(not_utf8), 'file')}, not UTF-8: {', '.join(not_utf8[:5])}"
