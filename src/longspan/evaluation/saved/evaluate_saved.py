"""Saved weights evaluated on sets of documents, at one degree or several; two of them one after the other.

What can be refused is refused before the first model is made.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from longspan.checkpoint.checkpoint import check_checkpoint, find_checkpoint, holds_encoders, load_checkpoint
from longspan.checkpoint.files import read_state
from longspan.checkpoint.store_path import checkpoints_root
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, first_rank_warns, is_first_rank, run_on_every_rank, run_on_first_rank
from longspan.comm.stop_signal import StopSignal
from longspan.config.keys import AUTO
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig
from longspan.corpus.build import with_images
from longspan.corpus.tokenizer import TextTokenizer, check_vocabulary, load_tokenizer, token_bytes
from longspan.data.documents import CorpusDocuments
from longspan.errors import CheckpointError, ConfigError, DataError, ModelError
from longspan.evaluation.evaluate import evaluate
from longspan.evaluation.metrics import EvaluationOptions, Metric, load_metrics
from longspan.evaluation.saved.documents import Sets, choose_sets, tokenizer_digest
from longspan.evaluation.saved.request import (
    Change,
    EvalRequest,
    Subject,
    changes_line,
    find_set,
    fit_node_size,
    fit_set,
)
from longspan.evaluation.saved.results import SetResult, SubjectResult
from longspan.model import load_model
from longspan.model.load import check_folder
from longspan.model.seams.rope import position_limit, smallest_factor
from longspan.model.weights.file_names import vocabulary_files
from longspan.model.weights.hf_folder import read_configuration
from longspan.plan import Cost
from longspan.train.long_documents import scale_positions
from longspan.train.memory.slot_rows import use_training_rows
from longspan.train.plans import PlanChoice, find_run_cost, query_heads
from longspan.train.plans.resolve import choose_degree_on_ranks, set_node_size, set_usual_partition, use_machine
from longspan.train.starts import Starts
from longspan.train.training import AnyModel, load_run_model, model_configuration, prepare_run_model, unread_model

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
    checked = [check_saved_weights(subject, request.tokenizer, world, log) for subject in request.subjects]
    sets = choose_sets(request, [(weights.subject, weights.tokenizer) for weights in checked], world, log)
    pairs = zip(checked, sets, strict=True)
    fits = [run_on_every_rank(world, partial(_fit_subject, request, *pair, world, log), ConfigError) for pair in pairs]
    if line := changes_line(fits[0].changes, len(world.home.ranks)):
        log(line)
    starts.end_part("data")
    evaluator = _Evaluator(request.degrees, world, metrics, deadline, starts, log, progress)
    return tuple(evaluator.evaluate_subject(fit) for fit in fits)  # one model at a time


def _load_set_metrics(request: EvalRequest) -> dict[str, dict[str, Metric]]:
    entries = (find_set(request.subjects[0].config, name, request.flag_keys) for name in ("", *request.sets))
    if request.metrics:
        return dict.fromkeys((entry.name for entry in entries), load_metrics(request.metrics, "--metrics"))
    return {entry.name: load_metrics(entry.metrics, entry.metrics_key) for entry in entries}


@dataclass(frozen=True)
class CheckedWeights:
    """Weights that are there: of this checkpoint (None: of the folder), with this configuration and tokenizer."""

    subject: Subject
    checkpoint: Path | None
    configuration: PreTrainedConfig
    tokenizer: TextTokenizer


def check_saved_weights(subject: Subject, tokenizer: str, world: World, log: LogLine) -> CheckedWeights:
    """Find the weights of a subject, their configuration and their tokenizer; entered by all ranks.

    `tokenizer` is the folder of another tokenizer to use; "": that of the weights.
    Raises CheckpointError, ModelError or DataError, on every rank, for what is missing, damaged or does not match.
    """
    weights, checkpoint = subject.weights, subject.weights.checkpoint
    if weights.run_dir is None:
        run_on_every_rank(world, lambda: check_folder(weights.path), ModelError)
    elif checkpoint is not None:
        check_checkpoint(checkpoint, world)
    else:
        checkpoint = find_checkpoint(checkpoints_root(weights.run_dir, subject.config.run.checkpoints), world, log)
        if checkpoint is None:
            raise CheckpointError(
                f"{weights.run_dir} has no checkpoint; train it first: longspan train {weights.run_dir}/config.toml"
            )
    configuration = run_on_every_rank(world, lambda: _read_subject_configuration(subject), ModelError)
    loaded = run_on_every_rank(world, lambda: _read_tokenizer(subject, tokenizer, configuration), ModelError)
    return CheckedWeights(subject, checkpoint, configuration, loaded)


def _read_subject_configuration(subject: Subject) -> PreTrainedConfig:
    run_dir = subject.weights.run_dir
    if run_dir is not None and not (run_dir / "config.json").is_file():
        raise CheckpointError(
            f"{run_dir} has no config.json, which names the class and sizes of its model; a run writes it when it "
            f"begins: longspan train {run_dir}/config.toml"
        )
    return read_configuration(subject.folder)


def _read_tokenizer(subject: Subject, tokenizer_folder: str, configuration: PreTrainedConfig) -> TextTokenizer:
    folder = Path(tokenizer_folder) if tokenizer_folder else subject.folder
    if not vocabulary_files(folder):
        raise DataError(
            f"no tokenizer.json in {folder}; name the folder of the model's tokenizer with --tokenizer, or put its "
            "files there"
        )
    tokenizer = load_tokenizer(folder).set_parsing(subject.config.data.parse_special_tokens)
    rows = configuration.get_text_config().vocab_size
    check_vocabulary(tokenizer.own_size, rows, tokenizer=str(folder), model=str(subject.weights.path))
    return tokenizer


def fit_positions(
    checked: CheckedWeights, longest: int, origin: str, *, scaled: bool, log: LogLine
) -> PreTrainedConfig:
    """Fit the configuration to a longest document of `longest` tokens, from source `origin`.

    `scaled`: flags gave a scaling of positions, which takes the place of the one that the model was trained with.
    Raises ConfigError for a document beyond the model's positions, with what lengthens the model, and the flag
    that cuts documents.
    """
    settings, configuration = checked.subject.config.model, checked.configuration
    if scaled:
        unscaled = model_configuration(checked.subject.config, configuration.get_text_config().vocab_size)
        return scale_positions(unscaled, settings, longest, origin, log, cut_by="--max-document-tokens")
    limit = position_limit(configuration)
    if limit is None or longest <= limit:
        return configuration
    raise ConfigError(
        f"the longest document has {longest} tokens ({origin}), and the model in {checked.subject.weights.path} knows "
        f"{limit} positions; {_advise_positions(checked, longest)}, or cut documents with --max-document-tokens {limit}"
    )


def _advise_positions(checked: CheckedWeights, longest: int) -> str:
    parameters: Any = getattr(checked.configuration, "rope_parameters", None) or {}
    rope_type, factor = parameters.get("rope_type", "default"), parameters.get("factor") or 1.0
    new_factor = smallest_factor(checked.configuration, longest)
    if rope_type == "default":
        return f"lengthen it with --model.rope_scaling yarn (a factor of {new_factor:g})"
    if checked.subject.config.model.rope_scaling:
        return (
            f"lengthen it with --model.rope_scaling {rope_type} --model.rope_factor {factor * new_factor:g} "
            f"(now {factor:g})"
        )
    return f"raise the factor of {rope_type} in its config.json from {factor:g} to {factor * new_factor:g}"


def load_saved_model(
    checked: CheckedWeights, config: RunConfig, configuration: PreTrainedConfig, world: World, *, images: bool = False
) -> tuple[AnyModel, int]:
    """Load the prepared model with the weights; returns the model, and the steps that trained it (0 for a folder).

    The model has a tower and a projector with `images`, and where its checkpoint has these. `config` has the home's
    [parallel] and the plans' [context]. Raises ConfigError where a GPU has no room for the model.
    """
    checkpoint = checked.checkpoint
    if checkpoint is None:
        load = partial(load_model, checked.subject.weights.path, dtype=config.model.dtype, sharded=True)
        with first_rank_warns(world):
            model = run_on_every_rank(world, lambda: load(config=configuration, images=images), ModelError)
        return prepare_run_model(config, world, model, training=False, images=images), 0

    def has_encoders() -> bool:
        encoders = holds_encoders(checkpoint)
        if images and not encoders:
            raise CheckpointError(
                f"the documents have images, and checkpoint {checkpoint} is of a language model alone, trained without "
                "any; evaluate it on text, or its base model's folder on these documents"
            )
        return encoders

    encoders = run_on_first_rank(world, has_encoders, CheckpointError)
    state = run_on_first_rank(world, lambda: read_state(checkpoint), CheckpointError)
    adapts = bool(state.get("config", {}).get("lora", {}).get("rank"))  # then the checkpoint has only the adapter
    load = partial(load_run_model, vocabulary=configuration.get_text_config().vocab_size) if adapts else unread_model
    model = run_on_every_rank(world, lambda: load(config, configuration=configuration, images=encoders), ModelError)
    prepared = prepare_run_model(config, world, model, training=False, images=encoders)
    if not adapts or config.lora.rank:  # without its adapter a model is the base model, which `prepare` has read
        load_checkpoint(checkpoint, prepared, None, world)
    return prepared, int(state["step"])


@dataclass(frozen=True)
class _Fit:
    """Weights and documents, and the configuration under which they fit each other and the ranks."""

    checked: CheckedWeights
    sets: Sets
    config: RunConfig
    configuration: PreTrainedConfig
    entries: dict[str, EvalConfig]  # how each set is planned
    changes: tuple[Change, ...]


def _fit_subject(request: EvalRequest, checked: CheckedWeights, sets: Sets, world: World, log: LogLine) -> _Fit:
    """Fit a subject to its longest document: positions of the model, then images, then each set's plan to this home."""
    longest_of = {name: max(documents.lengths) for name, documents in sets.items()}
    longest_name = max(longest_of, key=longest_of.__getitem__)
    longest, longest_set = longest_of[longest_name], sets[longest_name]
    scaled = bool(request.flag_keys & {"model.rope_scaling", "model.rope_factor"})
    origin = longest_set.origin(longest_set.lengths.index(longest))
    configuration = fit_positions(checked, longest, origin, scaled=scaled, log=log)
    if folder := checked.tokenizer.folder:
        sets = {name: with_images(documents, configuration, folder) for name, documents in sets.items()}
    # Plans of both subjects follow the first one's keys; a run's training has chosen rows where its limit is "auto".
    first, heads = request.subjects[0], query_heads(configuration)
    context = first.config.context if first.weights.run_dir is None else use_training_rows(first.config).context
    config = set_usual_partition(replace(checked.subject.config, context=context))
    config, host_changes = fit_node_size(config, world.node_size, request.flag_keys)
    config = set_node_size(config, world)
    entries, changes = dict[str, EvalConfig](), dict.fromkeys((*request.home_changes, *host_changes))
    for name, set_longest in longest_of.items():
        entry = find_set(config, name if name in request.sets else "", request.flag_keys)
        # Sets of --data share one plan's keys, so that all get the cap of the longest document.
        rows = longest if request.paths else set_longest
        entry, set_changes = fit_set(config, entry, world.home, heads, rows, request.flag_keys)
        choice = PlanChoice.evaluation(config, entry, heads=heads)
        is_cap_fixed = "context.eval_max_tokens_per_slot" in request.flag_keys  # a cap that a flag gives is not raised
        for at_degree in _list_choices(choice, request.degrees, 0 if is_cap_fixed else rows):
            at_degree.check_longest_document(rows, world.home, f"the longest document ({rows} tokens)")
        entries[name] = entry
        changes |= dict.fromkeys(set_changes)
    return _Fit(checked, sets, config, configuration, entries, tuple(changes))


