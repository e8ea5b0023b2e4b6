"""`set_up`: open the data and the model of a configuration, resume from a checkpoint, resolve "auto" values."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from longspan.checkpoint.base import (
    BASE,
    TEACHER,
    check_base_unchanged,
    needs_base_weights,
    record_base_weights,
)
from longspan.checkpoint.checkpoint import find_checkpoint, load_checkpoint
from longspan.checkpoint.files import (
    checkpoints_root,
    read_state,
    refuse_linked_root,
    remove_unfinished_saves,
    state_value,
)
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank, silence_warnings_of_other_ranks
from longspan.comm.world_machine import set_world_machine
from longspan.config.defaults import warn_about_small_updates
from longspan.config.file import to_toml
from longspan.config.keys import AUTO
from longspan.config.local_folders import absolute_path
from longspan.config.sections import ModelConfig, RunConfig
from longspan.corpus.fit_to_model import check_ids_in_vocabulary
from longspan.data.run_epochs import source_lines, with_epoch_steps
from longspan.data.stream import ORDER, ORDER_OF_SOURCES
from longspan.errors import CheckpointError, ConfigError, ModelError, RunFolderError
from longspan.evaluation.reference import compute_references, read_reference_log_probs, reference_digest
from longspan.files import read_json, write_atomically
from longspan.model.load import torch_dtype
from longspan.model.marks import find_language_model
from longspan.model.seams.randomness import refuse_randomness
from longspan.model.weights.hf_folder import planned_configuration, read_configuration, save_configuration
from longspan.model.weights.tokenizer_files import GENERATION, read_stop_token_ids, replace_with_copy
from longspan.plan import MemoryPlan
from longspan.plan.memory.teacher_bytes import PlannedTeacher
from longspan.resolve.facts import document_facts
from longspan.resolve.kept_rows import resolve_with_kept_rows
from longspan.resolve.planner_config import PlannerConfig, query_heads
from longspan.resolve.resolved import Resolved, resolve
from longspan.resolve.run_cost import KEY, planned_teacher, read_run_machine, set_node_size
from longspan.run.checks import refuse_encoder_without_images
from longspan.run.run_data import RunData, TrainingRun, open_data, replace_eval_tables
from longspan.run.world_facts import gather_facts, resolve_on_ranks
from longspan.train.optim.schedule import Schedule
from longspan.train.run_model.load import (
    depths_line,
    load_run_model,
    make_model_without_weights,
    read_model_configuration,
)
from longspan.train.run_model.prepare import AnyModel, check_run_model, prepare_run_model, read_run_rules
from longspan.train.run_model.rope_scaling import scale_positions
from longspan.train.run_model.teacher import (
    check_teacher,
    check_teacher_reads_documents,
    prepare_teacher,
    read_teacher_configuration,
    read_teacher_rules,
)
from longspan.train.start.start_times import Starts
from longspan.train.training import build_run_optimizer


def write_model_files(
    directory: Path,
    settings: ModelConfig,
    configuration: PreTrainedConfig,
    architecture: str,
    log: LogLine,
    ends: Mapping[str, int],
    *,
    goes_on: bool = False,
    adapter: bool = False,
) -> None:
    """Write config.json, as the run trains the model, and generation_config.json into a folder; the config.json of a
    run that `goes_on` stays.

    The dtype of config.json is that in which models are saved: the one that the source of the model names, or else the
    run's. To eos_token_id of generation_config.json the tokens at which answers end are added (`ends`, ids by name).
    Added tokens, and a dtype other than the run's, are logged. Raises DataError for a generation_config.json that
    cannot be read.
    """
    source = Path(settings.source)
    config = deepcopy(configuration)
    saved_dtype = torch_dtype(settings.dtype)
    if settings.source and isinstance(named := configuration.dtype, torch.dtype) and named.is_floating_point:
        saved_dtype = named
    if goes_on and (directory / "config.json").is_file():
        saved_dtype = read_configuration(directory).dtype or saved_dtype
    else:
        config.architectures = [architecture]
        config.dtype = saved_dtype
        save_configuration(config, directory)
    # First the source's own generation_config.json; model.config may name a file, beside which it then is.
    if settings.source:
        folder = source.parent if source.is_file() else source
        replace_with_copy(folder / GENERATION, directory / GENERATION)
    else:
        (directory / GENERATION).unlink(missing_ok=True)
    file = directory / GENERATION
    if file.is_file():
        read_stop_token_ids(directory)  # raises for a file that cannot be read
        generation = read_json(file)
    else:
        generation = GenerationConfig.from_model_config(config).to_diff_dict()
    generation.pop("_from_model_config", None)
    eos: Any = generation.get("eos_token_id")
    stops: list[int] = [*eos] if isinstance(eos, list) else [eos] * (eos is not None)
    missing = [name for name, end in ends.items() if end not in stops]
    stops += [ends[name] for name in missing]
    if missing:
        write_atomically(file, json.dumps({**generation, "eos_token_id": stops}, indent=2) + "\n")
        name = settings.source or settings.preset_name
        alone = "; with the adapter alone give it to generate()" if adapter else ""
        log(
            f"answers end with {' and '.join(missing)}, at which {name} does not stop: "
            f"{'merged' if adapter else 'saved'} models get eos_token_id {stops} in generation_config.json{alone}"
        )
    if saved_dtype != torch_dtype(settings.dtype):
        log(
            f"model/ will be saved in {str(saved_dtype).removeprefix('torch.')}, the dtype of {source}; parameters and "
            f"checkpoints are {settings.dtype}, which longspan export --dtype {settings.dtype} keeps"
        )


def set_up_model(
    data: RunData,
    config: RunConfig,
    configuration: PreTrainedConfig,
    memory: MemoryPlan | None,
    world: World,
    log: LogLine,
    *,
    goes_on: bool,
    reads_weights: bool,
) -> AnyModel:
    """Load the run's model with a configuration that fits its data, write its files (`write_model_files`) into the
    run's folder, and return it prepared; entered by all ranks.

    Without `reads_weights` a checkpoint has them; under [lora] the base model is read.
    """
    if config.mtp.num_layers and reads_weights:
        log(run_on_every_rank(world, partial(depths_line, config, configuration), ModelError))
    set_images = [len(getattr(s.documents, "items", ())) for s in data.sets]  # texts alone have no items
    image_count = len(data.corpus.images or ()) + sum(set_images)
    refuse_encoder_without_images(config, image_count)
    images = image_count > 0
    if data.corpus.labels is not None and data.corpus.unit == 1:  # labels of documents, not of pairs
        from longspan.train.terms.scores import refuse_other_labels

        refuse_other_labels(configuration.problem_type, config.model.num_labels, data.corpus.labels.shape[1])

    load = load_run_model if reads_weights or config.lora.rank else make_model_without_weights
    load_model = partial(load, config, configuration=configuration, images=images)
    with silence_warnings_of_other_ranks(world):
        model: Any = run_on_every_rank(world, load_model, ModelError)
    if data.corpus.labels is not None:  # transformers finds the token that is scored by it, also in the saved model
        model.config.pad_token_id = configuration.pad_token_id = data.corpus.pad
    write = partial(
        write_model_files,
        Path(config.run.dir),
        config.model,
        configuration,
        type(model).__name__,
        log,
        data.corpus.manifest.ends,
        goes_on=goes_on,
        adapter=config.lora.rank > 0,
    )
    run_on_first_rank(world, write, RunFolderError)
    return prepare_loaded_model(config, world, model, memory, images=images)


def prepare_loaded_model(
    config: RunConfig, world: World, model: Any, memory: MemoryPlan | None, *, images: bool = False
) -> AnyModel:
    """Prepare a loaded model as a resolved configuration and its plan of memory have it, and refuse one that draws
    random numbers of its own; entered by all ranks.
    """
    prepared = prepare_run_model(config, world, model, memory=memory, images=images)
    refuse_randomness(find_language_model(prepared))
    return prepared


# What a resumed run may not change: the weights and the documents of a step would no longer be the same run's.
_FIXED_SECTIONS = ("model", "data", "lora", "teacher")
# Keys of these sections that may change: a checkpoint holds parameters in model.dtype, whatever they are computed in.
_FREE_KEYS = ("model.compute_dtype", "model.download", "data.share_prefixes", "teacher.offload_weights")
_FIXED_KEYS = ("mtp.num_layers", "mtp.train_whole", "mtp.weights", "train.seed", "train.tokens_per_step")
_FIXED_KEYS += ("train.freeze", "train.loss", "optimizer.class", "optimizer.arguments", "evaluation.documents")
# These keys decide whose weights RUN/model has.
_KEYS_OF_BEST = ("checkpoint.keep_best", "evaluation.patience")


def checkpoint_to_resume(config: RunConfig, world: World, log: LogLine) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint that this run resumes from, with its state, or None and {}; entered by all ranks. Saves
    that were not finished are removed.

    Raises CheckpointError where `checkpoint.resume` does not allow what is there or no checkpoint is undamaged, and
    ConfigError for the checkpoint of a run with other fixed keys.
    """
    root = checkpoints_root(Path(config.run.dir), config.checkpoint.dir)
    if not config.checkpoint.dir:
        run_on_first_rank(world, partial(refuse_linked_root, root), CheckpointError)
    checkpoint = None
    if run_on_first_rank(world, root.is_dir, CheckpointError):
        run_on_first_rank(world, partial(remove_unfinished_saves, root, log), CheckpointError)
        checkpoint = find_checkpoint(root, world, log, note=True)
    if checkpoint is None:
        if config.checkpoint.resume == "must":
            raise CheckpointError(
                f"checkpoint.resume is 'must' and there is no checkpoint in {root}; use 'auto' to begin a run"
            )
        return None, {}
    if config.checkpoint.resume == "never":
        raise CheckpointError(
            f"checkpoint.resume is 'never' and {checkpoint} is there; set run.dir to a new folder, or use 'auto'"
        )
    state = run_on_first_rank(world, partial(read_state, checkpoint), CheckpointError)
    _check_same_run(config, state, checkpoint)
    return checkpoint, state


