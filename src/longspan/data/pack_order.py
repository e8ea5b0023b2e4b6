"""Steps of packs: documents end to end, cut every so many tokens, as pre-training packs them.

A step takes whole packs. A pack is one document to a planner, with attention across its documents; or each piece of a
document in it is one, with positions of its own.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from longspan.data.order.packs import Pack, Piece, pack_of
from longspan.data.order.permutation import Integers
from longspan.data.order.uncut import EqualBorders, UncutBorders, UncutSpans
from longspan.data.step_order import StepOrder


class _Pieces(NamedTuple):
    """The pieces of a step: of which document, from where to where in it, in which pack of the step."""

    documents: Integers
    starts: Integers
    stops: Integers
    packs: Integers


class PackOrder:
    """Steps of whole packs, of documents in the order of `order`.

    >>> packs = PackOrder(order, pack_to=8192, tokens_per_step=65536, across=False)
    >>> packs.lengths_of_step(0)[:3]
    [5120, 3072, 811]

    Packs are cut from the endless stream of epochs, so each has `pack_to` tokens, and the last of an epoch goes on in
    the next. `evaluation` are the documents that `order` holds out: they are not packed.

    A cut that falls into a span of `uncut` is moved back to its start, and the next pack begins there: packs have at
    most `pack_to` tokens, and fewer where a span does not fit in.
    """

    def __init__(
        self, order: StepOrder, *, pack_to: int, tokens_per_step: int, across: bool, uncut: UncutSpans | None = None
    ) -> None:
        self.stream, self.evaluation, self.version = order.stream, order.evaluation, order.version
        self._across, packs = across, max(1, tokens_per_step // pack_to)
        self._equal = [pack_to] * packs if uncut is None else None
        self._borders = (
            EqualBorders(pack_to, packs) if uncut is None else UncutBorders(order.stream, uncut, pack_to, packs)
        )

    def lengths_of_step(self, step: int) -> list[int]:
        """The tokens of each document of a step, as a planner takes them."""
        if self._across and self._equal is not None:
            return list(self._equal)
        pieces = self._pieces(step)
        lengths = pieces.stops - pieces.starts
        return (np.bincount(pieces.packs, lengths).astype(np.int64) if self._across else lengths).tolist()

    def targets_of_step(self, step: int) -> int | None:
        """None: how many tokens pieces with labels predict is known to who can read them (`Pack.targets`)."""
        return None

    def select(self, corpus: Any, step: int) -> Sequence[Pack]:
        """The documents of a step, as its plan numbers them."""
        documents, starts, stops, packs = (values.tolist() for values in self._pieces(step))
        pieces = [Piece(corpus[d], start, stop) for d, start, stop in zip(documents, starts, stops, strict=True)]
        borders = np.searchsorted(packs, np.arange(packs[-1] + 2)) if self._across else np.arange(len(pieces) + 1)
        made = tuple(pack_of(tuple(pieces[a:b])) for a, b in pairwise(borders.tolist()))
        return corpus.packs(made) if hasattr(corpus, "packs") else made

    def source_tokens(self, step: int) -> list[int]:
        """The tokens of each source in a step."""
        pieces = self._pieces(step)
        return self.stream.tokens_of_sources(pieces.documents, pieces.stops - pieces.starts)

    def steps_of_epochs(self, epochs: float) -> int:
        """The steps until every training document was trained on so many times; the last may reach into the next."""
        return self._borders.steps_to(self.stream.tokens_before(self.stream.place_after(epochs)))

    def mean_pack(self, steps: int = 64) -> float:
        """The tokens of a pack, in the mean of the first so many steps."""
        borders = self._borders.of_step(steps - 1)
        return float(borders[-1]) / (steps * (len(borders) - 1))

    def _pieces(self, step: int) -> _Pieces:
        borders = self._borders.of_step(step)
        begin, end = int(borders[0]), int(borders[-1])
        part, ids, begins = self.stream.at_token(begin), list[Integers](), list[Integers]()
        while True:
            first = max(0, int(np.searchsorted(part.ends, begin - part.before, side="right")) - 1)
            last = int(np.searchsorted(part.ends[:-1], end - part.before))
            ids.append(part.ids[first:last])
            begins.append(part.before + part.ends[first:last])
            if part.before + part.ends[-1] >= end:
                break
            part = self.stream.after(part)
        documents, begun = np.concatenate(ids), np.concatenate(begins)
        cuts = np.union1d(np.maximum(begun, borders[0]), borders[:-1])
        cuts = cuts[cuts < borders[-1]]
        of_cut = np.searchsorted(begun, cuts, side="right") - 1
        starts, stops = cuts - begun[of_cut], np.append(cuts[1:], borders[-1]) - begun[of_cut]
        return _Pieces(documents[of_cut], starts, stops, np.searchsorted(borders, cuts, side="right") - 1)
