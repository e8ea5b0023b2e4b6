"""Which documents, or packs of documents, a step trains on: a function of the seed and the step only.

World size, degrees and planner have no influence, so a resumed run goes on with the same documents. Memory does not
grow with the corpus: its lengths are mapped from their file, shuffled places are computed (`stream.py`), and only
the start of every 64th step is kept.

A pack holds documents end to end, cut every so many tokens, as in pre-training. A planner sees a pack as one document,
with attention across its documents, or each piece in it as a document with positions of its own.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
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
    shuffled_sample,
    shuffled_sources,
)
from longspan.data.uncut import EqualBorders, UncutBorders, UncutSpans
from longspan.errors import DataError, plural
from longspan.layout import Integers

_STRIDE = 64  # steps; the start of every 64th is kept


class StepOrder:
    """Shuffled epochs of whole training documents, up to `tokens_per_step` a step and at least one document.

    >>> order = StepOrder([5, 3, 9, 4, 2], tokens_per_step=8, seed=0, eval_documents=1)
    >>> order.evaluation, len(order.documents_of_step(0))
    ((3,), 1)

    `targets` are the tokens that each document predicts (None: all but its first), by which a plan counts. `texts` are
    the numbers of the texts that documents are parts of, ascending (None: each is a text). The seed chooses
    `eval_documents` texts before anything else; their documents are `evaluation`, and never trained on.
    Several sources are a `mixture`: tokens of sources are in proportion to their weights, and each source has epochs of
    its own. A step reaches into the next epoch up to a document that it has already (unless it `may_repeat` documents),
    except in a run of `epochs` (0: steps without end), which trains each document so often: its steps end where an
    epoch does. An order pickles without the arrays that are in files. Raises
    DataError if no document is left to train on.
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
        """Choose the held-out texts, and begin the stream of the other documents."""
        self.lengths, self.targets = np.asarray(lengths), targets
        all_texts = count_texts(self.lengths, texts)
        if eval_documents >= all_texts:
            raise DataError(
                f"data.eval_documents {eval_documents} leaves nothing to train on: the corpus has "
                f"{plural(all_texts, 'text')}; hold out at most {max(0, all_texts - 1)}"
            )
        held_out = np.sort(shuffled_sample(all_texts, eval_documents, seed, HELD_OUT))
        held_out = held_out if texts is None else _documents_of_texts(texts, held_out)
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
        self._clear_steps()

    def _clear_steps(self) -> None:
        self._block_starts = array("q", [0])  # starts, in the stream, of every _STRIDE-th step so far
        self._starts = lru_cache(maxsize=2)(self._compute_starts)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: without what is computed again, and without lengths, which the stream has."""
        not_pickled = ("_block_starts", "_starts", "lengths")
        state = {name: value for name, value in self.__dict__.items() if name not in not_pickled}
        return state | {"targets": None if self.targets is None else as_pickled(self.targets)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"targets": None if state["targets"] is None else from_pickled(state["targets"])}
        self.lengths = self.stream.lengths
        self._clear_steps()

    def documents_of_step(self, step: int) -> tuple[int, ...]:
        """Return the document ids of a step; steps count from 0."""
        return tuple(self._document_ids(step).tolist())

    def lengths_of_step(self, step: int) -> list[int]:
        """Return the tokens of each document of a step."""
        return self.lengths[self._document_ids(step)].tolist()

    def targets_of_step(self, step: int) -> int | None:
        """Count the tokens that the documents of a step predict; None: all but the first of each."""
        return None if self.targets is None else int(self.targets[self._document_ids(step)].sum(dtype=np.int64))

    def select(self, corpus: Corpus, step: int) -> CorpusDocuments:
        """Return the documents of a step, as its plan numbers them."""
        return corpus.select(self.documents_of_step(step))

    def source_tokens(self, step: int) -> list[int]:
        """Return the tokens of each source in a step."""
        ids = self._document_ids(step)
        return self.stream.tokens_of_sources(ids, self.lengths[ids])

    def count_steps(self) -> int:
        """Count the steps of the run's epochs.

        >>> StepOrder([4, 4, 4, 4, 4], tokens_per_step=8, seed=0, eval_documents=0, epochs=2).count_steps()
        6
        """
        place = self.ends.last
        while self._block_starts[-1] < place:  # each call computes the next block of steps
            self._starts(len(self._block_starts) - 1)
        block = bisect_left(self._block_starts, place) - 1
        return block * _STRIDE + bisect_left(self._starts(block), place)

    def begin_of_step(self, step: int) -> int:
        """Return how many documents the steps before a step take."""
        return self._bounds_of_step(step)[0]

    def _bounds_of_step(self, step: int) -> list[int]:
        block, index = divmod(step, _STRIDE)
        while len(self._block_starts) <= block:
            self._starts(len(self._block_starts) - 1)
        return self._starts(block)[index : index + 2]

    def _document_ids(self, step: int) -> Integers:
        return self._ids_between(*self._bounds_of_step(step))

    def _ids_between(self, start: int, end: int) -> Integers:
        ids = list[Integers]()
        while start < end:
            stream_part = self.stream.part_at(start)
            ids.append(stream_part.ids[start - stream_part.first : end - stream_part.first])
            start += len(ids[-1])
        return np.concatenate(ids)

    def _compute_starts(self, block: int) -> list[int]:
        """Return the places in the stream at which the steps of a block begin, and the first step after the block."""
        starts = [self._block_starts[block]]
        while len(starts) <= _STRIDE:
            starts.append(self._end_of_step(starts[-1]))
        if block == len(self._block_starts) - 1:  # else it was computed before, and dropped from the cache
            self._block_starts.append(starts[-1])
        return starts

    def _end_of_step(self, start: int) -> int:
        """`ends` of a part are the tokens before each of its documents, and before the next part. A step that reaches
        the end of a part goes on in the next with the tokens that are left.
        """
        stream_part, tokens_left = self.stream.part_at(start), self._budget
        index, last_end = start - stream_part.first, self.ends.next_end(start)
        while True:
            end_index = int(np.searchsorted(stream_part.ends, stream_part.ends[index] + tokens_left, side="right")) - 1
            end = stream_part.first + end_index
            if end_index < len(stream_part.ids) or end >= last_end:
                return self._end_without_repeats(start, min(max(end, start + 1), last_end))
            tokens_left -= int(stream_part.ends[end_index] - stream_part.ends[index])
            stream_part, index = self.stream.next_part(stream_part), 0

    def _end_without_repeats(self, start: int, end: int) -> int:
        """Return the end of a step, moved before the first document of the next epoch that the step has already."""
        rest = self.epoch - start % self.epoch  # of the epoch
        if self.may_repeat or end - start <= rest:
            return end
        ids = self._ids_between(start, end)
        repeats = np.isin(ids[rest:], ids[:rest])
        return start + rest + int(np.argmax(repeats)) if repeats.any() else end


def count_texts(lengths: Sequence[int] | npt.NDArray[Any], texts: npt.NDArray[Any] | None) -> int:
    """Count the texts of a corpus; `texts` has the number of each document's text (None: each document is one)."""
    return len(lengths) if texts is None else int(texts[-1]) + 1


