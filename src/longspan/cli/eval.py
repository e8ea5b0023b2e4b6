"""`longspan eval`: saved weights evaluated on documents, at any degree, on any number of ranks."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TextIO

from longspan.cli.flags import Groups, Repeated, Word, check_least, parse_flags, split_flags, write_text
from longspan.cli.processes import (
    Device,
    choose_processes,
    compile_attention_ahead,
    count_host_ranks,
    has_torchrun,
    is_reporting,
    print_note,
    run_on_ranks,
)
from longspan.config.defaults import resolve_defaults
from longspan.config.file import load_config
from longspan.config.keys import NOT_GIVEN, check_bounds, section_keys
from longspan.config.plan_section import PlanSection
from longspan.config.sections import (
    ContextConfig,
    DataConfig,
    EncoderLayout,
    LoraSection,
    MachineSection,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from longspan.corpus.files import find_root
from longspan.errors import ConfigError, plural
from longspan.evaluation.request import (
    HOME,
    Difference,
    EvalRequest,
    SavedWeights,
    Subject,
    SubjectResult,
    document_rows,
    find_set,
    fit_evaluations,
    fit_home,
    named_paths,
    results_record,
    saved_weights,
    set_differences,
)
from longspan.evaluation.result import comparison_table
from longspan.files import as_json, json_values, os_error_text, read_json
from longspan.hub import find_local
from longspan.layout import Layout
from longspan.plain_text import text_table
from longspan.report.evaluation_page import eval_page
from longspan.run.checks import check_config
from longspan.run.facts import RunFacts
from longspan.run.progress import LINE_SECONDS
from longspan.train.plans import home_of
from longspan.train.starts import Starts, begin_gpu_imports

if TYPE_CHECKING:
    from longspan.evaluation.metrics import Bucket


PROG = "longspan eval"
TARGET = "a run's folder, a checkpoint or a Hugging Face folder"
BASE = "base"  # as what --compare compares with


@dataclass(frozen=True)
class SavedModel:
    """How the saved model is held and computed."""

    dtype: Literal["", "float32", "float64", "bfloat16"] = ""
    """Parameters: float32, float64 or bfloat16. Default: as the run has them; of a folder: float32."""
    compute_dtype: Literal["", "auto", "float32", "bfloat16", "float64"] = ""
    """Arithmetic: auto (bfloat16 on GPUs, as dtype on CPUs), float32, bfloat16 or float64. Default: as in the run; of a
    folder: auto."""
    rope_scaling: Literal["", "yarn", "linear"] = ""
    """yarn or linear: scale rotary positions for documents beyond the model's max_position_embeddings. Default: as the
    model has been trained."""
    rope_factor: float = 0.0
    """Factor by which --model.rope_scaling extends the model's context; 0: as large as the longest document needs,
    rounded up to 0.25."""


@dataclass(frozen=True)
class EvalFlags:
    """Evaluate a run, a checkpoint or a Hugging Face folder: loss and metrics of its documents at any degree.

    A run's own configuration applies, except for the flags given here; on other ranks than it had, each degree becomes
    the nearest one that fits, which is said. Nothing in the folder changes.

    longspan eval runs/first --degrees 1,2,4

    longspan eval runs/first --data chats.jsonl --compare Qwen3-0.6B
    """

    SHOWN: ClassVar[Groups] = {
        "documents": ("--data", "--set", "--max_documents", "--max_document_tokens"),
        "layout": ("--degrees", "--context.eval_context_parallel_size", "--parallel.tp", "--world"),
        "what is compared and written": ("--compare", "--metrics", "--documents", "--out", "--json"),
    }
    target: Annotated[str, Word("RUN|CHECKPOINT|HF_FOLDER", TARGET, "runs/first")]
    """A run's folder (its newest good checkpoint), the folder of one checkpoint, or a Hugging Face folder."""
    data: Repeated = ()
    """NAME=PATH or PATH of texts (a file or folder of .txt .md .py .jsonl, or stdlib); again for more sets. Default:
    the documents that the run holds out."""
    set: Repeated = ()
    """Name of an evaluation set [[eval]] of the run, in place of the documents that it holds out; again for more."""
    max_documents: int = 0
    """Documents of each set, at most, at even distances; 0: all."""
    max_document_tokens: int = NOT_GIVEN
    """Longer texts of --data are cut into documents of at most this many tokens; 0: none is cut. Default (-1): as in
    the run; of a folder: 0."""
    tokenizer: str = ""
    """A folder with tokenizer.json; empty: that of the run, or of the model's folder."""
    without_adapter: bool = False
    """Of a run that trains an adapter ([lora]): evaluate only its base model."""
    compare: str = ""
    """Another run, checkpoint or Hugging Face folder, to be evaluated on the same documents in the same layout; base:
    the run's model without the adapter that it trains."""
    degrees: str = ""
    """Context-parallel degrees with commas between, such as 1,2,4, at each of which the documents are evaluated."""
    metrics: Repeated = ()
    """A metric of your own, package.module.function of TargetRows to (sum, count); again for more."""
    seconds: float = 0.0
    """Stop with an error where the evaluations take more than so many seconds; 0: no limit."""
    documents: str = ""
    """Write the loss of every document to this file, one JSON object a line."""
    out: str = ""
    """Write results.json (what --json prints), documents.jsonl and report.html to this folder."""
    model: SavedModel = field(default_factory=SavedModel)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
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
    sections: dict[str, Any] = {}
    if config is not None:
        encoder = EncoderLayout(config.encoder.tp, config.encoder.max_rows)
        sections = {"parallel": config.parallel, "context": config.context, "encoder": encoder}
        sections["run"] = MachineSection(config.run.machine)
    return parse_flags(EvalFlags, argv, PROG, sections)


