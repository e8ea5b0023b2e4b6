"""Saved weights evaluated on sets of documents, at one degree or several; two of them one after the other.

What can be refused is refused before the first model is made.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank
from longspan.comm.stop_signal import StopSignal
from longspan.comm.time_limits import TimeLimits
from longspan.config.keys import AUTO
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import token_bytes
from longspan.errors import ConfigError, DataError
from longspan.evaluation.auto_degree import choose_degree_on_ranks
from longspan.evaluation.evaluate import evaluate
from longspan.evaluation.metrics import EvaluationOptions, Metric, load_metrics
from longspan.evaluation.saved.choose_sets import choose_sets, tokenizer_digest
from longspan.evaluation.saved.fit import Change, changes_line, find_set, fit_node_size, fit_set
from longspan.evaluation.saved.request import EvalRequest, SetResult, SubjectResult
from longspan.evaluation.saved.sets import NamedDocuments
from longspan.evaluation.saved.weights import CheckedWeights, check_saved_weights, fit_positions, load_saved_model
from longspan.plan import Cost
from longspan.train.memory.rows_that_fit import use_training_rows
from longspan.train.plans import PlanChoice, find_run_cost, query_heads
from longspan.train.plans.node_size import set_node_size
from longspan.train.plans.partition import set_usual_partition
from longspan.train.plans.run_machine import use_machine
from longspan.train.starts import Starts
from longspan.train.step_figures import is_priced_here
from longspan.train.training import AnyModel

# Numbers of hidden states, over all layers, from which graphs save a rank more than the 8 s that they take to load: a
# compiled forward reads and writes about 20 fewer in bfloat16 for each, at 3 TB/s.
WORTH_COMPILING = 6e11

Progress = Callable[[str, int, int], None]  # what is evaluated, micro-batches done, all


def evaluate_saved(
    request: EvalRequest, world: World, log: LogLine, progress: Progress, starts: Starts | None = None
) -> tuple[SubjectResult, ...]:
    """Evaluate each subject; all ranks call it together. Nothing in a run's or a model's folder changes.

    Raises CheckpointError, DataError, ModelError or ConfigError for what is missing or does not fit, EvaluationError
    for a metric without a count, and EvaluationStopped after a signal or beyond the time limit: on all ranks.
    `starts` has the parts of the start before this call; on GPUs they are logged once the first model is ready.
    """
    starts, deadline = starts or Starts(), time.monotonic() + (request.seconds or math.inf)
    metrics = run_on_every_rank(world, partial(_load_set_metrics, request), ConfigError)
    compare_weights = [check_saved_weights(subject, request.tokenizer, world, log) for subject in request.subjects]
    sets = choose_sets(request, compare_weights, world, log)
    pairs = zip(compare_weights, sets, strict=True)
    fits = [run_on_every_rank(world, partial(_fit_subject, request, *pair, world, log), ConfigError) for pair in pairs]
    if line := changes_line(fits[0].changes, len(world.home.ranks)):
        log(line)
    starts.end_part("data")
    results = list[SubjectResult]()
    for fit in fits:  # one model at a time
        results.append(_Evaluator(fit, request.degrees, world, metrics, deadline, starts).run(log, progress))
    return tuple(results)


def _load_set_metrics(request: EvalRequest) -> dict[str, dict[str, Metric]]:
    """Load the user's metrics of each set of the run, and of all other documents under ""; --metrics replaces all."""
    entries = (find_set(request.subjects[0].config, name, request.flag_keys) for name in ("", *request.sets))
    if request.metrics:
        return dict.fromkeys((entry.name for entry in entries), load_metrics(request.metrics, "--metrics"))
    return {entry.name: load_metrics(entry.metrics, entry.metrics_key) for entry in entries}


def choose_compiled_parts(compiled: str, configuration: PreTrainedConfig, tokens_of_rank: float) -> str:
    """Return the parts to compile, those of train.compiled; in place of "auto", "none" for an evaluation soon done.

    >>> choose_compiled_parts("auto", configuration, 50_000)
    'none'
    """
    text = configuration.get_text_config()
    pays = tokens_of_rank * text.hidden_size * text.num_hidden_layers >= WORTH_COMPILING
    return compiled if compiled != AUTO or pays else "none"


