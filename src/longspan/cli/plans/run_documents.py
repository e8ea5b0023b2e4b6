"""The documents of a run before it begins: their lengths as training would have them, and the order of its steps.

With a tokenizer the corpus is made as `longspan train` makes it, and its tokens are kept in the same cache (data.cache)
for the run. Without one, tokens are estimated. No weights and no world are needed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.cli.plans.lengths import BYTES_PER_TOKEN, cut_lengths
from longspan.config.sections import RunConfig
from longspan.corpus.files import STDLIB, CorpusFile, find_files, text_sizes
from longspan.data.manifest import SHORTEST
from longspan.data.step_order import PackOrder, StepOrder
from longspan.errors import ConfigError, DataError, plural
from longspan.model.weights.file_names import tokenizer_folder
from longspan.train.plans.order import documents_line, largest_step, make_step_order, order_lengths, set_epoch_steps

Log = Callable[[str], None]


@dataclass(frozen=True)
class RunDocuments:
    """The documents of a run: the configuration with its number of steps, their order, and what they are.

    `longest` is the longest that a planner receives, `target_share` the share of tokens that are predicted, and
    `image_rows` the mean rows of images in a step; `line` says in words what they are.
    """

    config: RunConfig
    order: StepOrder | PackOrder
    longest: int
    target_share: float
    image_rows: float
    line: str
    images: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])  # rows of each, by document

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.config.train.steps

    def list_images(self, step: int) -> list[Sequence[int]]:
        """Return the rows of each image of a step's documents; none of packs, whose documents are cut."""
        if not self.images or isinstance(self.order, PackOrder):
            return []
        return [self.images.get(document, ()) for document in self.order.documents_of_step(step)]


@contextmanager
def open_documents(config: RunConfig, log: Log, *, estimate: bool) -> Iterator[RunDocuments]:
    """Open the documents of a run; with `estimate`, tokens are bytes / 4 where neither keys nor model have a tokenizer.

    >>> with open_documents(config, print, estimate=True) as documents:
    ...     documents.order.lengths_of_step(0)  # doctest: +SKIP

    Without `estimate` a tokenizer is trained, as the run does. Raises ConfigError and DataError as the run does.
    """
    if estimate and tokenizer_folder(config.data.tokenizer, config.model.source) is None:
        yield _estimate_documents(config, log)
        return
    from longspan.corpus.build import configured_tokenizer, ensure_corpus
    from longspan.corpus.corpus_settings import CorpusSettings

    engine = configured_tokenizer(config)
    with TemporaryDirectory(prefix="longspan-plan-") as folder:
        corpus = ensure_corpus(CorpusSettings(config.data), Path(folder), tokenizer=engine, resumed=False, log=log)
        order = make_step_order(config, corpus)
        config = set_epoch_steps(config, order, log)
        lengths: npt.NDArray[Any] = np.asarray(corpus.lengths)
        tokens = max(1, int(lengths.sum()))
        share = 1.0 if corpus.targets is None else min(1.0, float(corpus.targets.sum()) / tokens)
        rows, images = 0.0, dict[int, list[int]]()
        if corpus.images is not None and len(corpus.images):
            rows = float(corpus.images.column("rows").sum()) / tokens * largest_step(config, order)
            columns = (np.asarray(corpus.images.column(name)).tolist() for name in ("document", "rows"))
            for document, image_rows in zip(*columns, strict=True):
                images.setdefault(document, []).append(image_rows)
        longest_tokens, line = _longest_planned_length(config, order, lengths), documents_line(config, order)
        yield RunDocuments(config, order, longest_tokens, share, rows, line, images)


def _estimate_documents(config: RunConfig, log: Log) -> RunDocuments:
    # Texts are cut, left out and ordered as in the run; a piece of one token has no target, and is left out.
    data = config.data
    if data.sources:
        raise ConfigError("tables [[data.sources]] are read with a tokenizer; name its folder with data.tokenizer")
    paths = find_files(data.path or STDLIB, key="--data")
    sizes = text_sizes(tuple(CorpusFile(0, name, file) for name, file in paths.items()), data.max_text_bytes)
    cut = (cut_lengths([size // BYTES_PER_TOKEN], data.max_document_tokens) for size in sizes)
    documents = ([n for n in text if n >= SHORTEST] for text in cut)
    counts = [*filter(None, documents)]  # the tokens of the documents of each text
    if not counts:
        raise DataError(f"--data {data.path!r} holds no text")
    log(
        f"tokens are estimated as bytes / {BYTES_PER_TOKEN} of {plural(len(counts), 'text')}: neither data.tokenizer "
        "nor the model's folder has a tokenizer (--tokenizer FOLDER counts them)"
    )
    lengths = np.concatenate(counts)
    order = order_lengths(config, lengths, texts=np.repeat(np.arange(len(counts)), [*map(len, counts)]))
    config = set_epoch_steps(config, order, log)
    return RunDocuments(
        config,
        order,
        longest=_longest_planned_length(config, order, lengths),
        target_share=1.0,
        image_rows=0.0,
        line=f"{documents_line(config, order)}; estimated",
    )


def _longest_planned_length(config: RunConfig, order: StepOrder | PackOrder, lengths: npt.NDArray[Any]) -> int:
    data = config.data
    if not data.pack_to:
        held_out = set(order.evaluation)
        return max(int(n) for i, n in enumerate(lengths.tolist()) if i not in held_out)
    return data.pack_to if data.pack_attention == "across" else min(data.pack_to, int(lengths.max()))


def sample_steps(steps: int, most: int) -> list[int]:
    """Choose at most `most` of a run's steps, evenly apart, the first one among them.

    >>> sample_steps(10, 4)
    [0, 2, 5, 7]
    """
    return [i * steps // most for i in range(most)] if steps > most else [*range(steps)]