def make_request(argv: Sequence[str], flags: EvalFlags, ranks: int) -> EvalRequest:
    """Make the request of an evaluation on this number of ranks from its flags. The weights to compare with, if any,
    are a second subject, in the layout of the first.
    """
    _check_values(flags)
    try:
        degrees = tuple(int(word) for word in flags.degrees.split(",") if word.strip())
    except ValueError:  # a word that is no integer
        degrees = (0,)
    if any(degree < 1 for degree in degrees) or len(set(degrees)) < len(degrees):
        raise ConfigError(
            f"--degrees is {flags.degrees!r}; give different integers of at least 1 with commas between: 1,2,4"
        )
    flag_keys = frozenset(flag[2:] for flag, _, _ in split_flags(argv) if "." in flag)
    refuse_training_keys(flag_keys)
    first = _make_subject(argv, saved_weights(flags.target), flags, base=flags.without_adapter)
    config, changes = fit_home(first.config, ranks, flag_keys)
    for name in flags.set:
        find_set(config, name, flag_keys)  # raises for a name that the run does not have
    subjects = [replace(first, config=config)]
    if flags.compare:
        base = flags.compare == BASE
        weights = saved_weights(flags.target if base else flags.compare)
        # --without-adapter is of both subjects, but a Hugging Face folder has no adapter to leave out
        base |= flags.without_adapter and weights.run_dir is not None
        second = _make_subject(argv, weights, flags, base=base)
        # the layout, sets and metrics are those of the first subject
        other = replace(
            second.config,
            parallel=config.parallel,
            context=config.context,
            eval=config.eval,
            train=replace(second.config.train, eval_metrics=config.train.eval_metrics),
            encoder=replace(second.config.encoder, tp=config.encoder.tp, max_rows=config.encoder.max_rows),
            run=replace(second.config.run, machine=config.run.machine),
        )
        subjects.append(replace(second, config=other))
    return EvalRequest(
        subjects=tuple(subjects),
        sets=flags.set,
        paths=tuple(named_paths(flags.data).items()),
        max_documents=flags.max_documents,
        max_document_tokens=flags.max_document_tokens,
        tokenizer=find_local(flags.tokenizer, "--tokenizer"),
        degrees=degrees,
        metrics=flags.metrics,
        seconds=flags.seconds,
        flag_keys=flag_keys,
        home_changes=changes,
    )