def _documents_of_texts(texts: npt.NDArray[Any], numbers: Integers) -> Integers:
    numbers = numbers.astype(texts.dtype)  # another type would copy the array
    firsts, stops = (np.searchsorted(texts, numbers, side=side) for side in ("left", "right"))
    return np.concatenate([np.zeros(0, np.int64), *map(np.arange, firsts, stops)])


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

    Packs are cut from the stream of epochs, so each has `pack_to` tokens. The last one of an epoch is shorter, and the
    last one of its step; with several sources, and where a step is longer than an epoch, it continues in the next.
    `evaluation` are the documents that `order` holds out: they are not packed.

    A cut inside a span of `uncut` is moved back to its start, and the next pack begins there: packs have at most
    `pack_to` tokens, and fewer if a span does not fit.
    """

    def __init__(
        self, order: StepOrder, *, pack_to: int, tokens_per_step: int, across: bool, uncut: UncutSpans | None = None
    ) -> None:
        """Cut the stream of `order` into packs, as many a step as fit `tokens_per_step`, at least one."""
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
        """Return the tokens of what a planner sees as documents of a step: packs under `across`, else pieces."""
        if self._across:
            return np.diff(self._borders.step_borders(step)).tolist()
        pieces = self._pieces_of_step(step)
        return (pieces.stops - pieces.starts).tolist()

    def targets_of_step(self, step: int) -> int | None:
        """Return None: the targets of pieces with labels are counted when they are read (`LabelledPack.targets`)."""
        return None

    def select(self, corpus: Any, step: int) -> Sequence[Pack]:
        """Return the documents of a step, as its plan numbers them: packs under `across`, else pieces."""
        documents, starts, stops, packs = (values.tolist() for values in self._pieces_of_step(step))
        pieces = [Piece(corpus[d], start, stop) for d, start, stop in zip(documents, starts, stops, strict=True)]
        # The indices of the pieces at which a pack begins, and the end of the last one: without `across` at each piece.
        borders = np.searchsorted(packs, np.arange(packs[-1] + 2)) if self._across else np.arange(len(pieces) + 1)
        packed = tuple(make_pack(tuple(pieces[a:b])) for a, b in pairwise(borders.tolist()))
        return corpus.packs(packed) if hasattr(corpus, "packs") else packed  # a list of documents has no images

    def source_tokens(self, step: int) -> list[int]:
        """Return the tokens of each source in a step."""
        pieces = self._pieces_of_step(step)
        return self.stream.tokens_of_sources(pieces.documents, pieces.stops - pieces.starts)

    def count_steps(self) -> int:
        """Count the steps of the run's epochs."""
        return self._borders.steps_to(self.ends.last)

    def begin_of_step(self, step: int) -> int:
        """Return how many tokens the steps before a step take."""
        return int(self._borders.step_borders(step)[0])

    def _pieces_of_step(self, step: int) -> _StepPieces:
        """Cut the documents of a step at its borders, and return their pieces in order.

        Places are counted in tokens of the stream. First all parts of the stream that the step touches give their
        documents, and where these begin. A piece begins where a document or a pack begins (`cuts`), and ends at the
        next cut. Its start and stop are counted in its document.
        """
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