def check_steps_left(
    config: RunConfig, data: RunData, checkpoint: Path, state: dict[str, Any], log: LogLine
) -> None:
    """Raise ConfigError for a checkpoint beyond the last step, and where other train.epochs would let the next step
    begin at another document.

    A finished run is also refused under changed keys, but for those of [run], and of [checkpoint] and [evaluation] that
    do not decide whose weights RUN/model has, node_size, and any that is "auto" now; otherwise it is logged that the
    run is shown.
    """
    if state["step"] > config.train.steps:
        key = "train.epochs" if config.train.epochs else "train.steps"
        raise ConfigError(
            f"{checkpoint} is at step {state['step']}, beyond train.steps {config.train.steps}; raise {key}"
        )
    begin = data.order.begin_of_step(state["step"])
    if begin != state.get("begin"):
        epochs, steps = (state_value(checkpoint, state, "config", "train", key) for key in ("epochs", "steps"))
        raise ConfigError(
            f"under train.epochs {config.train.epochs:g} step {state['step'] + 1} does not begin where {checkpoint} "
            "ends, and some documents would be trained on once more or once less; it was "
            f"{epochs:g} then, with train.steps {steps}: set both back, or set run.dir to a new "
            "folder"
        )
    if state["step"] < config.train.steps:
        return
    sections_before, sections_now = _comparable_configurations(config, state)
    changes = [
        f"{section}.{key} was {sections_before[section][key]!r} and is {value!r} now"
        for section in sorted(sections_now.keys() & sections_before.keys())
        for key, value in sorted(sections_now[section].items())
        if section not in ("run", "checkpoint", "evaluation") or f"{section}.{key}" in _KEYS_OF_BEST
        if key in sections_before[section] and key != "node_size"
        if (section, key) != ("model", "path")  # `_check_same_run` has compared it
        if value not in (absolute_path(sections_before[section][key]), AUTO)
    ]
    if changes:
        raise ConfigError(
            f"the run has come to its end at step {config.train.steps} ({checkpoint}), and nothing is left to train: "
            f"{'; '.join(changes)}. Set them back to see the run, raise train.steps to train on with them, or set "
            "run.dir to a new folder"
        )
    log("the run has come to its end: it is shown; its config.toml and what is in metrics.jsonl stay")