def _check_values(flags: EvalFlags) -> None:
    check_least(flags, max_documents=0, max_document_tokens=NOT_GIVEN)
    check_bounds(flags.encoder, EncoderLayout, "--encoder.")
    if flags.max_document_tokens == 1:
        raise ConfigError("--max-document-tokens is 1; a document of one token predicts nothing: use 2 or more")
    if flags.seconds < 0:
        raise ConfigError(f"--seconds is {flags.seconds:g}; give a number above 0, or 0 for no limit")
    if flags.data and flags.set:
        raise ConfigError("--data and --set are given; evaluate texts, or sets of the run, in one call")
    if flags.without_adapter and flags.compare == BASE:
        raise ConfigError("--without-adapter and --compare base are given, which would compare a model with itself")
    if flags.degrees and flags.compare:
        raise ConfigError("--degrees and --compare are given; compare degrees, or weights, in one call")


def refuse_training_keys(flag_keys: frozenset[str]) -> None:
    """Raise ConfigError for keys of training, which would have no effect."""
    plan_keys = {key.name for key in section_keys(PlanSection)}  # each has a form eval_KEY
    for key in sorted(key.removeprefix("context.") for key in flag_keys if key.startswith("context.")):
        if key in plan_keys:
            raise ConfigError(f"--context.{key} is a key of training; evaluation reads --context.eval_{key}")
        if key == "mode":
            raise ConfigError(f"--context.{key} is a key of training, and evaluation does not read it; leave it out")


def _make_subject(argv: Sequence[str], weights: SavedWeights, flags: EvalFlags, *, base: bool) -> Subject:
    explicit = {f.name: value for f in fields(SavedModel) if (value := getattr(flags.model, f.name)) not in ("", 0.0)}
    config = None if weights.run_dir is None else load_config(weights.run_dir / "config.toml")
    if base and (config is None or not config.lora.rank):
        flag = "--without-adapter" if flags.without_adapter else f"--compare {BASE}"
        reason = "is no run" if config is None else "trains no adapter (lora.rank is 0)"
        raise ConfigError(f"{flag} is given, and {weights.path} {reason}; leave it out, or name a run with [lora]")
    if config is None:
        model = ModelConfig(path=str(weights.path), **explicit)
        config = RunConfig(model, DataConfig(max_document_tokens=0), flags.parallel, flags.context)
        config = replace(config, encoder=replace(config.encoder, **asdict(flags.encoder)))
        config = replace(config, run=replace(config.run, machine=flags.run.machine))
        return Subject(weights, resolve_defaults(config))
    flags = parse_eval(argv, config)  # again, so that keys of the layout that no flag gives are the run's
    config = replace(
        config,
        model=replace(config.model, **explicit),
        parallel=flags.parallel,
        context=flags.context,
        encoder=replace(config.encoder, **asdict(flags.encoder)),
        run=replace(config.run, dir=str(weights.run_dir), machine=flags.run.machine),
    )
    config = replace(config, lora=LoraSection()) if base else config
    return Subject(replace(weights, base=base), config)


LINES = 10  # of one evaluation; a long one has a line each LINE_SECONDS too


class EvalDisplay:
    """Shows lines and how far evaluations are; silent where `stream` is None.

    >>> EvalDisplay(sys.stderr).show_progress("wiki, cp 4", 16, 40)
    wiki, cp 4: 16 of 40 micro-batches
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._tenths: dict[str, int] = {}  # by title: how many tenths of an evaluation were shown
        self._written = time.monotonic()  # when the last line was written

    def show_line(self, text: str) -> None:
        if self._stream is not None:
            print(text, file=self._stream, flush=True)
            self._written = time.monotonic()

    def show_progress(self, title: str, done: int, count: int) -> None:
        """A line for each tenth of an evaluation's micro-batches, or each LINE_SECONDS."""
        tenths = LINES * done // max(count, 1)
        if tenths > self._tenths.get(title, 0) or time.monotonic() - self._written >= LINE_SECONDS:
            self._tenths[title] = tenths
            self.show_line(f"{title}: {done:,} of {plural(count, 'micro-batch', 'es')}")


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    starts = Starts()
    flags = parse_eval(argv)
    processes = choose_processes(flags.world, flags.device, on_cpus=_count_run_ranks(flags.target))
    with processes.add_note_to_errors():
        request = make_request(argv, flags, processes.ranks)
        check_request(request, processes.ranks)
    if not has_torchrun():  # whose ranks run already: they find a missing path themselves
        for _, path in request.paths:
            find_root(path, key="--data")
    if is_reporting():
        check_writable(flags.documents, flags.out)
    print_note(processes.note, sys.stderr)
    starts.end_part("command")
    args = (request, processes.ranks, processes.backend, starts)
    config = request.subjects[0].config  # kernels that only a second subject calls are compiled when it is evaluated
    with compile_attention_ahead(config, processes, backward=False):
        results: tuple[SubjectResult, ...] = run_on_ranks(eval_rank, args, processes.ranks)
    if is_reporting():
        record = results_record(results, processes.ranks)
        if flags.documents:
            write_documents(results, Path(flags.documents))
        if flags.out:
            write_text(Path(flags.out, "results.json"), as_json(record, indent=1) + "\n")
            write_documents(results, Path(flags.out, "documents.jsonl"))
            write_text(Path(flags.out, "report.html"), eval_page(json_values(record)))
        print(as_json(record) if flags.json else "\n\n".join(result_tables(results, processes.ranks)))
        if flags.out:
            print(f"Open {Path(flags.out) / 'report.html'}", file=sys.stderr if flags.json else sys.stdout)
    return 0


