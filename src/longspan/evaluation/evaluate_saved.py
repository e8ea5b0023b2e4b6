"""Saved weights evaluated on sets of documents, at one degree or several; two of them one after the other."""

import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedConfig

from longspan.checkpoint.base import check_configuration_unchanged
from longspan.checkpoint.files import read_state
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank, run_on_first_rank
from longspan.comm.received_signals import StopSignal
from longspan.config.file import load_config
from longspan.config.keys import AUTO, NOT_GIVEN
from longspan.config.sections import RunConfig
from longspan.corpus.build_documents import build_documents
from longspan.corpus.fit_to_model import fit_documents_to_model
from longspan.corpus.lines import corpus_line, left_out_lines, row_lines
from longspan.corpus.recipe import CorpusSettings, make_recipe
from longspan.corpus.sources.file_sums import hash_files
from longspan.corpus.token_bytes import token_bytes
from longspan.corpus.tokenizer import TextTokenizer
from longspan.data.corpus_documents import Corpus, CorpusDocuments
from longspan.data.run_order import make_step_order
from longspan.data.stream import ORDER_OF_SOURCES
from longspan.errors import ConfigError, DataError
from longspan.evaluation.fit_layout import Change, changes_line, fit_evaluation_plans, layout_changes
from longspan.evaluation.live import evaluate
from longspan.evaluation.load_saved import CheckedWeights, find_checked_weights, load_saved_model
from longspan.evaluation.metrics import EvaluationOptions, Metric, load_metrics
from longspan.evaluation.request import EvalRequest
from longspan.evaluation.saved_losses import SavedLosses, Sets, find_losses, price_plans
from longspan.evaluation.saved_results import SetResult, SubjectResult
from longspan.model import disable_adapter
from longspan.model.execution import model_execution
from longspan.model.load import find_score_class
from longspan.plan import Cost
from longspan.resolve.partition import set_default_partition
from longspan.resolve.planner_config import PlannerConfig, query_heads
from longspan.resolve.resolved import choose_evaluation_degree
from longspan.resolve.run_cost import set_node_size
from longspan.train.run_model.load import read_model_configuration
from longspan.train.run_model.prepare import AnyModel
from longspan.train.run_model.rope_scaling import scale_positions
from longspan.train.start.start_times import Starts

# The words say what is evaluated; the numbers are micro-batches done, and all of them.
Progress = Callable[[str, int, int], None]


def evaluate_saved(
    request: EvalRequest, world: World, log: LogLine, progress: Progress, starts: Starts
) -> tuple[SubjectResult, ...]:
    """Evaluate each subject; all ranks call it together. Nothing in a run's or a model's folder changes.

    Raises on all ranks what is missing or does not fit, and EvaluationStopped after a signal. `starts` has the parts of
    the start before this call.
    """
    first = request.subjects[0]
    if request.metrics:
        load = partial(load_metrics, request.metrics, "--metrics")
    else:
        load = partial(load_metrics, first.config.evaluation.metrics, "evaluation.metrics")
    metrics = run_on_every_rank(world, load, ConfigError)
    checked = [find_checked_weights(subject, request.tokenizer, world, log) for subject in request.subjects]
    tokenizers = {(weights.tokenizer.digest, weights.tokenizer.surrounding_tokens) for weights in checked}
    if len(tokenizers) > 1:
        one, other = (weights.subject.folder for weights in checked)
        raise ConfigError(
            f"the tokenizers of {one} and {other} differ, and losses per token of different tokens cannot be "
            "compared; evaluate each alone on the same --data, and compare the bits per byte"
        )
    _refuse_other_scores(checked)
    if request.paths:
        sets = _build_sets(request, checked[0], world, log)
    else:
        sets = run_on_every_rank(world, lambda: {"": _open_held_out_documents(checked[0])}, DataError)
    fit = partial(_fit_subject, request, sets=sets, world=world, log=log)
    fits = [run_on_every_rank(world, partial(fit, weights), ConfigError) for weights in checked]
    if line := changes_line(fits[0].changes, len(world.home.ranks)):
        log(line)
    starts.end_part("data")
    one = fits[0]
    losses = find_losses(one.checked, one.config, one.configuration, one.sets, world, log)
    evaluator = _Evaluator(request.degrees, world, metrics, losses, starts, log, progress)
    # One model is in memory at a time.
    return tuple(evaluator.evaluate_subject(fit) for fit in fits)


def _refuse_other_scores(checked: Sequence[CheckedWeights]) -> None:
    """A model that predicts tokens has 0 scores."""
    scores = [_number_of_scores(weights) for weights in checked]
    if len(set(scores)) > 1:
        first, other = (f"{w.subject.weights.path} gives {n}" for w, n in zip(checked, scores, strict=True))
        raise ConfigError(
            f"{first} scores of a document, and {other} (0: it predicts tokens): they have no loss in common; compare "
            "weights that give the same number of scores"
        )


