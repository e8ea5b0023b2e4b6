"""What a run reads: its corpus, the order of its documents, its evaluation sets; and the run as a value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedConfig

from longspan.checkpoint.files import checkpoints_root
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig, held_out_set
from longspan.corpus.fit_to_model import (
    fit_documents_to_model,
)
from longspan.corpus.recipe import CorpusSettings, find_kinds
from longspan.corpus.run_corpus import (
    load_configured_tokenizer,
    open_corpus_on_all_ranks,
    open_or_build_corpus,
    open_shared_corpus,
)
from longspan.corpus.token_bytes import token_bytes
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.corpus_documents import Corpus, CorpusDocuments
from longspan.data.run_epochs import documents_line
from longspan.data.run_order import make_step_order
from longspan.data.step_order import StepOrder, documents_of_units, sample_documents
from longspan.errors import ConfigError, DataError, EvaluationError, plural
from longspan.evaluation.metrics import Metric, check_metric_names, load_metrics
from longspan.files import name_file_in_errors
from longspan.plan.shape.sharing_rules import SharingRules
from longspan.resolve.planner_config import query_heads
from longspan.resolve.resolved import Reasons
from longspan.run.checks import check_longest_of_set, check_longest_training_document
from longspan.train.run_model.rope_scaling import check_set_length
from longspan.train.training import Training


@dataclass(frozen=True)
class EvaluationSet:
    """Documents that are evaluated together: those of a table [[evaluation.sets]], or those that a run holds out,
    without a name.

    `token_bytes` (V,) are the bytes by which bits per byte are counted (None if the tokenizer does not give them).
    `trained_on` counts its documents that are trained on too (None: it is not known).
    """

    config: EvalConfig
    documents: CorpusDocuments
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    token_bytes: npt.NDArray[np.int64] | None = None
    trained_on: int | None = 0

    @property
    def caution(self) -> str:
        """What a run says of documents that are also trained on, or where that is not known; "" if none is."""
        name = f"documents of evaluation set {self.name}" if self.name else "held-out documents"
        if self.trained_on is None:
            return f"how many {name} are also trained on is not known: an earlier version made their tokens"
        if not self.trained_on:
            return ""
        trained_on = f"{self.trained_on:,} of {len(self.documents):,} {name} are also trained on, token for token"
        return f"{trained_on}: their loss is not that of unseen text"

    @property
    def name(self) -> str:
        return self.config.name


def _corpus_settings_of_set(config: RunConfig, entry: EvalConfig) -> CorpusSettings:
    """The corpus is in evaluation/NAME of the run's folder."""
    return CorpusSettings.for_set(
        config,
        entry.path,
        entry.split,
        entry.max_document_tokens,
        folder=f"evaluation/{entry.name}",
        prefix=entry.prefix,
    )


