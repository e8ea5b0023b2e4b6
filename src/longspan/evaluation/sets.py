"""The evaluation sets of a run, each with its documents and metrics, opened before the first step on all ranks.

Texts under a set's path are tokenized with the run's tokenizer into RUN/evaluation/NAME, once, and again where they
changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig
from longspan.corpus.build import configured_tokenizer, ensure_corpus, open_shared_corpus, with_images
from longspan.corpus.corpus_settings import CorpusSettings
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.documents import Corpus, CorpusDocuments
from longspan.data.step_order import sample_documents
from longspan.errors import DataError, plural
from longspan.evaluation.metrics import Metric
from longspan.files import name_file_in_errors


@dataclass(frozen=True)
class EvaluationSet:
    """Documents that are evaluated together: those of a table [[eval]], or those that a run holds out, without a name.

    `metrics` are those besides the built-in ones, `token_bytes` (V,) the bytes by which bits per byte are counted (None
    if the tokenizer does not give them).
    """

    config: EvalConfig
    documents: CorpusDocuments
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    token_bytes: npt.NDArray[np.int64] | None = None

    @property
    def name(self) -> str:
        """The set's name; "" for the documents that a run holds out."""
        return self.config.name

    @property
    def longest(self) -> tuple[int, str]:
        """Return the tokens of the set's longest document, and the name of the file that the document comes from."""
        lengths = self.documents.lengths
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        return int(lengths[longest]), self.documents.origin(longest)

    def with_images(self, model: PreTrainedConfig, folder: Path) -> "EvaluationSet":
        """Return the set with the images of its documents, for a model of this configuration.

        `folder` has the tokenizer and the image processor (`image_documents.py`).
        """
        return replace(self, documents=with_images(self.documents, model, folder))

    def describe_set(self) -> str:
        """Describe its documents and targets in a line, for the console."""
        lengths, every = self.documents.lengths, self.config.every
        targets = getattr(self.documents, "targets", None)
        detail = "" if targets is None else f" ({targets:,} of them targets)"
        size = (
            f"{plural(len(lengths), 'document')} of {plural(sum(lengths), 'token')}{detail}, longest {max(lengths):,}"
        )
        when = f"every {plural(every, 'step')} and after the last" if every else "after the last step"
        return f"evaluation set {self.name}: {size}; evaluated {when}"


def check_paths(config: RunConfig, world: World) -> None:
    """Raise DataError on every rank for a set whose path is missing or holds no text, before a corpus is built."""

    def list_files() -> None:
        for entry in config.eval:
            _corpus_settings(config, entry).files(Path(config.run.dir))

    run_on_first_rank(world, list_files, DataError)


def open_set(config: RunConfig, entry: EvalConfig, world: World, log: LogLine) -> EvaluationSet:
    """Open the set of a table [[eval]], without its metrics; its texts are tokenized where they were not yet.

    All ranks call it together, once the run has its tokenizer. Raises DataError for texts that cannot be read.
    """
    corpus = _shared_corpus(config, entry, world, log)
    documents = corpus.select(sample_documents(len(corpus), entry.documents, config.train.seed))
    return EvaluationSet(entry, documents)


def describe_trained_files(training: Corpus, evaluated: EvaluationSet) -> str:
    """Say in a line how many source files of a set are trained on too, and which; "" where none is."""
    corpus = evaluated.documents.corpus
    evaluated_sums = {source.sha256 for source in corpus.sources}
    trained = {source.sha256 for source in training.sources if source.sha256 in evaluated_sums}
    shared = [source.name for source in corpus.sources if source.sha256 in trained]
    if not shared:
        return ""
    count = f"{len(shared)} of {plural(len(corpus.sources), 'file')} ({', '.join(shared[:3])})"
    return f"evaluation set {evaluated.name}: {count} are in the training data too, so its loss is partly of texts seen"


def _corpus_settings(config: RunConfig, entry: EvalConfig) -> CorpusSettings:
    data = replace(config.data, path=entry.path, sources=(), max_document_tokens=entry.max_document_tokens)
    return CorpusSettings(data, f"evaluation/{entry.name}", entry.prefix)


def _shared_corpus(config: RunConfig, entry: EvalConfig, world: World, log: LogLine) -> Corpus:
    """Return the corpus of a set in the run's folder, which the first rank builds if need be and all ranks open."""
    directory, settings = Path(config.run.dir), _corpus_settings(config, entry)

    def build_corpus() -> None:
        folder = directory / settings.folder
        folder.parent.mkdir(exist_ok=True)
        log_set = lambda text: log(f"evaluation set {entry.name}: {text}")  # noqa: E731
        with name_file_in_errors(folder):
            tokenizer = configured_tokenizer(config) or load_tokenizer(directory)
            ensure_corpus(settings, directory, tokenizer=tokenizer, resumed=False, log=log_set)

    run_on_first_rank(world, build_corpus, DataError)
    return run_on_every_rank(world, partial(open_shared_corpus, directory / settings.folder), DataError)