def _number_of_scores(checked: CheckedWeights) -> int:
    return (checked.configuration.num_labels or 0) if find_score_class(checked.configuration) else 0


def _open_held_out_documents(checked: CheckedWeights) -> CorpusDocuments:
    subject = checked.subject
    run_dir = checked.subject.weights.run_dir
    config = checked.subject.config
    if run_dir is None:
        raise ConfigError(
            f"{subject.weights.path} is a Hugging Face folder, which holds out no documents; give --data PATH (a file "
            "or folder of .txt .md .py .jsonl .json .csv)"
        )
    order = read_state(checked.checkpoint).get("order") if checked.checkpoint is not None else ORDER_OF_SOURCES
    if config.data.sources and order != ORDER_OF_SOURCES:
        raise DataError(
            f"an earlier version chose the documents that {run_dir} holds out (order {order}), and this one would "
            "choose some that are trained on; give documents with --data"
        )
    corpus = Corpus(run_dir / "corpus")
    held_out = corpus.select(make_step_order(config, corpus).evaluation)
    if not held_out:
        raise DataError(f"{run_dir} holds out no documents (evaluation.documents is 0); give documents with --data")
    return held_out


def _build_sets(request: EvalRequest, checked: CheckedWeights, world: World, log: LogLine) -> Sets:
    """Entered by all ranks. The first rank builds corpora in a temporary folder, all ranks map them, then the folder is
    deleted: its files stay readable while they are mapped."""
    config = checked.subject.config
    # A folder's configuration says whether its model scores; the keys of a run say so of its own.
    config = config.with_keys("model", num_labels=config.model.num_labels or _number_of_scores(checked))
    longest = request.max_document_tokens
    longest = config.data.max_document_tokens if longest == NOT_GIVEN else longest
    builds = is_first_rank(world)
    with tempfile.TemporaryDirectory(prefix="longspan-eval-") if builds else nullcontext("") as folder:

        def build_corpora() -> None:
            """Build the corpus of each set in a numbered folder, on the first rank."""
            for index, (_, path) in enumerate(request.paths):
                settings = CorpusSettings.for_set(config, path, request.split, longest)
                _build_corpus(settings, checked.tokenizer, Path(folder, str(index)), log)

        def open_corpora() -> Sets:
            """Map the corpora that the first rank built. Raises DataError on a host that does not see their folder."""
            try:
                corpora = {name: Corpus(Path(root, str(i), "corpus")) for i, (name, _) in enumerate(request.paths)}
            except DataError as error:
                raise DataError(
                    f"{root} was made by the first rank, and a rank on {socket.gethostname()} cannot open it: {error}; "
                    "set TMPDIR to a folder that all hosts share"
                ) from error
            return {name: corpus.select(range(len(corpus))) for name, corpus in corpora.items()}

        run_on_first_rank(world, build_corpora, DataError)
        root = world.control.broadcast_object(folder)
        return run_on_every_rank(world, open_corpora, DataError)


def _build_corpus(settings: CorpusSettings, tokenizer: TextTokenizer, folder: Path, log: LogLine) -> None:
    """A DataError names the flags in place of keys."""
    try:
        folder.mkdir()
        files = settings.find_source_files(folder)
        recipe = make_recipe(settings, files, hash_files(files, log), tokenizer)
        for line in row_lines(recipe):
            log(line)
        manifest = build_documents(recipe, folder / "corpus", log)
    except DataError as error:
        raise DataError(str(error).replace("data.path", "--data", 1).replace("data.split", "--split")) from error
    log(f"--data: {corpus_line(Corpus(folder / 'corpus'), [settings.data.path])}")
    for line in left_out_lines(settings, folder, manifest, key="--max-document-tokens"):
        log(line)


@dataclass(frozen=True)
class _FittedSubject:
    """Checked weights with all that decides their evaluation: sets with their images, and what was
    fitted to the ranks.
    """

    checked: CheckedWeights
    sets: Sets
    config: RunConfig
    configuration: PreTrainedConfig
    changes: tuple[Change, ...]