@dataclass(frozen=True)
class _Evaluator:
    """What the evaluations of every subject share."""

    degrees: tuple[int, ...]
    world: World
    metrics: dict[str, dict[str, Metric]]  # by the name of a set of the run
    deadline: float  # of time.monotonic
    starts: Starts
    log: LogLine
    progress: Progress

    def evaluate_subject(self, fit: _Fit) -> SubjectResult:
        """Load the model, then evaluate each set at each degree."""
        images = any(getattr(documents, "items", ()) for documents in fit.sets.values())
        tokens = sum(sum(documents.lengths) for documents in fit.sets.values())
        tokens_of_rank = tokens * max(1, len(self.degrees)) / len(self.world.home.ranks)
        compiled = choose_compiled_parts(fit.config.train.compiled, fit.configuration, tokens_of_rank)
        config = replace(fit.config, train=replace(fit.config.train, compiled=compiled))
        model, step = load_saved_model(fit.checked, config, fit.configuration, self.world, images=images)
        model.eval()
        use_machine(fit.config, self.world, self.log)
        gpu, slots = self.world.device.type == "cuda", self.world.home.slots
        price = partial(find_run_cost, fit.config, model.config, self.log, gpu=gpu, slots=slots)
        cost = run_on_every_rank(self.world, price, ConfigError)
        if "model" not in self.starts.parts:  # the second of two models is not part of the start
            self.starts.end_part("model")
            if gpu:
                self.log(str(self.starts))
        with StopSignal() as stop:
            sets = tuple(self._evaluate_sets(fit, model, step, cost, stop))
        digest = tokenizer_digest(fit.checked.tokenizer)
        return SubjectResult(fit.checked.subject.weights, fit.config, digest, sets, fit.changes)

    def _evaluate_sets(
        self, fit: _Fit, model: AnyModel, step: int, cost: Cost, stop: StopSignal
    ) -> Iterator[SetResult]:
        bytes_of_ids = token_bytes(fit.checked.tokenizer.engine, model.config.get_text_config().vocab_size)

        def stop_reason() -> str:
            if stop.received:
                return f"{stop.received} was received"
            return "the time limit of --seconds is over" if time.monotonic() > self.deadline else ""

        for name, documents in fit.sets.items():
            entry = fit.entries[name]
            choice = PlanChoice.evaluation(fit.config, entry, cost=cost, heads=query_heads(model.config))
            if not self.degrees:
                choice, _ = choose_degree_on_ranks(choice, documents.lengths, self.world, self.log, name=name)
            # Only the first rank compares and writes results; counting reads all tokens.
            text_bytes = _count_text_bytes(documents, bytes_of_ids) if is_first_rank(self.world) else ()
            for at_degree in _list_choices(choice, self.degrees, max(documents.lengths)):
                options = EvaluationOptions(
                    step=step,
                    name=name,
                    loss_chunk_rows=fit.config.train.loss_chunk_rows,
                    metrics=self.metrics[entry.name],
                    token_bytes=bytes_of_ids,
                    stopped=stop_reason,
                    progress=partial(self.progress, _progress_title(fit, name, at_degree)),
                )
                yield SetResult(
                    evaluate(model, documents, at_degree, self.world, options), documents.origins, text_bytes
                )


