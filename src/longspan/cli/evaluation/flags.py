"""Flags of `longspan eval`, and the request that they make."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal

from longspan.cli.flags import Repeated, check_least, parse_flags, split_flags
from longspan.cli.help import Groups, Word
from longspan.cli.processes import Device
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
from longspan.errors import ConfigError
from longspan.evaluation.request import (
    EvalRequest,
    SavedWeights,
    Subject,
    find_set,
    fit_home,
    named_paths,
    saved_weights,
)
from longspan.hub import find_local

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
    """Make the request of an evaluation on this number of ranks from its flags.

    The weights to compare with, if any, are a second subject, in the layout of the first.
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
    flag_keys = read_flag_keys(argv)
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


def read_flag_keys(argv: Sequence[str]) -> frozenset[str]:
    """Read which keys "section.key" the words of the command line set, by the names of their flags."""
    return frozenset(flag[2:] for flag, _, _ in split_flags(argv) if "." in flag)


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
