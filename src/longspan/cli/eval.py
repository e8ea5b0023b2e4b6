"""`longspan eval`: saved weights evaluated on documents, at any degree, on any number of ranks."""

import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from longspan.cli.flags import (
    Groups,
    Repeated,
    Word,
    check_flags_at_least,
    parse_flags,
    split_flags,
    write_text_file,
)
from longspan.cli.processes import (
    Device,
    Processes,
    choose_processes,
    compile_attention_ahead,
    count_host_ranks,
    has_torchrun,
    print_note,
    prints_results,
    run_on_ranks,
)
from longspan.config.defaults import resolve_defaults
from longspan.config.keys import NOT_GIVEN, section_keys
from longspan.config.plan_section import EvaluationPlan, PlanSection, inherit_keys
from longspan.config.sections import (
    ContextConfig,
    DataConfig,
    EncoderLayout,
    MachineSection,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from longspan.corpus.sources.find_files import find_root
from longspan.errors import ConfigError, plural
from longspan.evaluation.fit_layout import HOME, fit_evaluation_plans, fit_home_to_ranks, layout_changes
from longspan.evaluation.request import (
    EvalRequest,
    SavedWeights,
    Subject,
    find_saved_weights,
    load_saved_config,
    parse_named_paths,
)
from longspan.evaluation.result import HELD_OUT, evaluation_table
from longspan.evaluation.saved_results import (
    SubjectResult,
    differences_by_set,
    document_rows,
    results_record,
)
from longspan.files import as_json, json_safe_values, os_error_text, read_json
from longspan.hub import find_local_path
from longspan.launch.output import keep_prints_from_failing
from longspan.launch.stop_signals import block_signals
from longspan.plain_text import text_table
from longspan.report.evaluation_page import eval_page
from longspan.resolve.planner_config import home_of
from longspan.run.checks import check_config
from longspan.run.facts import RunFacts
from longspan.run.progress import ProgressDisplay
from longspan.train.start.gpu_imports import begin_gpu_imports
from longspan.train.start.start_times import Starts

PROG = "longspan eval"
TARGET = "a run's folder, a checkpoint or a Hugging Face folder"
# --compare takes this word.
BASE = "base"
PLAN_KEYS = [key.name for key in section_keys(PlanSection)]


@dataclass(frozen=True)
class SavedModel:
    """How the saved model is held and computed."""

    dtype: Literal["", "float32", "float64", "bfloat16"] = ""
    """Parameters: float32, float64 or bfloat16. Default: as the run has them; of a folder: float32."""
    compute_dtype: Literal["", "auto", "float32", "bfloat16", "float64"] = ""
    """Arithmetic: auto (bfloat16 on GPUs, as dtype on CPUs), float32, bfloat16 or float64. Default: as in the run; of a
    folder: auto."""
    rope_scaling: str = ""
    """yarn or linear: scale rotary positions for documents beyond the model's max_position_embeddings, by the factor
    that the longest document needs, rounded up to 0.25, or by one of your own, as in yarn:4. Default: as the model has
    been trained."""


@dataclass(frozen=True)
class EvalFlags:
    """Evaluate a run, a checkpoint or a Hugging Face folder: loss and metrics of its documents at any degree.

    A run's own configuration applies, except for the flags given here; on other ranks than it had, each degree becomes
    the nearest one that fits, which is said. Nothing in the folder changes.

    longspan eval runs/first --degrees 1,2,4

    longspan eval runs/first --data chats.jsonl --compare Qwen3-0.6B
    """

    SHOWN: ClassVar[Groups] = {
        "documents": ("--data", "--max_document_tokens"),
        "layout": ("--degrees", "--evaluation.context_parallel_size", "--parallel.tp", "--world"),
        "what is compared and written": ("--compare", "--metrics", "--out", "--json"),
    }
    target: Annotated[str, Word("RUN|CHECKPOINT|HF_FOLDER", TARGET, "runs/first")]
    """A run's folder (its newest good checkpoint, with evaluation.patience its best), the folder of one checkpoint, or
    a Hugging Face folder."""
    data: Repeated = ()
    """NAME=PATH or PATH of texts (a file or folder of .txt .md .py .jsonl .json .csv, or stdlib); again for more sets.
    Default: the documents that the run holds out."""
    split: str = ""
    """Which split of --data is read, and which of its rows, as data.split of train: test, or train[-100:]."""
    max_document_tokens: int = NOT_GIVEN
    """Longer texts of --data are cut into documents of at most this many tokens; 0: none is cut. Default: as in the
    run; of a folder: 0."""
    tokenizer: str = ""
    """A folder with tokenizer.json; empty: that of the run, or of the model's folder."""
    compare: str = ""
    """Another run, checkpoint or Hugging Face folder, to be evaluated on the same documents in the same layout; base:
    the run's model without the adapter that it trains."""
    degrees: tuple[int, ...] = ()
    """Context-parallel degrees, such as 1,2,4, at each of which the documents are evaluated."""
    metrics: tuple[str, ...] = ()
    """Metrics of your own, each package.module.function of TargetTokens to (sum, count)."""
    out: str = ""
    """Write results.json (what --json prints), documents.jsonl (the loss of every document) and report.html to this
    folder."""
    model: SavedModel = field(default_factory=SavedModel)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    encoder: EncoderLayout = field(default_factory=EncoderLayout)
    run: MachineSection = field(default_factory=MachineSection)
    world: int = 0
    """Processes to start on this machine; 0: one for each GPU (CUDA_VISIBLE_DEVICES), without GPUs as many as the run
    had on CPUs, or those of torchrun."""
    device: Device = "auto"
    """auto: a GPU for each process where there are any; cpu: processes on CPUs; cuda: GPUs, or an error."""
    json: bool = False
    """Print the results as one JSON object."""


def parse_eval(argv: Sequence[str], config: RunConfig | None = None) -> EvalFlags:
    """Parse the flags of `eval`. With a run's configuration, keys of the layout that no flag gives have its values."""
    sections = dict[str, Any]()
    if config is not None:
        sections = {
            "parallel": config.parallel,
            "context": config.context,
            "evaluation": EvaluationPlan(**config.evaluation.plan_keys),
            "encoder": EncoderLayout(config.encoder.tp, config.encoder.max_tokens),
            "run": MachineSection(config.run.machine),
        }
    return parse_flags(EvalFlags, argv, PROG, sections)


def make_request(argv: Sequence[str], flags: EvalFlags, ranks: int) -> EvalRequest:
    """Make the request of an evaluation on this number of ranks from its flags. The weights to compare with, if any,
    are a second subject, in the layout of the first.

    `flags` are those of `argv`, which is read once more over the configuration of each run that is named. Raises
    ConfigError for flags that contradict each other or are keys of training, and for weights that are not there.
    """
    if flags.max_document_tokens != NOT_GIVEN:
        check_flags_at_least(flags, max_document_tokens=0)
    if flags.split and not flags.data:
        raise ConfigError(f"--split is {flags.split!r} and there is no --data; what a run holds out has no splits")
    if flags.max_document_tokens == 1:
        raise ConfigError("--max-document-tokens is 1; a document of one token predicts nothing: use 2 or more")
    if flags.degrees and flags.compare:
        raise ConfigError("--degrees and --compare are given; compare degrees, or weights, in one call")
    if any(degree < 1 for degree in flags.degrees) or len(set(flags.degrees)) < len(flags.degrees):
        text = ",".join(map(str, flags.degrees))
        raise ConfigError(f"--degrees is {text!r}; give different integers of at least 1: 1,2,4")
    flag_keys = frozenset(flag[2:] for flag, _, _ in split_flags(argv) if "." in flag)
    refuse_training_keys(flag_keys)
    first = _configure_subject(argv, find_saved_weights(flags.target), flags, flag_keys, ranks)
    config = fit_home_to_ranks(first.config, ranks, flag_keys)
    subjects = [replace(first, config=config)]
    if flags.compare:
        weights = find_saved_weights(flags.target if flags.compare == BASE else flags.compare)
        second = _configure_subject(argv, replace(weights, base=flags.compare == BASE), flags, flag_keys, ranks)
        second_config = replace(_config_with_layout(second.config, config), evaluation=config.evaluation)
        subjects.append(replace(second, config=second_config))
    return EvalRequest(
        subjects=tuple(subjects),
        paths=tuple(parse_named_paths(flags.data).items()),
        split=flags.split,
        max_document_tokens=flags.max_document_tokens,
        tokenizer=find_local_path(flags.tokenizer, "--tokenizer"),
        degrees=flags.degrees,
        metrics=flags.metrics,
        flag_keys=flag_keys,
        home_changes=layout_changes(first.config, config),
    )


def refuse_training_keys(flag_keys: frozenset[str]) -> None:
    """Raise ConfigError for a key of [context] that only training reads. Keys are written as in "context.mode"."""
    for key in sorted(key.removeprefix("context.") for key in flag_keys if key.startswith("context.")):
        if key in PLAN_KEYS:
            raise ConfigError(f"--context.{key} is a key of training; evaluation reads --evaluation.{key}")
        if key == "mode":
            raise ConfigError(
                f"--context.{key} is a key of training, and evaluation does not read it; leave it out"
            )


def _config_with_layout(config: RunConfig, layout: EvalFlags | RunConfig) -> RunConfig:
    return replace(
        config,
        parallel=layout.parallel,
        context=layout.context,
        evaluation=replace(config.evaluation, **layout.evaluation.plan_keys),
        encoder=replace(config.encoder, tp=layout.encoder.tp, max_tokens=layout.encoder.max_tokens),
        run=replace(config.run, machine=layout.run.machine),
    )


def _configure_subject(
    argv: Sequence[str], weights: SavedWeights, flags: EvalFlags, flag_keys: Collection[str], ranks: int
) -> Subject:
    """For a folder flags (`flag_keys`) replace defaults. For a run `argv` is parsed again over its configuration, so
    that keys of the layout that no flag gives are the run's."""
    if weights.run_dir is None:
        defaults = RunConfig(ModelConfig(path=str(weights.path)), DataConfig(max_document_tokens=0))
        return Subject(weights, resolve_defaults(_config_with_flags(defaults, flags, weights)))
    run_config = load_saved_config(weights, ranks)
    run_flags = parse_eval(argv, run_config)
    config = _config_with_flags(run_config, run_flags, weights)
    # a degree that a flag gives brings its planner, and "auto" its type
    values = {
        key: value for key, value in run_flags.evaluation.plan_keys.items() if f"evaluation.{key}" in flag_keys
    }
    evaluation = inherit_keys(PlanSection(**values), run_config.evaluation, run_config.context)
    config = replace(config, run=replace(config.run, dir=str(weights.run_dir)))
    return Subject(weights, config.with_keys("evaluation", **evaluation.plan_keys))


def _config_with_flags(config: RunConfig, flags: EvalFlags, weights: SavedWeights) -> RunConfig:
    if weights.base and not config.lora.rank:
        raise ConfigError(
            f"--compare {BASE} is given, and {weights.path} trains no adapter (lora.rank is 0); leave it out, or name "
            "a run with [lora]"
        )
    model_keys = {f.name: value for f in fields(SavedModel) if (value := getattr(flags.model, f.name))}
    return _config_with_layout(config, flags).with_keys("model", **model_keys).with_sets(())


def prepare_request(
    argv: Sequence[str], flags: EvalFlags, world: int, device: Device
) -> tuple[Processes, EvalRequest]:
    """Choose the processes of an evaluation, on CPUs as many as its run had there, make its request, and check that its
    configurations are possible on these processes.

    Raises ConfigError or LayoutError, as `check_config` does, with a note about processes that were chosen.
    """
    run_dir = find_saved_weights(flags.target).run_dir
    values: Any = None
    with suppress(OSError, ValueError):  # run.json does not say
        values = read_json(run_dir / "run.json") if run_dir else None
    facts = RunFacts.from_json(values) if isinstance(values, dict) else None
    ranks_of_run = facts.ranks if facts and facts.device == "CPU" else 1
    processes = choose_processes(world, device, on_cpus=ranks_of_run)
    with processes.add_note_to_errors():
        request = make_request(argv, flags, processes.ranks)
        home = home_of(request.subjects[0].config.parallel, processes.ranks)
        for subject in request.subjects:  # heads and documents are not read yet: None, and 1 token
            config = fit_evaluation_plans(subject.config, home, None, 1, request.flag_keys)
            config = config.with_keys("data", max_document_tokens=0)
            check_config(config, processes.ranks, training=False)
    return processes, request


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    starts = Starts()
    flags = parse_eval(argv)
    processes, request = prepare_request(argv, flags, flags.world, flags.device)
    # torchrun's ranks run already: they find a missing path themselves.
    if not has_torchrun():
        for _, path in request.paths:
            find_root(path, key="--data")
    if flags.out and prints_results():
        try:
            Path(flags.out).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=flags.out).close()
        except OSError as error:
            raise ConfigError(f"--out: cannot write to {os_error_text(error)}; give another folder") from error
    print_note(processes.note, sys.stderr)
    starts.end_part("command")
    args = (request, processes.ranks, processes.backend, starts)
    # kernels that only a second subject calls are compiled when it is evaluated
    config = request.subjects[0].config
    with compile_attention_ahead(config, processes, backward=False):
        results: tuple[SubjectResult, ...] = run_on_ranks(eval_rank, args, processes.ranks)
    if prints_results():
        record = results_record(results, processes.ranks)
        if flags.out:
            rows = (json.dumps(json_safe_values(row), ensure_ascii=False) + "\n" for row in document_rows(results))
            write_text_file(Path(flags.out, "results.json"), as_json(record, indent=1) + "\n")
            write_text_file(Path(flags.out, "documents.jsonl"), "".join(rows))
            write_text_file(Path(flags.out, "report.html"), eval_page(json_safe_values(record)))
        print(as_json(record) if flags.json else "\n\n".join(result_tables(results, processes.ranks)))
        if flags.out:
            print(f"Open {Path(flags.out) / 'report.html'}", file=sys.stderr if flags.json else sys.stdout)
    return 0