@dataclass(frozen=True)
class _Fit:
    """Weights and documents, and the configuration under which they fit each other and the ranks."""

    checked: CheckedWeights
    sets: tuple[NamedDocuments, ...]
    config: RunConfig
    configuration: PreTrainedConfig
    entries: tuple[EvalConfig, ...]  # how each set is planned
    changes: tuple[Change, ...]


def _fit_subject(
    request: EvalRequest, checked: CheckedWeights, sets: tuple[NamedDocuments, ...], world: World, log: LogLine
) -> _Fit:
    """Fit a subject to its longest document. Raises ConfigError where positions or the cap of a flag are too small.

    Positions of the model are scaled first, then images are counted, then each set's plan is fitted to this home; what
    changed from the run's configuration is listed.
    """
    longest_set = max(sets, key=lambda named: max(named.documents.lengths))
    longest = max(longest_set.documents.lengths)
    origin = longest_set.documents.origins[longest_set.longest]
    scaled = bool(request.flag_keys & {"model.rope_scaling", "model.rope_factor"})
    configuration = fit_positions(checked, longest, origin, scaled=scaled, log=log)
    folder = checked.tokenizer.folder
    sets = run_on_every_rank(
        world, lambda: tuple(named_documents.with_images(configuration, folder) for named_documents in sets), DataError
    )
    # Plans of both subjects follow the first one's keys; a run's training has measured rows where its limit is "auto".
    first, heads = request.subjects[0], query_heads(configuration)
    context = first.config.context if first.weights.run_dir is None else use_training_rows(first.config).context
    config = set_usual_partition(replace(checked.subject.config, context=context))
    config, host_changes = fit_node_size(config, world.node_size, request.flag_keys)
    config = set_node_size(config, world)
    entries, changes = list[EvalConfig](), dict.fromkeys((*request.home_changes, *host_changes))
    for named_documents in sets:
        entry = find_set(
            config, named_documents.name if named_documents.name in request.sets else "", request.flag_keys
        )
        # Sets of --data share one plan's keys, so that all get the cap of the longest document.
        set_longest = longest if request.paths else max(named_documents.documents.lengths)
        entry, set_changes = fit_set(config, entry, world.home, heads, set_longest, request.flag_keys)
        choice = PlanChoice.evaluation(config, entry, heads=heads)
        is_cap_fixed = "context.eval_max_tokens_per_slot" in request.flag_keys
        longest_to_hold = 0 if is_cap_fixed else set_longest  # a cap that a flag gives is not raised
        for at_degree in _list_choices(choice, request.degrees, longest_to_hold):
            at_degree.check_longest_document(set_longest, world.home, f"the longest document ({set_longest} tokens)")
        entries.append(entry)
        changes |= dict.fromkeys(set_changes)
    return _Fit(checked, sets, config, configuration, tuple(entries), tuple(changes))


