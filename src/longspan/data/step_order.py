"""Which documents, or packs of documents, a step trains on: a function of the seed and the step only.

World size, degrees and planner have no influence, so a resumed run goes on with the same documents. A pack holds
documents end to end, cut every so many tokens; a planner sees it as one document, or each piece in it as one. Memory
does not grow with the corpus: shuffled places are computed (`stream.py`), the start of every 64th step is kept.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.data.document import Pack, Piece, make_pack
from longspan.data.documents import Corpus, CorpusDocuments
from longspan.data.manifest import as_pickled, from_pickled
from longspan.data.stream import (
    ENDLESS,
    EVAL_SET,
    HELD_OUT,
    DocumentStream,
    EpochEnds,
    Mixture,
    StreamPart,
    shuffled_sample,
    shuffled_sources,
)
from longspan.errors import DataError, plural
from longspan.layout import Integers

_STRIDE = 64  # steps; the beginning of every 64th is kept


@dataclass(frozen=True)
class UncutSpans:
    """Spans (start, stop) of documents, sorted by document and start, none in another.

    >>> UncutSpans(np.array([0, 4]), np.array([2, 0]), np.array([6, 3])).find_spans(np.array([4, 7, 0]))
    (array([0, 2]), array([0, 2]), array([3, 6]))
    """

    documents: Integers  # (n,)
    starts: Integers  # (n,)
    stops: Integers  # (n,)

    @property
    def longest(self) -> int:
        return int((self.stops - self.starts).max(initial=1))

    def find_spans(self, documents: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the spans of these documents: the index of each span's document, its start and its stop."""
        first, last = (np.searchsorted(self.documents, documents, side=side) for side in ("left", "right"))
        counts = last - first  # of spans in each document
        index = np.repeat(np.arange(len(documents)), counts)
        # Entry i of `index` is span first[d] + i, less the entries of the documents before d.
        spans = np.arange(len(index)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return index, self.starts[spans].astype(np.int64), self.stops[spans].astype(np.int64)


class EqualBorders:
    """Borders of packs of a stream, `size` tokens from one to the next; a step takes `packs` packs.

    >>> EqualBorders(8, packs=2).step_borders(1)
    array([16, 24, 32])

    No pack goes on beyond one of the `ends`: a step that reaches one has fewer packs, and a shorter last one.
    """

    def __init__(self, size: int, packs: int, ends: EpochEnds = ENDLESS) -> None:
        self._size, self._packs, self._ends = size, packs, ends

    def step_borders(self, step: int) -> Integers:
        """Return where the packs of a step begin, and where the last one ends (packs + 1,)."""
        epoch, step = divmod(step, self._steps_of(self._ends.size))
        begin = epoch * self._ends.size + step * self._packs * self._size
        return np.unique(np.minimum(begin + np.arange(self._packs + 1) * self._size, self._ends.next_end(begin)))

    def steps_to(self, token: int) -> int:
        """Return how many steps take the first `token` tokens of the stream."""
        epochs, tokens = divmod(token, self._ends.size)
        return epochs * self._steps_of(self._ends.size) + self._steps_of(tokens)

    def _steps_of(self, tokens: int) -> int:
        return -(-tokens // (self._packs * self._size))


class StepBegins:
    """Where steps begin, each of them where the one before ends: only the beginning of every 64th step is kept.

    `borders_from(begin)` gives the borders after the beginning of a step, the last of which is its end.
    """

    def __init__(self, borders_from: Callable[[int], Iterable[int]]) -> None:
        self._borders_from, self._begins = borders_from, array("q", [0])
        self._block = lru_cache(maxsize=2)(self._compute_block)

    def borders_of(self, step: int) -> list[int]:
        """Return the borders of a step, from its beginning to its end."""
        block, index = divmod(step, _STRIDE)
        while len(self._begins) <= block:  # each call computes the next 64 steps, and where the step after them begins
            self._block(len(self._begins) - 1)
        return self._block(block)[index]

    def count_to(self, place: int) -> int:
        """Count the steps that begin before a place."""
        while self._begins[-1] < place:
            self._block(len(self._begins) - 1)
        block = max(0, bisect_left(self._begins, place) - 1)
        return block * _STRIDE + bisect_left(self._block(block), place, key=lambda borders: borders[0])

    def _compute_block(self, block: int) -> list[list[int]]:
        begin, steps = self._begins[block], list[list[int]]()
        for _ in range(_STRIDE):
            steps.append([begin, *self._borders_from(begin)])
            begin = steps[-1][-1]
        if block == len(self._begins) - 1:  # else it was computed before, and dropped from the cache
            self._begins.append(begin)
        return steps


class UncutBorders:
    """Borders of packs of a stream, at most `size` tokens apart and never inside a span, none of which is longer.

    A border inside a span is moved back to the span's start, and the next pack begins there. So the beginning of a step
    depends on all steps before it: borders are computed in order, and the beginning of every 64th step is kept.
    """

    def __init__(
        self, stream: DocumentStream, spans: UncutSpans, size: int, packs: int, ends: EpochEnds = ENDLESS
    ) -> None:
        self._stream, self._spans, self._size, self._packs, self._ends = stream, spans, size, packs, ends
        self._steps = StepBegins(self._borders_from)
        self._part_spans = lru_cache(maxsize=2)(self._find_spans)

    def __reduce__(self) -> tuple[Any, ...]:
        return UncutBorders, (self._stream, self._spans, self._size, self._packs, self._ends)

    def step_borders(self, step: int) -> Integers:
        return np.unique(self._steps.borders_of(step))

    def steps_to(self, token: int) -> int:
        return self._steps.count_to(token)

    def _borders_from(self, border: int) -> Iterator[int]:
        """A step that reaches the end of an epoch has the same border for all packs that it lacks."""
        stream_part, end = self._stream.part_at_token(border), self._ends.next_end(border)
        for _ in range(self._packs):
            border = min(border + self._size, end)
            while border >= stream_part.before + stream_part.ends[-1]:
                stream_part = self._stream.next_part(stream_part)
            starts, stops = self._part_spans(stream_part.first)
            span = bisect_right(starts, border) - 1
            if span >= 0 and border < stops[span]:
                border = starts[span]
            yield border

    def _find_spans(self, first: int) -> tuple[list[int], list[int]]:
        """In tokens of the stream, of the part whose first place is `first`; a part's `ends` start with 0."""
        stream_part: StreamPart = self._stream.part_at(first)
        index, starts, stops = self._spans.find_spans(stream_part.ids)
        begins = stream_part.before + stream_part.ends[index]
        return (begins + starts).tolist(), (begins + stops).tolist()


class StepOrder:
    """Shuffled epochs of whole training documents, up to `tokens_per_step` a step and at least one document.

    >>> order = StepOrder([5, 3, 9, 4, 2], tokens_per_step=8, seed=0, eval_documents=1)
    >>> order.evaluation, len(order.documents_of_step(0))
    ((3,), 1)

    `targets` are the tokens that each document predicts (None: all but its first), `texts` the numbers of the texts
    that documents are parts of (None: each is one). The seed chooses `eval_documents` texts before anything else; they
    are `evaluation`. Sources of a `mixture` give tokens by their weights, each in epochs of its own. A step reaches
    into the next epoch up to a document that it has already (unless it `may_repeat` documents), except in a run of
    `epochs` (0: without end), where steps end with the epoch. Raises DataError if no document is left to train on.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any],
        *,
        tokens_per_step: int,
        seed: int,
        eval_documents: int,
        targets: npt.NDArray[Any] | None = None,
        mixture: Mixture | None = None,
        texts: npt.NDArray[Any] | None = None,
        epochs: float = 0.0,
    ) -> None:
        self.lengths, self.targets = np.asarray(lengths), targets
        all_texts = count_texts(self.lengths, texts)
        if eval_documents >= all_texts:
            raise DataError(
                f"data.eval_documents {eval_documents} leaves nothing to train on: the corpus has "
                f"{plural(all_texts, 'text')}; hold out at most {max(0, all_texts - 1)}"
            )
        held_out = np.sort(shuffled_sample(all_texts, eval_documents, seed, HELD_OUT))
        if texts is not None:  # then the documents of these texts
            numbers = held_out.astype(texts.dtype)  # another type would copy the array
            firsts, stops = (np.searchsorted(texts, numbers, side=side) for side in ("left", "right"))
            held_out = np.concatenate([np.zeros(0, np.int64), *map(np.arange, firsts, stops)])
        self.evaluation: tuple[int, ...] = tuple(held_out.tolist())
        self.texts, self.held_out_texts = all_texts - eval_documents, eval_documents
        self.stream: DocumentStream = DocumentStream(
            self.lengths, shuffled_sources(self.lengths, mixture, held_out, seed)
        )
        self._budget, self.epoch = tokens_per_step, self.stream.documents
        self.may_repeat: bool = len(self.stream.sources) > 1 or tokens_per_step > self.stream.tokens
        self.ends: EpochEnds = ENDLESS
        if epochs:
            self.ends = EpochEnds(self.stream.documents, self.stream.place_after(epochs))
        self._steps = StepBegins(self._end_of_step)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is computed again, and without lengths, which the stream has."""
        not_pickled = ("_steps", "lengths")
        state = {name: value for name, value in self.__dict__.items() if name not in not_pickled}
        return state | {"targets": None if self.targets is None else as_pickled(self.targets)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"targets": None if state["targets"] is None else from_pickled(state["targets"])}
        self.lengths = self.stream.lengths
        self._steps = StepBegins(self._end_of_step)

    def documents_of_step(self, step: int) -> tuple[int, ...]:
        return tuple(self._document_ids(step).tolist())

    def lengths_of_step(self, step: int) -> list[int]:
        return self.lengths[self._document_ids(step)].tolist()

    def targets_of_step(self, step: int) -> int | None:
        """Count the tokens that the documents of a step predict; None: all but the first of each."""
        return None if self.targets is None else int(self.targets[self._document_ids(step)].sum(dtype=np.int64))

    def select(self, corpus: Corpus, step: int) -> CorpusDocuments:
        return corpus.select(self.documents_of_step(step))

    def source_tokens(self, step: int) -> list[int]:
        ids = self._document_ids(step)
        return self.stream.tokens_of_sources(ids, self.lengths[ids])

    def count_steps(self) -> int:
        """Count the steps of the run's epochs.

        >>> StepOrder([4, 4, 4, 4, 4], tokens_per_step=8, seed=0, eval_documents=0, epochs=2).count_steps()
        6
        """
        return self._steps.count_to(self.ends.last)

    def begin_of_step(self, step: int) -> int:
        """Return how many documents the steps before a step take."""
        return self._steps.borders_of(step)[0]

    def _document_ids(self, step: int) -> Integers:
        return self._ids_between(*self._steps.borders_of(step))

    def _ids_between(self, start: int, end: int) -> Integers:
        ids = list[Integers]()
        while start < end:
            stream_part = self.stream.part_at(start)
            ids.append(stream_part.ids[start - stream_part.first : end - stream_part.first])
            start += len(ids[-1])
        return np.concatenate(ids)

    def _end_of_step(self, start: int) -> tuple[int]:
        """A step that reaches the end of a part goes on in the next with the tokens that are left."""
        stream_part, tokens_left = self.stream.part_at(start), self._budget
        index, last_end = start - stream_part.first, self.ends.next_end(start)
        while True:
            end_index = int(np.searchsorted(stream_part.ends, stream_part.ends[index] + tokens_left, side="right")) - 1
            end = stream_part.first + end_index
            if end_index < len(stream_part.ids) or end >= last_end:
                return (self._end_without_repeats(start, min(max(end, start + 1), last_end)),)
            tokens_left -= int(stream_part.ends[end_index] - stream_part.ends[index])
            stream_part, index = self.stream.next_part(stream_part), 0

    def _end_without_repeats(self, start: int, end: int) -> int:
        """Before the first document of the next epoch that the step has already."""
        rest = self.epoch - start % self.epoch  # of the epoch
        if self.may_repeat or end - start <= rest:
            return end
        ids = self._ids_between(start, end)
        repeats = np.isin(ids[rest:], ids[:rest])
        return start + rest + int(np.argmax(repeats)) if repeats.any() else end


def count_texts(lengths: Sequence[int] | npt.NDArray[Any], texts: npt.NDArray[Any] | None) -> int:
    return len(lengths) if texts is None else int(texts[-1]) + 1


def sample_documents(count: int, most: int, seed: int) -> tuple[int, ...]:
    """Choose at most `most` of `count` documents by the seed, in ascending order; 0: all of them.

    >>> sample_documents(5, 0, seed=0), len(sample_documents(5, 2, seed=0))
    ((0, 1, 2, 3, 4), 2)
    """
    if not 0 < most < count:
        return tuple(range(count))
    return tuple(np.sort(shuffled_sample(count, most, seed, EVAL_SET)).tolist())


class _StepPieces(NamedTuple):
    """The pieces of a step: the document of each, its start and stop in it, and its pack in the step."""

    documents: Integers
    starts: Integers
    stops: Integers
    packs: Integers


class PackOrder:
    """Steps of whole packs of documents, in the order of `order`; `across`: a plan sees a pack as one document.

    >>> packs = PackOrder(order, pack_to=8192, tokens_per_step=65536, across=False)
    >>> packs.lengths_of_step(0)[:3]
    [5120, 3072, 811]

    Packs are cut from the stream of epochs, so each has `pack_to` tokens; the last of an epoch and of its step is
    shorter, unless steps go on in the next epoch. A cut inside a span of `uncut` is moved back to its start. Held-out
    documents are not packed.
    """

    def __init__(
        self, order: StepOrder, *, pack_to: int, tokens_per_step: int, across: bool, uncut: UncutSpans | None = None
    ) -> None:
        self.stream: DocumentStream = order.stream
        self.evaluation: tuple[int, ...] = order.evaluation
        self.texts, self.held_out_texts = order.texts, order.held_out_texts
        self._across, packs, self.ends = across, max(1, tokens_per_step // pack_to), ENDLESS
        self.epoch, self.may_repeat = self.stream.tokens, order.may_repeat
        if order.ends != ENDLESS:
            self.ends = EpochEnds(self.stream.tokens, self.stream.tokens_before(order.ends.last))
        elif not order.may_repeat:
            self.ends = ENDLESS._replace(size=self.stream.tokens)
        self._borders = (
            EqualBorders(pack_to, packs, self.ends)
            if uncut is None
            else UncutBorders(order.stream, uncut, pack_to, packs, self.ends)
        )

    def lengths_of_step(self, step: int) -> list[int]:
        if self._across:
            return np.diff(self._borders.step_borders(step)).tolist()
        pieces = self._pieces_of_step(step)
        return (pieces.stops - pieces.starts).tolist()

    def targets_of_step(self, step: int) -> int | None:
        """None: the targets of pieces with labels are counted when they are read (`LabelledPack.targets`)."""
        return None

    def select(self, corpus: Any, step: int) -> Sequence[Pack]:
        documents, starts, stops, packs = (values.tolist() for values in self._pieces_of_step(step))
        pieces = [Piece(corpus[d], start, stop) for d, start, stop in zip(documents, starts, stops, strict=True)]
        # The indices of the pieces at which a pack begins, and the end of the last one: without `across` at each piece.
        borders = np.searchsorted(packs, np.arange(packs[-1] + 2)) if self._across else np.arange(len(pieces) + 1)
        packed = tuple(make_pack(tuple(pieces[a:b])) for a, b in pairwise(borders.tolist()))
        return corpus.packs(packed) if hasattr(corpus, "packs") else packed  # a list of documents has no images

    def source_tokens(self, step: int) -> list[int]:
        pieces = self._pieces_of_step(step)
        return self.stream.tokens_of_sources(pieces.documents, pieces.stops - pieces.starts)

    def count_steps(self) -> int:
        return self._borders.steps_to(self.ends.last)

    def begin_of_step(self, step: int) -> int:
        """Return how many tokens the steps before a step take."""
        return int(self._borders.step_borders(step)[0])

    def _pieces_of_step(self, step: int) -> _StepPieces:
        """A piece begins where a document or a pack does (`cuts`); a place is a token of the stream."""
        borders = self._borders.step_borders(step)
        begin, end = int(borders[0]), int(borders[-1])
        stream_part, ids, begins = self.stream.part_at_token(begin), list[Integers](), list[Integers]()
        while True:
            first = max(0, int(np.searchsorted(stream_part.ends, begin - stream_part.before, side="right")) - 1)
            last = int(np.searchsorted(stream_part.ends[:-1], end - stream_part.before))
            ids.append(stream_part.ids[first:last])
            begins.append(stream_part.before + stream_part.ends[first:last])
            if stream_part.before + stream_part.ends[-1] >= end:
                break
            stream_part = self.stream.next_part(stream_part)
        documents, document_begins = np.concatenate(ids), np.concatenate(begins)
        cuts = np.union1d(np.maximum(document_begins, borders[0]), borders[:-1])
        cuts = cuts[cuts < borders[-1]]
        index = np.searchsorted(document_begins, cuts, side="right") - 1  # of the document of each piece
        starts, stops = cuts - document_begins[index], np.append(cuts[1:], borders[-1]) - document_begins[index]
        return _StepPieces(documents[index], starts, stops, np.searchsorted(borders, cuts, side="right") - 1)