def _fit_subject(
    request: EvalRequest, checked: CheckedWeights, *, sets: Sets, world: World, log: LogLine
) -> _FittedSubject:
    """The result is the same on every rank."""
    longest, origin = max(
        (length, documents.origins[i]) for documents in sets.values() for i, length in enumerate(documents.lengths)
    )
    subject = checked.subject
    configuration = checked.configuration
    flag_keys = request.flag_keys
    model = subject.config.model
    if "model.rope_scaling" in flag_keys:
        if run_dir := subject.weights.run_dir:
            check_configuration_unchanged(run_dir, load_config(run_dir / "config.toml"), "leave the flag out")
        configuration = read_model_configuration(subject.config, configuration.get_text_config().vocab_size)
    else:  # the saved configuration has what the run was trained with
        model = replace(model, rope_scaling="")
    configuration = scale_positions(configuration, model, longest, origin, log, cut_by="--max-document-tokens")
    if folder := checked.tokenizer.folder:
        sets = {name: fit_documents_to_model(documents, configuration, folder) for name, documents in sets.items()}
    heads = query_heads(configuration)
    usual = set_node_size(set_default_partition(subject.config), world.node_size)
    config = fit_evaluation_plans(usual, world.home, heads, longest, flag_keys)
    choice = PlannerConfig.evaluation(config, heads=heads)
    is_cap_fixed = "evaluation.max_tokens_per_slot" in flag_keys  # a cap that a flag gives is not raised
    for at_degree in _planner_configs_at_degrees(choice, request.degrees, 0 if is_cap_fixed else longest):
        at_degree.check_longest_document(longest, world.home, f"the longest document ({longest} tokens)")
    return _FittedSubject(
        checked, sets, config, configuration, (*request.home_changes, *layout_changes(usual, config))
    )


@dataclass(frozen=True)
class _Evaluator:
    """What evaluations of all subjects share: `degrees` are compared, () takes the configuration's; `losses` are those
    of the first subject's run, so that one quantity is compared.
    """

    degrees: tuple[int, ...]
    world: World
    metrics: dict[str, Metric]
    losses: SavedLosses
    starts: Starts
    log: LogLine
    progress: Progress

    def evaluate_subject(self, fit: _FittedSubject) -> SubjectResult:
        """Load a subject's model and evaluate it on all sets; entered by all ranks. The model goes when
        this returns.
        """
        images = any(getattr(documents, "items", ()) for documents in fit.sets.values())
        model, step = load_saved_model(fit.checked, fit.config, fit.configuration, self.world, images=images)
        cost = price_plans(fit.config, model.eval(), self.world, self.log)
        if "model" not in self.starts.parts:  # the second of two models is not part of the start
            self.starts.end_part("model")
            if self.world.device.type == "cuda":
                self.log(str(self.starts))
        weights = fit.checked.subject.weights
        if weights.base and (values := model_execution(model).words.get("frozen")):
            self.log(f"{weights.title}: the base model over the values that the adapter stands on, {values}")
        with StopSignal() as stop, disable_adapter(model) if weights.base else nullcontext():
            sets = tuple(self._evaluate_sets(fit, model, step, cost, stop))
        return SubjectResult(weights, fit.config, sets, fit.changes, self.losses.text)

    def _evaluate_sets(
        self, fit: _FittedSubject, model: AnyModel, step: int, cost: Cost, stop: StopSignal
    ) -> Iterator[SetResult]:
        """Entered by all ranks. An error is raised when the result that it prevents is asked for."""
        bytes_of_ids = token_bytes(fit.checked.tokenizer.engine, model.config.get_text_config().vocab_size)
        weights = fit.checked.subject.weights.title.rpartition("/")[2]
        for name, all_documents in fit.sets.items():
            documents = self.losses.select(all_documents)
            choice = PlannerConfig.evaluation(fit.config, cost=cost, heads=query_heads(model.config))
            if not self.degrees:
                choice = self._choose_degree(fit.config, choice, name, documents)
            for at_degree in _planner_configs_at_degrees(choice, self.degrees, max(documents.lengths)):
                title = ", ".join(filter(None, (weights, name, at_degree.text)))  # held-out documents have no name
                options = EvaluationOptions(
                    step=step,
                    name=name,
                    metrics=self.metrics,
                    token_bytes=bytes_of_ids,
                    share_prefixes=fit.config.data.share_prefixes == AUTO,
                    stopped=stop.stop_reason,
                    progress=partial(self.progress, f"of {title}"),
                    loss=self.losses.losses[name],
                )
                yield SetResult(evaluate(model, documents, at_degree, self.world, options), documents.origins)

    def _choose_degree(
        self, config: RunConfig, choice: PlannerConfig, name: str, documents: CorpusDocuments
    ) -> PlannerConfig:
        """Entered by all ranks; the set's own degree is open."""
        lengths = [int(n) for n in documents.lengths]
        is_open = config.evaluation.planner == AUTO
        choose = partial(
            choose_evaluation_degree, choice, lengths, self.world.home, name=name, planner_open=is_open
        )
        chosen, reason = run_on_first_rank(self.world, choose, ConfigError)  # hosts may round differently
        if reason:
            self.log(reason)
        return chosen


def _planner_configs_at_degrees(choice: PlannerConfig, degrees: Sequence[int], longest: int) -> list[PlannerConfig]:
    """With room for a document of `longest` tokens (0: its own limit); without degrees the choice alone."""
    return [choice.at_degree(degree, longest=longest) for degree in degrees] or [choice]