def _count_run_ranks(target: str) -> int:
    run_dir = saved_weights(target).run_dir
    values: Any = None
    with suppress(OSError, ValueError):
        values = read_json(run_dir / "run.json") if run_dir else None
    facts = RunFacts.from_json(values) if isinstance(values, dict) else None
    return facts.ranks if facts and facts.device == "CPU" else 1


def check_request(request: EvalRequest, ranks: int) -> Layout:
    home = home_of(request.subjects[0].config.parallel, ranks)
    for subject in request.subjects:
        check_config(fit_evaluations(subject.config, request.sets, home, request.flag_keys), ranks, training=False)
    return home


def eval_rank(rank: int, request: EvalRequest, ranks: int, backend: str, starts: Starts) -> tuple[SubjectResult, ...]:
    """Evaluate on one rank; `starts` has the seconds of the parts of the command's start so far. What imports torch is
    imported here, as a part of the start that is timed: the command itself needs no torch.
    """
    starts.end_part("processes")
    if backend == "nccl":
        begin_gpu_imports(count_host_ranks(ranks), compiled=False)  # whether to compile is decided later
    from longspan.comm import World
    from longspan.evaluation.evaluate_saved import evaluate_saved

    starts.end_part("imports")
    home, seconds = check_request(request, ranks), request.subjects[0].config.run.timeout_seconds
    display = EvalDisplay(sys.stderr if rank == 0 else None)
    with World(home, backend=backend, timeout=seconds) as world:
        starts.end_part("groups")
        return evaluate_saved(request, world, display.show_line, display.show_progress, starts)


def check_writable(file: str, out: str) -> None:
    """Make the folders of --documents and --out, and check that they can be written to, before hours of evaluation."""
    if file and Path(file).is_dir():
        raise ConfigError(f"--documents {file} is a folder; give a file in it, such as {Path(file, 'documents.jsonl')}")
    if out and Path(out).exists() and not Path(out).is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder")
    folders = {"--documents": Path(file).parent} if file else {}
    if out:
        folders["--out"] = Path(out)
    for flag, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag}: {os_error_text(error)}") from error
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{flag}: {folder} cannot be written to; give another folder")


def write_documents(results: Sequence[SubjectResult], file: Path) -> None:
    lines = (json.dumps(json_values(row), ensure_ascii=False) + "\n" for row in document_rows(results))
    write_text(file, "".join(lines))


HELD_OUT = "held out"  # how tables call the documents of a run