@dataclass(frozen=True)
class _Evaluator:
    """The evaluations of one subject."""

    fit: _Fit
    degrees: tuple[int, ...]
    world: World
    metrics: dict[str, dict[str, Metric]]  # by the name of a set of the run
    deadline: float  # of time.monotonic
    starts: Starts

    def run(self, log: LogLine, progress: Progress) -> SubjectResult:
        """Load the model, then evaluate each set at each degree."""
        fit = self.fit
        images = any(getattr(named_documents.documents, "items", ()) for named_documents in fit.sets)
        tokens = sum(sum(named_documents.documents.lengths) for named_documents in fit.sets)
        tokens_of_rank = tokens * max(1, len(self.degrees)) / len(self.world.home.ranks)
        compiled = choose_compiled_parts(fit.config.train.compiled, fit.configuration, tokens_of_rank)
        config = replace(fit.config, train=replace(fit.config.train, compiled=compiled))
        model, step = load_saved_model(fit.checked, config, fit.configuration, self.world, images=images)
        model.eval()
        use_machine(fit.config, self.world, log)
        gpu, slots = self.world.device.type == "cuda", self.world.home.slots
        price = partial(find_run_cost, fit.config, model.config, log, gpu=gpu, slots=slots)
        cost = run_on_every_rank(self.world, price, ConfigError)
        if "model" not in self.starts.parts:  # the second of two models is not part of the start
            self.starts.end_part("model")
            if gpu:
                log(str(self.starts))
        with StopSignal() as stop:
            sets = tuple(self._evaluate_sets(model, step, cost, stop, log, progress))
        digest = tokenizer_digest(fit.checked.tokenizer)
        return SubjectResult(fit.checked.subject.weights, fit.config, digest, sets, fit.changes)

    def _evaluate_sets(
        self,
        model: AnyModel,
        step: int,
        cost: Cost,
        stop: StopSignal,
        log: LogLine,
        progress: Progress,
    ) -> Iterator[SetResult]:
        """Yield the result of each set at each degree."""
        is_automatic = self.fit.config.run.timeout_seconds == AUTO and is_priced_here(self.fit.config, cost, self.world)
        limits = TimeLimits(self.world, is_automatic=is_automatic)
        bytes_of_ids = token_bytes(self.fit.checked.tokenizer.engine, model.config.get_text_config().vocab_size)
        for named_documents, entry in zip(self.fit.sets, self.fit.entries, strict=True):
            choice = PlanChoice.evaluation(self.fit.config, entry, cost=cost, heads=query_heads(model.config))
            if not self.degrees:
                lengths = named_documents.documents.lengths
                choice, _ = choose_degree_on_ranks(choice, lengths, self.world, log, name=named_documents.name)
            # Only the first rank compares and writes results; counting reads all tokens.
            text_bytes = _count_text_bytes(named_documents, bytes_of_ids) if is_first_rank(self.world) else ()
            sources = named_documents.documents.origins
            for at_degree in _list_choices(choice, self.degrees, max(named_documents.documents.lengths)):
                options = EvaluationOptions(
                    step=step,
                    name=named_documents.name,
                    loss_chunk_rows=self.fit.config.train.loss_chunk_rows,
                    metrics=self.metrics[entry.name],
                    token_bytes=bytes_of_ids,
                    attention_kernel=entry.attention_kernel or None,
                    stopped=partial(self._stop_reason, stop),
                    progress=partial(progress, _progress_title(self.fit, named_documents, at_degree)),
                    around=partial(limits.around_evaluation, ""),  # one key: the first evaluation has the longest limit
                )
                result = evaluate(model, named_documents.documents, at_degree, self.world, options)
                yield SetResult(result, sources, text_bytes)

    def _stop_reason(self, stop: StopSignal) -> str:
        """Return why to stop now, a signal or the time limit; "" to go on."""
        if stop.received:
            return f"{stop.received} was received"
        return "the time limit of --seconds is over" if time.monotonic() > self.deadline else ""


def _list_choices(choice: PlanChoice, degrees: Sequence[int], longest: int) -> list[PlanChoice]:
    """List the choice at each of some degrees, with caps that hold the longest document; without degrees as it is."""
    return [choice.at_degree(degree, longest=longest) for degree in degrees] or [choice]


def _progress_title(fit: _Fit, named_documents: NamedDocuments, choice: PlanChoice) -> str:
    """Return the title of an evaluation's progress: the weights, the set and the degree."""
    if choice.has_one_degree:
        degree = f"cp {choice.degree}"
    else:  # no degree to name, so the planner's name
        degree = "dynamic cp" if choice.planner == "dynamic" else choice.planner
    weights = fit.checked.subject.weights.title.rpartition("/")[2]
    return ", ".join(filter(None, (weights, named_documents.name, degree)))  # held-out documents have no name


def _count_text_bytes(named_documents: NamedDocuments, bytes_of_ids: np.ndarray | None) -> tuple[int, ...]:
    """Count the UTF-8 bytes of each document's predicted tokens, all except its first; () if bytes are not known."""
    if bytes_of_ids is None:
        return ()
    documents = named_documents.documents
    return tuple(int(bytes_of_ids[document[np.arange(1, len(document))]].sum()) for document in documents)