def open_evaluation_set(config: RunConfig, entry: EvalConfig, world: World, log: LogLine) -> EvaluationSet:
    """Open the set of a table [[evaluation.sets]], and log its size and when it is evaluated; all ranks together.

    The first rank makes its corpus if it is not there, with the run's tokenizer. Metrics, token bytes and `trained_on`
    are left at their defaults.
    """
    directory = Path(config.run.dir)
    settings = _corpus_settings_of_set(config, entry)
    folder = directory / settings.folder

    def log_for_set(text: str) -> None:
        log(f"evaluation set {entry.name}: {text}")

    def build_corpus() -> None:
        folder.parent.mkdir(exist_ok=True)
        with name_file_in_errors(folder):
            tokenizer = load_configured_tokenizer(config) or load_tokenizer(directory)
            open_or_build_corpus(settings, directory, tokenizer=tokenizer, resumed=False, log=log_for_set)

    run_on_first_rank(world, build_corpus, DataError)
    corpus = run_on_every_rank(world, partial(open_shared_corpus, folder), DataError)
    # a unit is a document, or the documents of a pair, which stay together
    units = sample_documents(len(corpus) // corpus.unit, entry.documents, config.train.seed)
    documents = corpus.select(documents_of_units(units, corpus.unit))
    lengths = documents.lengths
    targets = getattr(documents, "targets", None)
    detail = "" if targets is None else f" ({targets:,} of them targets)"
    size = f"{plural(len(lengths), 'document')} of {plural(sum(lengths), 'token')}{detail}, "
    size += f"longest {max(lengths):,}"
    when = f"every {plural(entry.every, 'step')} and after the last" if entry.every else "after the last step"
    log_for_set(f"{size}; evaluated {when}")
    return EvaluationSet(entry, documents)


@dataclass(frozen=True)
class TrainingRun(Training):
    """A run after its set-up, on one rank: the model under training, its data, and the number of steps done."""

    corpus: Corpus
    order: StepOrder
    done: int
    sets: tuple[EvaluationSet, ...] = ()  # the held-out documents first, if there are any
    # The reasons are for what was left open and is chosen.
    reasons: Reasons = field(default_factory=Reasons)

    @property
    def dir(self) -> Path:
        return Path(self.config.run.dir)

    @property
    def checkpoints(self) -> Path:
        return checkpoints_root(self.dir, self.config.checkpoint.dir)

    @property
    def held_out(self) -> CorpusDocuments:
        return self.corpus.select(self.order.evaluation)


def replace_eval_tables(sets: Sequence[EvaluationSet], config: RunConfig) -> tuple[EvaluationSet, ...]:
    """Return the sets with their tables from `config`, which is resolved: "auto" limits of rows are numbers."""
    entries = {entry.name: entry for entry in (held_out_set(config), *config.evaluation.sets)}
    return tuple(replace(s, config=entries[s.name]) for s in sets)


@dataclass(frozen=True)
class RunData:
    """The documents of a run, the same on every rank, and the model's configuration, by which they are read, and the
    teacher's (None: there is none), which reads them too.
    """

    model: PreTrainedConfig
    corpus: Corpus
    order: StepOrder
    sets: tuple[EvaluationSet, ...]
    longest: tuple[int, str]  # tokens and origin of the longest document that a planner receives
    teacher: PreTrainedConfig | None = None

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """The corpora of training and of each set with tokens of its own."""
        return (self.corpus, *(s.documents.corpus for s in self.sets if isinstance(s.documents, CorpusDocuments)))

    def list_reference_documents(self, config: RunConfig, done: int) -> tuple[CorpusDocuments, ...]:
        """List what a reference model reads too: the documents of the steps after `done`, and those of each set."""
        steps = (self.order.documents_of_step(step) for step in range(done, config.train.steps))
        trained = sorted({document for documents in steps for document in documents})
        return (self.corpus.select(trained), *(s.documents for s in self.sets))

    def check_longest_documents(self, config: RunConfig, world: World) -> None:
        """Raise ConfigError where the longest document of the corpus, or of a set, fits no group or no position."""
        longest, origin = self.longest
        heads = query_heads(self.model, self.teacher)
        check_longest_training_document(config, world.home, longest, origin, heads)
        for entry in (s for s in replace_eval_tables(self.sets, config) if s.name):
            lengths = entry.documents.lengths
            number = int(np.argmax(lengths))
            tokens = int(lengths[number])
            origin_in_set = entry.documents.origin(number)
            check_longest_of_set(config, entry.config, world.home, tokens, origin_in_set, heads)
            check_set_length(self.model, config.model, longest, entry.name, tokens)
            if self.teacher is not None:
                check_set_length(self.teacher, config.teacher.as_model(), longest, entry.name, tokens)


def open_data(
    config: RunConfig,
    model: PreTrainedConfig,
    checkpoint: Path | None,
    world: World,
    log: LogLine,
    rules: SharingRules | None = None,
    teacher: PreTrainedConfig | None = None,
) -> RunData:
    """Open the documents and the evaluation sets of a run, which resumes if it has a `checkpoint`; all ranks call it
    together. The first rank makes corpora that are not there yet.

    The held-out documents are the first set, if there are any. Documents share prefixes as the model's `rules` say
    (None: none share), if it sees no images. Raises ConfigError for metrics that cannot be loaded, and for images under
    a `teacher`, DataError for what cannot be read, both on every rank.
    """
    run_dir = Path(config.run.dir)

    def check_rows_of_sets() -> None:
        for entry in config.evaluation.sets:
            settings = _corpus_settings_of_set(config, entry)
            find_kinds(settings, settings.find_source_files(run_dir))

    def load_own_metrics() -> dict[str, Metric]:
        key = "evaluation.metrics"
        metrics = load_metrics(config.evaluation.metrics, key)
        try:
            check_metric_names(metrics)
        except EvaluationError as error:
            raise ConfigError(f"{key}: {error}") from error
        return metrics

    # Both checks come before a corpus is built, which may take long.
    if config.evaluation.sets:
        run_on_first_rank(world, check_rows_of_sets, DataError)
    metrics = run_on_every_rank(world, load_own_metrics, ConfigError) if config.evaluation.metrics else {}
    corpus = open_corpus_on_all_ranks(config, world, model, resumed=checkpoint is not None, log=log)
    sets = [open_evaluation_set(config, entry, world, log) for entry in config.evaluation.sets]
    if teacher is not None and any((corpus.images, *(s.documents.corpus.images for s in sets))):
        raise ConfigError(
            "teacher.path is given, and rows of the data have images, of which no distillation is made; leave out the "
            "teacher, or these rows"
        )
    if rules is not None and any(s.documents.corpus.images for s in sets):
        rules = rules._replace(against=("a model that sees images", *rules.against))
    order = make_step_order(config, corpus, rules, log)
    log(documents_line(config, order))
    held_out = corpus.select(order.evaluation)
    if held_out:
        sets = [EvaluationSet(held_out_set(config), held_out), *sets]

    if sets:

        def count_and_read_bytes() -> tuple[list[int | None], npt.NDArray[np.int64] | None]:
            counts = [corpus.count_contained(s.documents, held_out.ids) for s in sets]
            return counts, token_bytes(load_tokenizer(run_dir).engine)

        counts, byte_counts = run_on_first_rank(world, count_and_read_bytes, DataError)
        shared_fields = {"token_bytes": byte_counts, "metrics": metrics}
        sets = [replace(s, trained_on=count, **shared_fields) for s, count in zip(sets, counts, strict=True)]
    if config.evaluation.sets:  # held-out documents are of the run's corpus, which has its images already

        def add_images() -> list[EvaluationSet]:
            return [replace(s, documents=fit_documents_to_model(s.documents, model, run_dir)) for s in sets]

        sets = run_on_every_rank(world, add_images, DataError)
    number = int(np.argmax(corpus.lengths))
    longest = (int(corpus.lengths[number]), corpus.origin(number))
    return RunData(model, corpus, order, tuple(sets), longest, teacher)
