"""Which documents a step trains on: a function of the seed and the step only.

World size, degrees and planner have no influence, so a resumed run goes on with the same documents. Memory does not
grow with the corpus: shuffled places are computed (`stream.py`), and of a step its beginning is kept.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.data.array_files import pickle_form, restored_array
from longspan.data.corpus_documents import Corpus, CorpusDocuments
from longspan.data.shuffle import shuffled_sample
from longspan.data.stream import EVAL_SET, HELD_OUT, DocumentStream, Mixture, shuffled_sources
from longspan.errors import DataError, plural
from longspan.layout import Integers
from longspan.plan.shape.positions import LengthLimit

_MOST_COUNTED = 256  # steps whose documents are looked at to tell how full steps are


class StepOrder:
    """Shuffled epochs of whole training documents, up to `tokens_per_step` a step and at least one document.

    >>> order = StepOrder([5, 3, 9, 4, 2], tokens_per_step=8, seed=0, eval_documents=1)
    >>> order.evaluation, len(order.documents_of_step(0))
    ((3,), 1)

    `targets` are the tokens that each document predicts (None: all but its first), `texts` the numbers of the texts
    that documents are parts of (None: each is one). The seed chooses `eval_documents` texts before anything else; they
    are `evaluation`. Sources of a `mixture` hold out at least one each, and give tokens by their weights, in epochs of
    their own. A step reaches into the next epoch up to a document that it has already (unless it `may_repeat`
    documents), except in a run of `epochs` of one source, where steps end with the epoch. Each `unit` documents that
    follow each other, as a pair, are one here, and stay together; so do those that `group` puts together, of the
    documents to train on. Documents of the corpus `sharing` (None: of none) share prefixes, if their rotary
    frequencies, which change at `length_limits`, are the same. Raises DataError if no document is left to train on.
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
        unit: int = 1,
        group: Callable[[Integers], Sequence[Integers]] | None = None,
        sharing: Corpus | None = None,
        length_limits: tuple[LengthLimit, ...] = (),
    ) -> None:
        self.lengths: npt.NDArray[Any] = np.asarray(lengths)
        self.targets = targets
        self.unit = unit
        unit_lengths = self.lengths
        if unit > 1:  # `texts` and `mixture` are of units from here on
            unit_lengths = self.lengths.reshape(-1, unit).sum(1)
            texts = None if texts is None else texts[::unit]
            mixture = None if mixture is None else mixture._replace(source_of=mixture.source_of[::unit])
        all_texts = count_texts(unit_lengths, texts)
        held_out_texts = choose_held_out_texts(all_texts, mixture, texts, eval_documents, seed)
        held_out_units = held_out_texts  # where each unit is a text
        if texts is not None:  # sorted, as `texts` ascends
            # Numbers of another type would copy the array.
            numbers = held_out_texts.astype(texts.dtype)
            firsts, stops = (np.searchsorted(texts, numbers, side=side) for side in ("left", "right"))
            held_out_units = np.concatenate([np.zeros(0, np.int64), *map(np.arange, firsts, stops)])
        self.evaluation: tuple[int, ...] = documents_of_units(held_out_units.tolist(), unit)
        self.groups: Sequence[Integers] | None = None  # the documents of each element of the stream
        stream_lengths = unit_lengths
        # These are numbers of elements of the stream.
        left_out = held_out_units
        if group is not None:  # the stream is one of groups, which have no held-out documents
            self.groups = groups = group(np.setdiff1d(np.arange(len(unit_lengths)), held_out_units))
            stream_lengths = np.array([unit_lengths[documents].sum() for documents in groups])
            left_out = held_out_units[:0]
            if mixture is not None:
                mixture = mixture._replace(source_of=mixture.source_of[[documents[0] for documents in groups]])
        self.training_texts: int = all_texts - len(held_out_texts)
        self.held_out_texts: int = len(held_out_texts)
        self.stream: DocumentStream = DocumentStream(
            stream_lengths, shuffled_sources(stream_lengths, mixture, left_out, seed)
        )
        self._budget = tokens_per_step
        self.epoch_documents: int = self.stream.documents
        self.may_repeat: bool = len(self.stream.sources) > 1 or tokens_per_step > self.stream.tokens
        counted = mixture.counted if mixture else 0
        self._last = self.stream.place_after(epochs, counted) if epochs else 0
        self._ends_with_epochs = bool(epochs) and len(self.stream.sources) == 1
        # Steps begin at these places, as far as they are known.
        self._begins = array("q", [0])
        self.sharing: Corpus | None = sharing
        self.length_limits: tuple[LengthLimit, ...] = length_limits

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle, without what is computed again; arrays that the stream has too are pickled once."""
        state = {name: value for name, value in self.__dict__.items() if name != "_begins"}
        other_units = self.unit > 1 or self.groups is not None
        state["lengths"] = pickle_form(self.lengths) if other_units else None  # else the stream has them
        return state | {"targets": None if self.targets is None else pickle_form(self.targets)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned; begins of steps are found again."""
        self.__dict__ |= state | {"targets": None if state["targets"] is None else restored_array(state["targets"])}
        self.lengths = self.stream.lengths if state["lengths"] is None else restored_array(state["lengths"])
        self._begins = array("q", [0])

    def documents_of_step(self, step: int) -> tuple[int, ...]:
        """Return the documents of a step, counted from 0, in the order in which they are taken."""
        units = self._units_of_step(step)
        if self.groups is not None:
            return tuple(np.concatenate([self.groups[unit] for unit in units]).tolist())
        return documents_of_units(units.tolist(), self.unit)

    def lengths_of_step(self, step: int) -> list[int]:
        """Return the tokens of each document of a step."""
        return self.lengths[[*self.documents_of_step(step)]].tolist()

    def targets_of_step(self, step: int) -> int | None:
        """Count the tokens that the documents of a step predict; None: all but the first of each."""
        return (
            None if self.targets is None else int(self.targets[[*self.documents_of_step(step)]].sum(dtype=np.int64))
        )

    def select(self, corpus: Corpus, step: int) -> CorpusDocuments:
        """Return the documents of a step from the corpus that this is the order of."""
        return corpus.select(self.documents_of_step(step))

    def documents_to_share(self, step: int) -> CorpusDocuments | None:
        """Return the documents of a step whose common prefixes may be computed once; None: each is computed whole."""
        return None if self.sharing is None else self.select(self.sharing, step)

    def tokens_of_step_by_source(self, step: int) -> list[int]:
        """Return, in the order of the mixture's sources, the tokens that a step (from 0) takes of each."""
        ids = self._units_of_step(step)
        sources = self.stream.sources
        source_of = np.searchsorted([source.first for source in sources], ids, side="right") - 1
        tokens = np.bincount(source_of, weights=self.stream.lengths[ids], minlength=len(sources))
        return tokens.astype(np.int64).tolist()

    def count_steps(self) -> int:
        """Count the steps of the run's epochs, of several sources up to the step that ends those of the counted one.

        >>> StepOrder([4, 4, 4, 4, 4], tokens_per_step=8, seed=0, eval_documents=0, epochs=2).count_steps()
        6
        """
        while self._begins[-1] < self._last:
            self._begins.append(self._end_of_step(self._begins[-1]))
        return bisect_left(self._begins, self._last)

    def step_tokens(self, steps: int) -> float:
        """Return how many tokens a step of a run of `steps` reads, on average: of at most the first _MOST_COUNTED."""
        counted = max(1, min(steps, _MOST_COUNTED))
        ids = self._ids_between(0, self.begin_of_step(counted))
        return float(self.stream.lengths[ids].sum(dtype=np.int64)) / counted

    def begin_of_step(self, step: int) -> int:
        """Return how many documents, or units, the steps before a step take."""
        while len(self._begins) <= step:
            self._begins.append(self._end_of_step(self._begins[-1]))
        return self._begins[step]

    def _units_of_step(self, step: int) -> Integers:
        """Units are documents where `unit` is 1 and nothing is grouped."""
        return self._ids_between(self.begin_of_step(step), self.begin_of_step(step + 1))

    def _ids_between(self, start: int, end: int) -> Integers:
        ids = list[Integers]()
        while start < end:
            stream_part = self.stream.part_at(start)
            ids.append(stream_part.ids[start - stream_part.first : end - stream_part.first])
            start += len(ids[-1])
        return np.concatenate(ids)

    def _end_of_step(self, start: int) -> int:
        """A step that reaches the end of a part of the stream goes on in the next with the tokens that are left. It
        ends with the epoch, or before the first document that it has already."""
        stream_part = self.stream.part_at(start)
        tokens_left = self._budget
        index = start - stream_part.first
        last_end = 1 << 62  # the latest place that a step may end at: the stream has no end
        if self._ends_with_epochs:  # the end of this epoch, or of the run
            last_end = (start // self.epoch_documents + 1) * self.epoch_documents
            last_end = min(last_end, self._last) if start < self._last else last_end
        while True:
            end_index = (
                int(np.searchsorted(stream_part.ends, stream_part.ends[index] + tokens_left, side="right")) - 1
            )
            end = stream_part.first + end_index
            if end_index < len(stream_part.ids) or end >= last_end:
                break
            tokens_left -= int(stream_part.ends[end_index] - stream_part.ends[index])
            stream_part = self.stream.next_part(stream_part)
            index = 0
        # A step has at least one document.
        end = min(max(end, start + 1), last_end)
        # Documents behind the rest of this epoch may repeat.
        rest = self.epoch_documents - start % self.epoch_documents
        if self.may_repeat or end - start <= rest:
            return end
        ids = self._ids_between(start, end)
        repeats = np.isin(ids[rest:], ids[:rest])
        return start + rest + int(np.argmax(repeats)) if repeats.any() else end


def documents_of_units(units: Iterable[int], unit: int) -> tuple[int, ...]:
    """List the documents of these units, unit after unit; each has `unit` of them.

    >>> documents_of_units((3, 0), 2)
    (6, 7, 0, 1)
    """
    return tuple(unit * number + i for number in units for i in range(unit))


def count_texts(lengths: Sequence[int] | npt.NDArray[Any], texts: npt.NDArray[Any] | None, unit: int = 1) -> int:
    """Count the texts of documents: `texts` has the number of each one's, ascending from 0 (None: each unit is one)."""
    return len(lengths) // unit if texts is None else int(texts[-1]) + 1


def choose_held_out_texts(
    all_texts: int, mixture: Mixture | None, texts: npt.NDArray[Any] | None, most: int, seed: int
) -> Integers:
    """Choose `most` texts to hold out by the seed, sorted; `texts` has the text of each document (None: its own).

    >>> choose_held_out_texts(53, Mixture(np.repeat([0, 1], [50, 3]), (1.0, 1.0)), None, 9, 0)[-2:] >= 50
    array([False,  True])

    Of several sources each gives in proportion to its number of texts, at least one but not its last. Raises DataError
    if no text is left to train on.
    """
    if most >= all_texts:
        raise DataError(
            f"evaluation.documents {most} leaves nothing to train on: the corpus has "
            f"{plural(all_texts, 'text')}; hold out at most {max(0, all_texts - 1)}"
        )
    if mixture is None:
        return np.sort(shuffled_sample(all_texts, most, seed, HELD_OUT))
    bounds = np.searchsorted(mixture.source_of, np.arange(len(mixture.weights) + 1, dtype=mixture.source_of.dtype))
    if texts is not None:
        bounds = [int(texts[bound]) if bound < len(texts) else int(texts[-1]) + 1 for bound in bounds]
    counts: list[int] = np.diff(bounds).tolist()
    quotas = [min(1, most, max(count - 1, 0)) for count in counts]
    # One more is taken from the source that is furthest below its share; its last text only when no other is left,
    # which is then refused.
    for _ in range(most - sum(quotas)):
        priorities = [
            (n - q > 0, n - q > 1, most * n / sum(counts) - q) for n, q in zip(counts, quotas, strict=True)
        ]
        quotas[priorities.index(max(priorities))] += 1
    chosen = [shuffled_sample(count, quotas[s], seed, HELD_OUT, s) + bounds[s] for s, count in enumerate(counts)]
    return np.sort(np.concatenate(chosen))


def sample_documents(count: int, most: int, seed: int) -> tuple[int, ...]:
    """Choose at most `most` of `count` documents by the seed, in ascending order; 0: all of them.

    >>> sample_documents(5, 0, seed=0), len(sample_documents(5, 2, seed=0))
    ((0, 1, 2, 3, 4), 2)
    """
    if not 0 < most < count:
        return tuple(range(count))
    return tuple(np.sort(shuffled_sample(count, most, seed, EVAL_SET)).tolist())
