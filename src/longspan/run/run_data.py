"""What a run reads (its corpus, the order of its documents, its evaluation sets), step by step; the run as a value."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from longspan.checkpoint.store_path import checkpoints_root
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank
from longspan.config.sections import RunConfig, held_out_set
from longspan.corpus.build import build_shared_corpus
from longspan.corpus.tokenizer import load_tokenizer, token_bytes
from longspan.data.documents import Corpus, CorpusDocuments
from longspan.data.step_order import PackOrder, StepOrder
from longspan.errors import ConfigError, DataError, EvaluationError, LongspanError
from longspan.evaluation.metrics import check_metrics, load_metrics
from longspan.evaluation.sets import EvaluationSet, check_paths, describe_trained_files, open_set
from longspan.layout import Layout
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import Plan, PlanAhead
from longspan.run.checks import check_longest, check_longest_of_set
from longspan.train.long_documents import check_set_length
from longspan.train.plans import plan_steps, query_heads
from longspan.train.plans.order import documents_line, largest_step, make_step_order
from longspan.train.reading.step_inputs import count_pack_targets
from longspan.train.training import Training


@dataclass(frozen=True)
class TrainingRun(Training):
    """A run after its set-up, on one rank: the model under training, its data, and the number of steps done."""

    corpus: Corpus
    order: StepOrder | PackOrder
    done: int
    sets: tuple[EvaluationSet, ...] = ()  # the held-out documents first, if there are any
    why_degrees: tuple[str, ...] = ()  # lines about evaluation degrees that were chosen by cost
    why_partition: str = ""  # the same for the partition of a hybrid model

    @property
    def dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints are: a folder or a place in a store."""
        return checkpoints_root(self.dir, self.config.run.checkpoints)

    def plan_steps(self) -> PlanAhead:
        """Plan the steps of the run ahead; a context manager."""
        return plan_steps(self.choice, self.order, self.world.home)

    @property
    def held_out(self) -> CorpusDocuments:
        """The documents that are only evaluated; there may be none."""
        return self.corpus.select(self.order.evaluation)


def check_paths_and_metrics(config: RunConfig, world: World, vocabulary: int) -> None:
    """Raise on every rank, before a corpus is built, for paths that do not exist and metrics that cannot be used."""

    def check_metrics_of_sets() -> None:
        for entry in (held_out_set(config), *config.eval):
            try:
                check_metrics(load_metrics(entry.metrics, entry.metrics_key), {}, vocabulary, world.device)
            except EvaluationError as error:
                raise ConfigError(f"{entry.metrics_key}: {error}") from error

    check_paths(config, world)
    run_on_every_rank(world, check_metrics_of_sets, ConfigError)


def open_sets(
    config: RunConfig, corpus: Corpus, held_out: CorpusDocuments, world: World, log: LogLine
) -> tuple[EvaluationSet, ...]:
    """Open the held-out documents, if there are any, and the sets of the [[eval]] tables, in order, with their metrics.

    All ranks call it together, once the run's folder has the tokenizer, by which a set knows the bytes of each token.
    Logs a line for each set of a table, and one if it has files of the corpus. Raises DataError on every rank for texts
    that cannot be read.
    """
    sets = [EvaluationSet(held_out_set(config), held_out)] if held_out else []
    for entry in config.eval:
        evaluation_set = open_set(config, entry, world, log)
        log(evaluation_set.describe_set())
        if overlap := describe_trained_files(corpus, evaluation_set):
            log(overlap)
        sets.append(evaluation_set)
    if not sets:
        return ()
    directory = Path(config.run.dir)
    byte_counts = run_on_first_rank(world, lambda: token_bytes(load_tokenizer(directory).engine), DataError)
    metrics_by_set = [load_metrics(s.config.metrics, s.config.metrics_key) for s in sets]
    return tuple(
        replace(s, metrics={**s.metrics, **metrics}, token_bytes=byte_counts)
        for s, metrics in zip(sets, metrics_by_set, strict=True)
    )


def check_set_lengths(
    sets: Sequence[EvaluationSet],
    config: RunConfig,
    home: Layout,
    model: PreTrainedConfig,
    longest: int,
    heads: int | None,
) -> None:
    """Raise ConfigError if the longest document of a named set fits no group of slots or exceeds the model's positions.

    The held-out documents have no name: they are of the run's corpus, and checked with it. `longest` is the tokens of
    the longest document of that corpus, by which positions are scaled; `heads` are the model's query heads
    (`check_longest`).
    """
    for entry in (s for s in sets if s.name):
        tokens, origin = entry.longest
        check_longest_of_set(config, entry.config, home, tokens, origin, heads)
        check_set_length(model, config.model, longest, entry.name, tokens)


def with_eval_tables(sets: Sequence[EvaluationSet], config: RunConfig) -> tuple[EvaluationSet, ...]:
    """Return the sets with their [[eval]] tables replaced by those of `config`.

    A set was opened with a table in which the limit of rows may be "auto"; in `config` it is a number.
    """
    entries = {entry.name: entry for entry in (held_out_set(config), *config.eval)}
    return tuple(replace(s, config=entries[s.name]) for s in sets)


