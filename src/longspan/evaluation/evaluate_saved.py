"""Saved weights evaluated on sets of documents, at one degree or several; two of them one after the other.

What can be refused is refused before the first model is made.
"""

import hashlib
import math
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from longspan.checkpoint.checkpoint import check_checkpoint, find_checkpoint, holds_encoders, load_checkpoint
from longspan.checkpoint.files import checkpoints_root, read_state
from longspan.comm import World
from longspan.comm.all_ranks import (
    LogLine,
    StopSignal,
    first_rank_warns,
    is_first_rank,
    run_on_every_rank,
    run_on_first_rank,
)
from longspan.config.keys import AUTO, NOT_GIVEN
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import DataConfig, RunConfig
from longspan.corpus.build import corpus_line, with_images
from longspan.corpus.builder import build_documents
from longspan.corpus.corpus_settings import CorpusSettings, describe_left_out, describe_rows, make_recipe, special_line
from longspan.corpus.files import FileSums
from longspan.corpus.tokenizer import TextTokenizer, check_vocabulary, load_tokenizer, token_bytes
from longspan.data.documents import Corpus, CorpusDocuments
from longspan.data.step_order import sample_documents
from longspan.errors import CheckpointError, ConfigError, DataError, ModelError
from longspan.evaluation.evaluate import evaluate
from longspan.evaluation.metrics import EvaluationOptions, Metric, load_metrics
from longspan.evaluation.request import (
    Change,
    EvalRequest,
    SetResult,
    Subject,
    SubjectResult,
    changes_line,
    find_set,
    fit_node_size,
    fit_set,
)
from longspan.model import load_model
from longspan.model.load import check_folder
from longspan.model.seams.rope import position_limit, smallest_factor
from longspan.model.weights.file_names import vocabulary_files
from longspan.model.weights.hf_folder import read_configuration
from longspan.plan import Cost
from longspan.train.plans import PlanChoice, find_run_cost, query_heads
from longspan.train.plans.order import make_step_order
from longspan.train.plans.resolve import choose_degree_on_ranks, set_node_size, set_usual_partition, use_machine
from longspan.train.run_memory import use_training_rows
from longspan.train.starts import Starts
from longspan.train.training import (
    AnyModel,
    load_run_model,
    model_configuration,
    prepare_run_model,
    scale_positions,
    unread_model,
)

Sets = dict[str, CorpusDocuments]  # by name; "" is the name of the documents that a run holds out


def choose_sets(
    request: EvalRequest, subjects: Sequence[tuple[Subject, TextTokenizer]], world: World, log: LogLine
) -> list[Sets]:
    """Choose the sets of each subject, of the same documents; entered by all ranks.

    Two tokenizers read the same whole texts, and only bits per byte can be compared. Raises DataError or ConfigError on
    every rank.
    """
    (first, tokenizer), *_ = subjects
    if all(tokenizer_digest(other) == tokenizer_digest(tokenizer) for _, other in subjects):
        return [_find_sets(request, first, tokenizer, world, log)] * len(subjects)
    if not request.paths:
        raise ConfigError(
            f"the tokenizers of {first.folder} and {subjects[1][0].folder} differ, and the documents of a run are kept "
            "as tokens: only texts can be compared; give --data"
        )
    chosen = [_find_sets(request, *subject, world, log) for subject in subjects]
    for name, documents in chosen[0].items():
        _check_same_texts(name, documents.corpus, chosen[1][name].corpus)
    return chosen


def tokenizer_digest(tokenizer: TextTokenizer) -> str:
    """Return a text that is equal for tokenizers that give equal ids, before and behind texts too."""
    return " ".join((tokenizer.digest, *tokenizer.opening, "…", *tokenizer.closing))