def choose_compiled_parts(compiled: str, configuration: PreTrainedConfig, tokens_of_rank: float) -> str:
    """Return the parts to compile, those of train.compiled; in place of "auto", "none" for an evaluation soon done.

    >>> choose_compiled_parts("auto", configuration, 50_000)
    'none'
    """
    text = configuration.get_text_config()
    pays = tokens_of_rank * text.hidden_size * text.num_hidden_layers >= WORTH_COMPILING
    return compiled if compiled != AUTO or pays else "none"


def _list_choices(choice: PlanChoice, degrees: Sequence[int], longest: int) -> list[PlanChoice]:
    return [choice.at_degree(degree, longest=longest) for degree in degrees] or [choice]


def _progress_title(fit: _Fit, name: str, choice: PlanChoice) -> str:
    if choice.has_one_degree:
        degree = f"cp {choice.degree}"
    else:  # no degree to name, so the planner's name
        degree = "dynamic cp" if choice.planner == "dynamic" else choice.planner
    weights = fit.checked.subject.weights.title.rpartition("/")[2]
    return ", ".join(filter(None, (weights, name, degree)))  # held-out documents have no name


def _count_text_bytes(documents: CorpusDocuments, bytes_of_ids: np.ndarray | None) -> tuple[int, ...]:
    if bytes_of_ids is None:
        return ()
    return tuple(int(bytes_of_ids[document[np.arange(1, len(document))]].sum()) for document in documents)