def eval_rank(
    rank: int, request: EvalRequest, ranks: int, backend: str, starts: Starts
) -> tuple[SubjectResult, ...]:
    """Evaluate the subjects of a request on one rank; every rank returns their results. What imports torch is imported
    here, as a part of the start that is timed (`starts`).
    """
    starts.end_part("processes")
    keep_prints_from_failing(None, ["stderr"])
    config = request.subjects[0].config
    if backend == "nccl":
        begin_gpu_imports(count_host_ranks(ranks), compiled=config.train.compile != "none")
    # Some imports catch every exception, and that of a signal with them.
    with block_signals():
        from longspan.comm import World
        from longspan.evaluation.evaluate_saved import evaluate_saved

    starts.end_part("imports")
    home = home_of(config.parallel, ranks)
    with (
        World(home, backend=backend, timeout=config.run.timeout_seconds) as world,
        ProgressDisplay(0, sys.stderr if rank == 0 else None) as display,
    ):
        starts.end_part("groups")
        return evaluate_saved(request, world, display.log, display.show_eval_progress, starts)


def result_tables(results: Sequence[SubjectResult], ranks: int) -> Iterator[str]:
    """Yield the parts of what is printed: a line for each difference between the first subject and another, the table
    of each subject, and the tables of the differences.
    """
    first = results[0]
    pairs = [(difference, other) for other in results[1:] for difference in differences_by_set(first, other)]
    if pairs:
        yield "\n".join(
            f"{on_set.name or HELD_OUT}: {on_set.figure} of {first.weights.title} {on_set.first:.6f}, of "
            f"{other.weights.title} {on_set.other:.6f}, difference {on_set.difference:+.6f}"
            f"{'' if on_set.standard_error is None else f' ± {on_set.standard_error:.6f}'}"
            for on_set, other in pairs
        )
    for result in results:
        evaluations = [entry.evaluation for entry in result.sets]
        parallel = result.config.parallel
        is_run = result.weights.run_dir is not None and not result.weights.base
        words = [result.weights.title] + ([f"step {evaluations[0].step}"] if is_run else [])
        words += [f"{key} {degree}" for key in HOME if (degree := getattr(parallel, key)) > 1]
        loss = f"; loss: {result.loss}" if result.loss else ""
        yield f"{', '.join(words)} on {plural(ranks, 'rank')}{loss}\n{evaluation_table(evaluations)}"
    for on_set, other in pairs:  # a figure of two subjects on one set, by length of document
        titles = first.weights.title, other.weights.title
        lower = f"{on_set.lower:,} of {plural(on_set.count, on_set.unit)}"
        title = (
            f"{on_set.name or HELD_OUT}: {on_set.figure} of {titles[1]} beside {titles[0]}; {lower} have a lower "
        )
        title += f"value under {titles[1]}"
        cells = [
            (name, f"{a:.6f}", f"{b:.6f}", f"{b - a:+.6f}", f"{count:,}") for name, a, b, count in on_set.rows()
        ]
        table = text_table(("tokens", *titles, "difference", f"{on_set.unit}s"), cells)
        yield f"{title}\n{table}" if on_set.by_length else title