def _find_sets(request: EvalRequest, subject: Subject, tokenizer: TextTokenizer, world: World, log: LogLine) -> Sets:
    if request.paths:
        sets = _read_texts(request, tokenizer, world, log)
    else:
        sets = run_on_every_rank(world, lambda: _open_run_sets(subject, request.sets), DataError)
    count = request.max_documents  # of each set, at even distances, so that all files are represented
    return {
        name: documents.corpus.select([documents.ids[i * len(documents) // count] for i in range(count)])
        if 0 < count < len(documents)
        else documents
        for name, documents in sets.items()
    }


def _open_run_sets(subject: Subject, names: Sequence[str]) -> Sets:
    run_dir, config = subject.weights.run_dir, subject.config
    if run_dir is None:
        raise ConfigError(
            f"{subject.weights.path} is a Hugging Face folder, which holds out no documents; give --data PATH (a file "
            "or folder of .txt .md .py .jsonl)"
        )
    if not names:
        corpus = Corpus(run_dir / "corpus")
        held_out = corpus.select(make_step_order(config, corpus).evaluation)
        if not held_out:
            raise DataError(f"{run_dir} holds out no documents (data.eval_documents is 0); give documents with --data")
        return {"": held_out}
    sets: Sets = {}
    for name in names:
        entry, folder = next(entry for entry in config.eval if entry.name == name), run_dir / "evaluation" / name
        try:
            corpus = Corpus(folder)
        except DataError as error:
            raise DataError(
                f"the evaluation set {name!r} is not in {folder}, where training keeps its documents "
                f"({error.__cause__}); give its texts: --data {name}={entry.path}"
            ) from error
        sets[name] = corpus.select(sample_documents(len(corpus), entry.documents, config.train.seed))
    return sets


def _read_texts(request: EvalRequest, tokenizer: TextTokenizer, world: World, log: LogLine) -> Sets:
    """The first rank of each host tokenizes; texts become documents as in the first subject's run, but for flags."""
    run_data, longest = request.subjects[0].config.data, request.max_document_tokens
    data = DataConfig(
        max_document_tokens=run_data.max_document_tokens if longest == NOT_GIVEN else longest,
        parse_special_tokens=run_data.parse_special_tokens,
        columns=run_data.columns,
        end_of_chat=run_data.end_of_chat,
    )
    host = socket.gethostname()
    hosts = world.control.gather_objects(host, "names of hosts")
    builder = hosts.index(host)  # the first rank on this host
    builds = builder == world.home.ranks.index(world.rank)
    with tempfile.TemporaryDirectory(prefix="longspan-eval-") if builds else nullcontext("") as folder:

        def build_corpora() -> None:
            for index, (_, path) in enumerate(request.paths if builds else ()):
                _build_corpus(replace(data, path=path), tokenizer, Path(folder, str(index)), log)

        run_on_every_rank(world, build_corpora, DataError)
        root = world.control.gather_objects(folder, "folders of hosts")[builder]

        def open_corpora() -> list[Corpus]:
            try:
                return [Corpus(Path(root, str(index), "corpus")) for index in range(len(request.paths))]
            except DataError as error:
                raise DataError(
                    f"{root} was made on this host ({host}), and a rank cannot open it: {error}; give hosts names of "
                    "their own, or set TMPDIR to a folder that they share"
                ) from error

        corpora = run_on_every_rank(world, open_corpora, DataError)
    sources = "".join(f"{source.name} {source.sha256}\n" for corpus in corpora for source in corpus.sources)
    digests = world.control.gather_objects(hashlib.sha256(sources.encode()).hexdigest(), "digests of texts")
    if len(set(digests)) > 1:
        other = next(other for other, digest in zip(hosts, digests, strict=True) if digest != digests[0])
        raise DataError(
            f"the files of --data differ between hosts {hosts[0]} and {other}; give a path on storage that they share, "
            "or copy the files again"
        )
    return {name: corpus.select(range(len(corpus))) for (name, _), corpus in zip(request.paths, corpora, strict=True)}


def _build_corpus(data: DataConfig, tokenizer: TextTokenizer, folder: Path, log: LogLine) -> None:
    settings = CorpusSettings(data)
    try:
        folder.mkdir()
        files = settings.files(folder)
        recipe = make_recipe(settings, files, FileSums().measure_files(files, log), tokenizer)
        for line in describe_rows(settings, recipe):
            log(line)
        manifest = build_documents(recipe, folder / "corpus", log)
    except DataError as error:
        raise DataError(str(error).replace("data.path", "--data", 1)) from error
    if manifest.special:
        log(special_line(manifest.special, parsed=manifest.parse_special_tokens))
    log(f"--data: {corpus_line(Corpus(folder / 'corpus'), [data.path])}")
    for line in describe_left_out(settings, folder, manifest, key="--max-document-tokens"):
        log(line)


def _check_same_texts(name: str, first: Corpus, other: Corpus) -> None:
    """Names of files show that both corpora lack the same short texts only where every file is one document."""
    left_out = first.manifest.left_out, other.manifest.left_out
    if any(texts.cut_texts for texts in left_out):
        raise DataError(
            f"texts of --data {name} are cut into documents, by two tokenizers at different places; give "
            "--max-document-tokens 0, which cuts none, to compare models of different tokenizers"
        )
    short = [texts.short_texts for texts in left_out]
    sources, other_sources = (corpus.select(range(len(corpus))).origins for corpus in (first, other))
    one_a_file = len(set(sources)) == len(sources)
    if sources != other_sources or (any(short) and not one_a_file):
        raise DataError(
            f"texts of --data {name} have fewer than 2 tokens ({short[0]:,} by one tokenizer, {short[1]:,} by the "
            "other), so that documents cannot be paired; leave these texts out"
        )


# Numbers of hidden states, over all layers, from which graphs save a rank more than the 8 s that they take to load: a
# compiled forward reads and writes about 20 fewer in bfloat16 for each, at 3 TB/s.
WORTH_COMPILING = 6e11

Progress = Callable[[str, int, int], None]  # what is evaluated, micro-batches done, all


def evaluate_saved(
    request: EvalRequest, world: World, log: LogLine, progress: Progress, starts: Starts | None = None
) -> tuple[SubjectResult, ...]:
    """Evaluate each subject; all ranks call it together. Nothing in a run's or a model's folder changes.

    Raises on all ranks what is missing or does not fit, and EvaluationStopped after a signal or beyond the time limit.
    `starts` has the parts of the start before this call.
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
    """Find the weights of a subject, their configuration and their tokenizer (or that of `tokenizer`); on all ranks."""
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

    `scaled`: flags gave a scaling of positions. Raises ConfigError with what lengthens the model, and the flag that
    cuts documents.
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

    The model has a tower and a projector with `images`, and where its checkpoint has these.
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
    checked: CheckedWeights
    sets: Sets
    config: RunConfig
    configuration: PreTrainedConfig
    entries: dict[str, EvalConfig]  # how each set is planned
    changes: tuple[Change, ...]


def _fit_subject(request: EvalRequest, checked: CheckedWeights, sets: Sets, world: World, log: LogLine) -> _Fit:
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
        images = any(getattr(documents, "items", ()) for documents in fit.sets.values())
        tokens = sum(sum(documents.lengths) for documents in fit.sets.values())
        tokens_of_rank = tokens * max(1, len(self.degrees)) / len(self.world.home.ranks)
        compiled = choose_compiled_parts(fit.config.train.compiled, fit.configuration, tokens_of_rank)
        config = replace(fit.config, train=replace(fit.config.train, compiled=compiled))
        model, step = load_saved_model(fit.checked, config, fit.configuration, self.world, images=images)
        model.eval()
        use_machine(fit.config, self.world)
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
            text_bytes = tuple[int, ...]()
            if bytes_of_ids is not None and is_first_rank(self.world):
                text_bytes = tuple(int(bytes_of_ids[x[np.arange(1, len(x))]].sum()) for x in documents)
            for at_degree in _list_choices(choice, self.degrees, max(documents.lengths)):
                options = EvaluationOptions(
                    step=step,
                    name=name,
                    metrics=self.metrics[entry.name],
                    token_bytes=bytes_of_ids,
                    stopped=stop_reason,
                    progress=partial(self.progress, _progress_title(fit, name, at_degree)),
                )
                yield SetResult(
                    evaluate(model, documents, at_degree, self.world, options), documents.origins, text_bytes
                )


def choose_compiled_parts(compiled: str, configuration: PreTrainedConfig, tokens_of_rank: float) -> str:
    """Return the parts to compile; in place of "auto", "none" for an evaluation soon done."""
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