def result_tables(results: Sequence[SubjectResult], ranks: int) -> Iterator[str]:
    """Yield everything that was found: a line for each difference between the first subject and another; each subject's
    table; a set's degrees, if there are several, and with one subject the losses by length and by position; last the
    tables of the differences.
    """
    first = results[0]
    pairs = [(difference, other) for other in results[1:] for difference in set_differences(first, other)]
    if pairs:
        yield "\n".join(
            f"{of.name or HELD_OUT}: {of.unit.replace('_', ' ')} of {first.weights.title} {of.first:.6f}, of "
            f"{other.weights.title} {of.other:.6f}, difference {of.difference:+.6f}{_spread_text(of.standard_error)}"
            for of, other in pairs
        )
    for result in results:
        step, parallel = result.sets[0].evaluation.step, result.config.parallel
        words = [result.weights.title] + ([f"step {step}"] if result.weights.run_dir is not None else [])
        words += [f"{key} {degree}" for key in HOME if (degree := getattr(parallel, key)) > 1]
        yield f"{', '.join(words)} on {plural(ranks, 'rank')}\n{_evaluation_table(result)}"
    for name in dict.fromkeys(set_result.evaluation.name for set_result in first.sets):
        at_degrees = [set_result.evaluation for set_result in first.sets if set_result.evaluation.name == name]
        if len(at_degrees) > 1:
            yield f"{name or HELD_OUT}: {comparison_table(at_degrees)}"
        if len(results) == 1:  # losses do not depend on the degree, so one degree's buckets are enough
            yield from _bucket_tables(at_degrees[0].name, at_degrees[0].by_length, at_degrees[0].by_position)
    for difference, other_result in pairs:
        yield _difference_table(difference, first, other_result)


def _evaluation_table(result: SubjectResult) -> str:
    metrics = list(dict.fromkeys(name for set_result in result.sets for name in set_result.evaluation.metrics))
    names = ["set", "type", "cp", "loss", "perplexity", *(name.replace("_", " ") for name in metrics)]
    rows = list[list[str]]()
    for set_result in result.sets:
        of = set_result.evaluation
        values = [of.metrics[name].value if name in of.metrics else None for name in metrics]
        rows.append(
            [
                of.name or HELD_OUT,
                ", ".join(set_result.comm_types) or "-",
                str(of.cp),
                f"{of.loss:.9f}",
                # from a loss of 50 on, e ** loss is above 5e21, whose digits would fill the table
                f"{of.perplexity:,.4f}" if of.loss < 50 else "over 1e21",
                *("-" if value is None else f"{value:.5f}" for value in values),
                *(f"{count:,}" for count in (of.documents, of.tokens, of.targets)),
                f"{of.seconds:.2f}",
            ]
        )
    return text_table([*names, "documents", "tokens", "targets", "seconds"], rows, left=2)


def _bucket_tables(name: str, lengths: "Sequence[Bucket]", positions: "Sequence[Bucket]") -> Iterator[str]:
    for title, unit, buckets in (("document length", "tokens", lengths), ("position", "position", positions)):
        rows = [
            [_range_text(b.first, b.last), f"{b.loss.value:.6f}", f"{b.documents:,}", f"{int(b.loss.count):,}"]
            for b in buckets
            if b.loss.value is not None
        ]
        if len(rows) > 1:
            yield f"{name or HELD_OUT}, loss by {title}\n" + text_table((unit, "loss", "documents", "targets"), rows)


def _range_text(first: int, last: int) -> str:
    return f"{first:,} to {last:,}"


def _difference_table(difference: Difference, first: SubjectResult, other: SubjectResult) -> str:
    unit = difference.unit.replace("_", " ")
    lines = [
        f"{difference.name or HELD_OUT}: {unit} of {other.weights.title} beside {first.weights.title}",
        f"difference {difference.difference:+.6f}{_spread_text(difference.standard_error)}; of documents, each counted "
        f"once, {difference.document_difference:+.6f}{_spread_text(difference.document_standard_error)}",
        f"{difference.lower:,} of {plural(difference.documents, 'document')} have a lower value under "
        f"{other.weights.title}",
    ]
    if difference.unit == "bits_per_byte":
        lines.append("the tokenizers differ: losses per token and perplexities cannot be compared, bits per byte can")
    rows = [("all", difference.first, difference.other, difference.documents)]
    if len(difference.by_length) > 1:
        rows += [(_range_text(start, last), a, b, documents) for start, last, a, b, documents in difference.by_length]
    table = text_table(
        ("tokens", first.weights.title, other.weights.title, "difference", "documents"),
        [(name, f"{a:.6f}", f"{b:.6f}", f"{b - a:+.6f}", f"{documents:,}") for name, a, b, documents in rows],
    )
    return "\n".join([*lines, table])


def _spread_text(error: float | None) -> str:
    return "" if error is None else f" ± {error:.6f}"