@dataclass(frozen=True)
class RunData:
    """The documents of a run, the same on every rank, and the model's configuration, by which they are read."""

    model: PreTrainedConfig
    corpus: Corpus
    order: StepOrder | PackOrder
    sets: tuple[EvaluationSet, ...]
    longest: tuple[int, str]  # tokens and origin of the longest document that a planner receives

    @property
    def tokenizer_size(self) -> int:
        """The number of ids of the tokenizer."""
        return self.corpus.manifest.tokenizer_size

    @property
    def images(self) -> int:
        """The number of images in all documents, evaluation sets included."""
        set_images = [len(getattr(s.documents, "items", ())) for s in self.sets]  # texts alone have no items
        return len(self.corpus.images or ()) + sum(set_images)

    def image_rows(self, config: RunConfig) -> float:
        """Return the mean number of rows of images in a step, of all slots together; 0.0 without images."""
        if self.corpus.images is None or not len(self.corpus.images):
            return 0.0
        share = float(self.corpus.images.column("rows").sum()) / float(self.corpus.lengths.sum())
        return share * largest_step(config, self.order)

    def check_fit(self, config: RunConfig, world: World) -> None:
        """Raise ConfigError if the longest document of the corpus or of a set fits no group of slots.

        A set's must also fit the model's positions; for the corpus `scale_positions` sees to that.
        """
        (tokens, origin), heads = self.longest, query_heads(self.model)
        check_longest(config, world.home, tokens, origin, heads)
        check_set_lengths(with_eval_tables(self.sets, config), config, world.home, self.model, tokens, heads)


def open_data(
    config: RunConfig, model: PreTrainedConfig, checkpoint: Path | None, world: World, log: LogLine
) -> RunData:
    """Open the documents and the evaluation sets of a run, which resumes from a checkpoint, or begins where it is None.

    Raises ConfigError or DataError.
    """
    check_paths_and_metrics(config, world, model.get_text_config().vocab_size)
    corpus = build_shared_corpus(config, world, model, resumed=checkpoint is not None, log=log)
    order = make_step_order(config, corpus)
    log(documents_line(config, order))
    sets, run_dir = open_sets(config, corpus, corpus.select(order.evaluation), world, log), Path(config.run.dir)
    sets = run_on_every_rank(world, lambda: tuple(entry.with_images(model, run_dir) for entry in sets), DataError)
    return RunData(model, corpus, order, sets, _longest_planned_document(config, corpus, order))


def _longest_planned_document(config: RunConfig, corpus: Corpus, order: StepOrder | PackOrder) -> tuple[int, str]:
    """Return the tokens and the origin of the longest document that a planner receives: a document, or a pack.

    A pack whose documents see each other is planned as one document. In other packs each document is planned by itself,
    cut to a pack's size where it is longer. Held-out documents are evaluated without packs, and so may be longer.
    """
    lengths, data = corpus.lengths, config.data
    if not data.pack_to:
        longest_document = int(np.argmax(lengths))
        return int(lengths[longest_document]), corpus.origin(longest_document)
    packed = data.pack_to if data.pack_attention == "across" else min(data.pack_to, int(lengths.max()))
    held_out = max(order.evaluation, key=lambda document: int(lengths[document]), default=None)
    if held_out is None or lengths[held_out] <= packed:
        return packed, "packs"
    return int(lengths[held_out]), corpus.origin(held_out)


class StepReader:
    """Selects the documents of each step and counts their targets into its plan, once a step.

    What `prepare_documents` and `prepare_images` made for the next step is kept for `read_step`.
    """

    def __init__(self, run: TrainingRun, plans: PlanAhead) -> None:
        """Read the documents of a run by plans that are made ahead."""
        self._run, self._plans = run, plans
        self._next: tuple[int, Any, Plan] | None = None  # step, documents and plan

    def read_step(self, step: int) -> tuple[Any, Plan]:
        """Return the documents of a step and its plan, for which this call waits if it is not made yet."""
        prepared, self._next = self._next, None
        if prepared is not None and prepared[0] == step:
            return prepared[1:]
        documents = self._run.order.select(self._run.corpus, step)
        return documents, count_pack_targets(documents, self._plans.plan(step))

    def prepare_documents(self, step: int) -> None:
        """Plan `step`, the next one, and select its documents while the device computes; `read_step` raises errors.

        No rank waits for a plan here.
        """
        run, corpus = self._run, self._run.corpus
        if self._next is not None or step >= run.config.train.steps:
            return
        with suppress(Exception):
            plan = self._plans.plan_if_made(step)
            if plan is not None:
                documents = run.order.select(corpus, step)
                self._next = (step, documents, count_pack_targets(documents, plan))

    def prepare_images(self, model: MultimodalModel, step: int) -> None:
        """Plan the waves of images of `step`, the next one, and read this rank's images, in threads.

        Where the plan of `step` is not ready, nothing is done here, and `step` reads its images itself: the step under
        way does not wait for a later plan. Errors are left to `read_step`, which meets them again.
        """
        plan = self._plans.plan_if_made(step)
        if plan is None or self._run.corpus.images is None:
            return
        from longspan.train.terms.encoders import plan_waves_ahead

        with suppress(LongspanError):
            documents = self._run.order.select(self._run.corpus, step)
            plan = count_pack_targets(documents, plan)
            self._next = (step, documents, plan)
            plan_waves_ahead(model, plan, documents, depths=self._run.config.mtp.depths)