def _comparable_configurations(config: RunConfig, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both as JSON gives them back, and model.preset with the name of the default preset where none was given."""
    tables = list[dict[str, Any]]()
    for sections in (state.get("config", {}), json.loads(json.dumps(config.tables()))):
        model = sections.get("model", {})
        named = ModelConfig(**{key: model.get(key, "") for key in ("preset", "path", "config")})
        tables.append({**sections, "model": {**model, "preset": named.preset_name}})
    before, now = tables
    return before, now


def _check_same_run(config: RunConfig, state: dict[str, Any], path: Path) -> None:
    """A key that the checkpoint lacks, or that is "auto" now, is not compared. `path` is the checkpoint of `state`."""
    order = ORDER_OF_SOURCES if config.data.sources else ORDER
    if state.get("order") != order:
        raise CheckpointError(
            f"{path} was saved by a run with order {state.get('order')} of documents, and this version of longspan has "
            f"order {order}: resume it with the version that saved it, or set run.dir to a new folder"
        )
    sections_before, sections_now = _comparable_configurations(config, state)
    fixed = [f"{section}.{key}" for section in _FIXED_SECTIONS for key in sections_now[section]] + list(_FIXED_KEYS)
    # With an adapter, checkpoints hold only trained parts.
    if config.lora.rank:
        fixed.append("encoder.trainable")
    free = set[str](_FREE_KEYS)
    # with that file `check_base_unchanged` compares the weights themselves
    if Path(config.run.dir, BASE).is_file():
        free |= {TEACHER, "model.path"} if needs_base_weights(config) else {TEACHER}
    for name in (name for name in fixed if name not in free):
        section, _, key = name.partition(".")
        value_before = sections_before.get(section, {}).get(key)
        value = sections_now[section][key]
        # "auto" may follow any value, but not that of model.frozen: an adapter belongs to the values of the weights
        # that it was trained over
        always_allowed = () if name == "model.frozen" else (AUTO,)
        if value_before is not None and value not in (absolute_path(value_before), *always_allowed):
            raise ConfigError(
                f"{name} was {value_before!r} when {path} was saved and is {value!r} now; set it back, or set run.dir "
                "to a new folder"
            )


def open_run_documents(
    config: RunConfig, checkpoint: Path | None, state: dict[str, Any], world: World, log: LogLine
) -> tuple[RunConfig, RunConfig, RunData]:
    """Open the documents of a run, and settle what they and the world decide; entered by all ranks.

    Returns the configuration, with node_size, the documents held out and the steps of train.epochs; the one to write as
    config.toml, with node_size as it was given and absolute folders; and the data. The world gets the machine that
    `run.machine` names. Before a corpus is made, a new run's model is checked and the sum of its base weights kept, and
    a run that goes on finds the configuration of its model, and its base weights, unchanged. Afterwards schedule, steps
    left and longest documents are checked. Raises ConfigError, DataError, ModelError or CheckpointError, the same on
    every rank.
    """
    if checkpoint is not None and config.evaluation.documents == AUTO:
        documents = state_value(checkpoint, state, "config", "evaluation", "documents")
        config = config.with_keys("evaluation", documents=documents)
    node_size = config.context.node_size
    config = set_node_size(config, world.node_size)
    if config.run.machine:
        set_world_machine(world, partial(read_run_machine, config), KEY)
    if checkpoint is not None:
        check = partial(check_base_unchanged, Path(config.run.dir), config, world.device.type, goes_on=True)
        if line := run_on_first_rank(world, check, ModelError):
            log(line)
    model_config = run_on_every_rank(
        world, lambda: read_model_configuration(config, config.data.vocab_size), ModelError
    )
    teacher = None
    if config.distils:
        teacher = run_on_every_rank(world, partial(read_teacher_configuration, config), ModelError)
    rules = None  # the data's plans need them, and plans of memory
    # What is wrong with the model is found before a corpus is made.
    if checkpoint is None:
        check = partial(check_run_model, config, world, model_config)
        lines, rules = run_on_every_rank(world, check, ModelError)
        for line in lines:
            log(line)
        run_on_first_rank(world, partial(record_base_weights, Path(config.run.dir), config), ModelError)
    elif config.data.share_prefixes == AUTO:
        rules = run_on_every_rank(world, partial(read_run_rules, config, world, model_config), ModelError)
    if teacher is not None:
        if checkpoint is None:
            run_on_every_rank(world, partial(check_teacher, config, world, teacher), ModelError)
        if rules is not None:
            of_teacher = run_on_every_rank(world, partial(read_teacher_rules, config, world, teacher), ModelError)
            rules = rules.with_other(of_teacher)
    data = open_data(config, model_config, checkpoint, world, log, rules, teacher)
    config = config.with_keys("evaluation", documents=data.order.held_out_texts)
    config = with_epoch_steps(config, data.order, log)
    Schedule.of(config.optimizer, config.train.steps)  # raises where the schedule does not fit the steps
    run_section, checkpoint_section = (
        replace(section, dir=str(Path(section.dir).absolute()) if section.dir else "")
        for section in (config.run, config.checkpoint)
    )
    as_written = replace(
        config,
        # The file keeps the given number: a run that goes on may be on other hosts.
        context=replace(config.context, node_size=node_size),
        run=run_section,
        checkpoint=checkpoint_section,
    )
    for line in source_lines(config, data.order) if config.data.sources else ():
        log(line)
    if checkpoint is not None:
        check_steps_left(config, data, checkpoint, state, log)
    data.check_longest_documents(config, world)
    return config, as_written, data


def plan_teacher(config: RunConfig, world: World, configuration: Any) -> PlannedTeacher:
    """Return the teacher of a run as its plans count it."""
    planned = planned_configuration(configuration, config.teacher.path)
    return planned_teacher(config, planned, gpu=world.device.type == "cuda")


def resolve_run(
    config: RunConfig, data: RunData, configuration: Any, world: World, log: LogLine, *, done: int
) -> Resolved:
    """Decide what the configuration leaves open, by the documents of the steps after `done`; entered by all ranks.

    Rows of a slot that an earlier start chose on as many ranks, under these keys, hold again.
    """
    facts = gather_facts(
        config,
        world,
        configuration,
        done=done,
        teacher=None if data.teacher is None else plan_teacher(config, world, data.teacher),
        **document_facts(
            config, data.order, data.corpus, {s.name: s.documents.lengths for s in data.sets if s.name}
        ),
    )
    decide = resolve_with_kept_rows if config.context.max_tokens_per_slot == AUTO else resolve
    return resolve_on_ranks(config, facts, world, log, decide)


def set_up(
    config: RunConfig, world: World, log: LogLine, starts: Starts, stopped: Callable[[], str] | None = None
) -> TrainingRun:
    """Begin a run, or resume it from its newest checkpoint, under a configuration that `check_config` has passed: open
    its data, decide what is open, load and prepare the model, make the optimizer, and write config.toml. All ranks call
    it together, before step 1.

    Raises ConfigError, DataError, ModelError or CheckpointError, the same on every rank, for what does not fit.
    `starts` notes how long the parts of the set-up take; `stopped` as of EvaluationOptions.
    """
    checkpoint, state = checkpoint_to_resume(config, world, log)
    config, as_written, data = open_run_documents(config, checkpoint, state, world, log)
    vocabulary = data.corpus.manifest.tokenizer_size if config.data.tokenizer else config.data.vocab_size
    configuration = run_on_every_rank(world, lambda: read_model_configuration(config, vocabulary), ModelError)
    for corpus in data.corpora:
        check_ids_in_vocabulary(corpus, configuration, config.model.source or config.model.preset_name)
    configuration = scale_positions(configuration, config.model, *data.longest, log)
    if data.teacher is not None:
        teacher = scale_positions(data.teacher, config.teacher.as_model(), *data.longest, log)
        check_teacher_reads_documents(config, world, data.corpora, teacher)
        data = replace(data, teacher=teacher)
    starts.end_part("data")
    done = int(state.get("step", 0))
    resolved = resolve_run(config, data, configuration, world, log, done=done)
    config = resolved.config
    memory = resolved.memory
    data.check_longest_documents(config, world)  # again: the longest document may need more rows than fit
    starts.end_part("plan of memory")
    reference_documents = data.list_reference_documents(config, done) if config.train.needs_reference else ()
    has_references = True
    digest = ""
    if reference_documents:
        digest = reference_digest(config, configuration, world)
        has_references = read_reference_log_probs(reference_documents, digest, world, log)
    goes_on = checkpoint is not None
    # what the reference gives must be computed with the base weights: they are loaded even if a checkpoint follows
    reads_weights = not (goes_on and has_references)
    model = set_up_model(
        data, config, configuration, memory, world, log, goes_on=goes_on, reads_weights=reads_weights
    )
    starts.end_part("model")
    teacher_model = None
    if data.teacher is not None:
        teacher_model = prepare_teacher(config, world, data.teacher, memory)
        starts.end_part("teacher")
    world.seed = config.train.seed
    optimizer = build_run_optimizer(config, world, model, memory=memory)
    if not has_references:
        choice = PlannerConfig.training(config, cost=resolved.cost, heads=query_heads(configuration, data.teacher))
        compute_references(model, reference_documents, digest, config, choice, world, log, stopped)
        starts.end_part("reference")
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, optimizer, world)
        log(f"going on from {checkpoint}: {done} of {config.train.steps} steps are done")
    if done < config.train.steps:  # a finished run keeps the configuration that it was trained with
        chosen = replace(config, run=as_written.run, checkpoint=as_written.checkpoint)
        write = partial(write_atomically, Path(config.run.dir) / "config.toml", to_toml(as_written, chosen=chosen))
        run_on_first_rank(world, write, RunFolderError)
        warn_about_small_updates(config, log)
    starts.end_part("optimizer and costs")
    return TrainingRun(
        config,
        world,
        model,
        optimizer,
        resolved.cost,
        data.corpus,
        data.order,
        done,
        replace_eval_tables(data.sets, config),
        resolved.reasons,
        memory=memory,
        teacher=teacher_model,
    )
