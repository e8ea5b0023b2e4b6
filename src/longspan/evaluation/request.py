"""What `longspan eval` evaluates, weights on disk in the layout that fits these ranks, and its results. No torch here.

What the user gives by flag is never changed: `check_config` refuses it if it does not fit.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from longspan.checkpoint.files import step_of
from longspan.config.keys import AUTO, NOT_GIVEN, key_values, with_key_values
from longspan.config.plan_section import ONE_DEGREE, EvaluationPlan
from longspan.config.sections import RunConfig
from longspan.errors import CheckpointError, ConfigError, plural
from longspan.evaluation.result import Evaluation
from longspan.hub import adapter_folder_advice, find_local_path
from longspan.layout import Layout
from longspan.plan.check import heads_allow_degree
from longspan.plan.micro_batch import fit_level_sizes
from longspan.resolve.choice import PlannerConfig, plan_row_multiple

ROWS = 8192  # of a slot in a micro-batch, if neither a flag nor a run has a number
HOME = ("tp", "pp", "dp_replicate", "ep")  # the degrees of [parallel]


@dataclass(frozen=True)
class SavedWeights:
    """Weights on disk: those of a checkpoint of `run_dir` (None: the newest good one), or of the folder `path`.

    `base`: of a run that trains an adapter, the weights without it.
    """

    path: Path
    run_dir: Path | None = None
    checkpoint: Path | None = None
    base: bool = False

    @property
    def title(self) -> str:
        return f"{self.path} without adapter" if self.base else str(self.path)

    @property
    def kind(self) -> Literal["run", "checkpoint", "folder"]:
        return "folder" if self.run_dir is None else "run" if self.checkpoint is None else "checkpoint"


@dataclass(frozen=True)
class Subject:
    """Weights that are evaluated, and the configuration under which: that of their run, or one for a folder."""

    weights: SavedWeights
    config: RunConfig

    @property
    def folder(self) -> Path:
        return self.weights.run_dir or self.weights.path


class Change(NamedTuple):
    """A key that has another value than the run had."""

    key: str
    before: Any
    now: Any


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """One call of `longspan eval`: the `subjects`, one or two that are compared, and the documents.

    `flag_keys` are keys that flags set; `home_changes` those of the first subject that were changed to fit the ranks.
    """

    subjects: tuple[Subject, ...]
    paths: tuple[tuple[str, str], ...] = ()  # name and path of each set of texts; none: what the run holds out
    split: str = ""  # of these
    max_document_tokens: int = NOT_GIVEN
    tokenizer: str = ""
    degrees: tuple[int, ...] = ()  # to be compared; none: the configuration's
    metrics: tuple[str, ...] = ()
    flag_keys: frozenset[str] = frozenset()
    home_changes: tuple[Change, ...] = ()


def find_saved_weights(target: str) -> SavedWeights:
    """Find the weights that a run's folder, a checkpoint or a Hugging Face folder holds. Raises CheckpointError."""
    local = target if Path(target).parent.is_dir() else find_local_path(target, "the model", weights=True)
    path = Path(local)  # step_of gives −1 for a path that is not named as a checkpoint
    if step_of(path) >= 0 or not path.is_dir() or (path / "config.toml").is_file():
        return SavedWeights(path, *split_target(path))
    if (path / "config.json").is_file():
        return SavedWeights(path)
    advice = "give RUN, RUN/checkpoints/step-NNNNNN, or a folder with config.json and safetensors"
    raise CheckpointError(
        f"{path} is neither the folder of a run (it has no config.toml) nor a Hugging Face folder (no config.json); "
        f"{adapter_folder_advice(path) or advice}"
    )


def split_target(target: Path) -> tuple[Path, Path | None]:
    """Split a target into the run's folder, and the checkpoint if it is one. Raises CheckpointError without a run."""
    is_checkpoint = step_of(target) >= 0
    run_dir = target.resolve().parent.parent if is_checkpoint else target
    if not target.is_dir():
        kind = "checkpoint" if is_checkpoint else "run"
        raise CheckpointError(f"there is no {kind} {target}; give a run's folder, or RUN/checkpoints/step-NNNNNN")
    if not (run_dir / "config.toml").is_file():
        raise CheckpointError(f"{run_dir} is not the folder of a run: it has no config.toml")
    return run_dir, target if is_checkpoint else None


def parse_named_paths(words: Sequence[str]) -> dict[str, str]:
    """Read the paths of --data by the name of their set: NAME=PATH, or PATH, which is named by its last part.

    >>> parse_named_paths(["wiki=/data/enwiki.jsonl", "notes/code"])
    {'wiki': '/data/enwiki.jsonl', 'code': 'notes/code'}

    Raises ConfigError for a name that is missing or stands twice.
    """
    paths = dict[str, str]()
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or Path(word).exists():  # a path may have "=" in it
            name = Path(word).stem or word
            path = word
        if not name or not path:
            raise ConfigError(f"--data is {word!r}; give NAME=PATH, or PATH")
        if name in paths:
            raise ConfigError(
                f"--data {paths[name]} and {path} are both named {name!r}; give each a name: NAME=PATH"
            )
        paths[name] = path
    return paths


def fit_home_to_ranks(config: RunConfig, ranks: int, flag_keys: Collection[str]) -> RunConfig:
    """Fit the configuration to a number of ranks: each degree that is not of `flag_keys` becomes one that fits.

    >>> fit_home_to_ranks(replace(RunConfig(), parallel=ParallelConfig(tp=4, pp=2)), 6, ()).parallel.tp
    2

    A degree that fits is the greatest common divisor of the run's and of what the degrees before it leave of the ranks.
    Degrees of flags come first and stay, and `check_config` refuses those that do not fit.
    """
    values = dict[str, Any]()
    room = ranks
    for name in sorted((f"parallel.{key}" for key in HOME), key=lambda name: name not in flag_keys):
        degree = getattr(config.parallel, name.partition(".")[2])
        values[name] = degree if name in flag_keys else math.gcd(degree, room)
        room = max(1, room // values[name])
    if values["parallel.pp"] == 1:
        values |= {"parallel.vpp": 1, "parallel.pipeline_schedule": "1f1b"}
    if values["parallel.tp"] == 1:
        values["parallel.sequence_parallel"] = False
    slots = max(1, ranks // (values["parallel.tp"] * values["parallel.pp"]))
    least = min(config.context.min_dynamic_context_parallel_size, slots)  # evaluation's is the same
    values |= {f"{section}.min_dynamic_context_parallel_size": least for section in ("context", "evaluation")}
    values["context.node_size"] = AUTO
    values["encoder.tp"] = math.gcd(config.encoder.tp, ranks)
    for name in values.keys() - flag_keys:
        section, _, key = name.partition(".")
        config = replace(config, **{section: with_key_values(getattr(config, section), {key: values[name]})})
    return config


def fit_evaluation_plans(
    config: RunConfig, home: Layout, heads: int | None, longest: int, flag_keys: Collection[str]
) -> RunConfig:
    """Fit the plans of evaluation to this home: nearest degree, sizes of its levels, a cap that holds `longest` tokens.

    The degree is the largest that divides the slots, that a2a can deal the heads to, and that is no larger than the
    run's. An "auto" degree is chosen later. A max_tokens_per_slot "auto" becomes ROWS, or what the document needs.
    """
    entry = config.evaluation
    choice = PlannerConfig.evaluation(config)
    values = dict[str, Any]()
    types = choice.options.types
    degree = choice.widest_degree(home)
    divisors = (divisor for divisor in range(1, home.slots + 1) if home.slots % divisor == 0)
    degrees = [divisor for divisor in divisors if heads_allow_degree(divisor, heads, types, home.tp)]
    if entry.context_parallel_size == AUTO or (entry.planner == "fixed" and not entry.context_parallel_size):
        degree = degrees[-1]
    elif entry.planner in ONE_DEGREE:
        if "evaluation.context_parallel_size" not in flag_keys:
            degree = max((divisor for divisor in degrees if divisor <= degree), default=1)
        values["context_parallel_size"] = degree
        sizes = entry.hierarchical_context_parallel_sizes
        if "a2a+p2p" in types and not isinstance(sizes, int) and math.prod(sizes) != degree:
            values["hierarchical_context_parallel_sizes"] = fit_level_sizes(sizes, degree)
    multiple = plan_row_multiple(config.parallel)
    cap = entry.max_tokens_per_slot
    rows = -(-longest // degree // multiple) * multiple
    if cap == AUTO or (not isinstance(cap, str) and 0 < cap < rows):
        values["max_tokens_per_slot"] = max(rows, ROWS) if cap == AUTO else rows
    values = {key: value for key, value in values.items() if cap == AUTO or f"evaluation.{key}" not in flag_keys}
    return config.with_keys("evaluation", **values)


def layout_changes(before: RunConfig, now: RunConfig) -> tuple[Change, ...]:
    """List the keys of the layout that have another value now; one that was "auto" is none."""
    old = before.tables()
    new = now.tables()
    keys = {section: new[section] for section in ("parallel", "context", "encoder")}
    keys["evaluation"] = key_values(EvaluationPlan(**now.evaluation.plan_keys))
    names = ((section, key) for section in keys for key in keys[section])
    changes = (Change(f"{section}.{key}", old[section][key], new[section][key]) for section, key in names)
    return tuple(change for change in changes if change.before not in (change.now, AUTO))


def changes_line(changes: Sequence[Change], ranks: int) -> str:
    """Write the changes to the run's layout in one line; empty if there are none."""
    texts = (f"{key} {before} -> {now}" for key, before, now in changes)
    return f"on {plural(ranks, 'rank')}: {'; '.join(texts)}" if changes else ""


@dataclass(frozen=True)
class SetResult:
    """The evaluation of one set at one degree, and where its documents came from."""

    evaluation: Evaluation
    sources: tuple[str, ...]

    @property
    def comm_types(self) -> list[str]:
        """The types by which groups of more than one slot shared documents; a group may have one for each layer."""
        groups = [group for group in self.evaluation.plan.groups if group.degree > 1]
        types = [group.cp_comm_type for group in groups]
        return sorted({name for names in types for name in ((names,) if isinstance(names, str) else names)})


@dataclass(frozen=True)
class SubjectResult:
    """The evaluations of one subject's weights, set by set and within a set degree by degree."""

    weights: SavedWeights
    config: RunConfig  # under which they were evaluated
    sets: tuple[SetResult, ...]
    changes: tuple[Change, ...]

    def record(self) -> dict[str, Any]:
        return {
            "target": self.weights.title,
            "kind": self.weights.kind,
            "parallel": {key: getattr(self.config.parallel, key) for key in HOME},
            "changes": [change._asdict() for change in self.changes],
            "evaluations": [entry.evaluation.row() | {"cp_comm_type": entry.comm_types} for entry in self.sets],
        }


def results_record(results: Sequence[SubjectResult], ranks: int) -> dict[str, Any]:
    """Return all of the first subject, its only evaluation at the top too; under "compare" the second one."""
    first, *others = results
    record = first.record() | {"world": ranks}
    if len(first.sets) == 1:
        record = first.sets[0].evaluation.row() | record
    for other in others:
        record["compare"] = other.record() | {
            "differences": [asdict(row) for row in differences_by_set(first, other)]
        }
    return record


def document_rows(results: Sequence[SubjectResult]) -> list[dict[str, Any]]:
    return [
        {"target": result.weights.title, "set": entry.evaluation.name, "cp": entry.evaluation.cp, **row}
        for result in results
        for entry in result.sets
        for row in entry.evaluation.document_rows(entry.sources)
    ]


@dataclass(frozen=True)
class Difference:
    """The other model's mean loss minus the first's, over all tokens of the same documents; `lower` documents fell."""

    name: str
    first: float
    other: float
    difference: float
    standard_error: float | None
    documents: int
    lower: int
    by_length: tuple[tuple[int, int, float, float, int], ...] = ()  # tokens from, to, first, other, documents

    def rows(self) -> list[tuple[str, float, float, int]]:
        """Both losses and the number of documents: of all, and of those of each length, which the text names."""
        lengths = [(f"{first:,} to {last:,}", a, b, count) for first, last, a, b, count in self.by_length]
        return [("all", self.first, self.other, self.documents), *lengths]


def differences_by_set(first: SubjectResult, other: SubjectResult) -> list[Difference]:
    return [_difference_of_set(*pair) for pair in zip(first.sets, other.sets, strict=True)]


def _difference_of_set(first: SetResult, other: SetResult) -> Difference:
    """The error of the ratio Σ sums / Σ counts follows from the documents' residuals sum − mean · count."""
    evaluation = first.evaluation
    losses = evaluation.document_losses, other.evaluation.document_losses, evaluation.document_lengths
    rows = [(a.sum, b.sum, a.count, length) for a, b, length in zip(*losses, strict=True) if a.count]
    sums, counts, lengths = np.split(np.array(rows).reshape(-1, 4), [2, 3], axis=1)  # (D, 2), (D, 1), (D, 1)
    means = sums.sum(0) / counts.sum()
    n = len(counts)
    residuals = np.diff(sums - means * counts)
    by_length = list[tuple[int, int, float, float, int]]()
    for bucket in evaluation.by_length:
        inside = ((bucket.first <= lengths) & (lengths <= bucket.last))[:, 0]
        if inside.any():
            in_bucket = (sums[inside].sum(0) / counts[inside].sum()).tolist()
            by_length.append((bucket.first, bucket.last, *in_bucket, int(inside.sum())))
    return Difference(
        name=evaluation.name,
        first=float(means[0]),
        other=float(means[1]),
        difference=float(means[1] - means[0]),
        standard_error=None if n < 2 else float(math.sqrt((residuals**2).sum() * n / (n - 1)) / counts.sum()),
        documents=n,
        lower=int((sums[:, 1] < sums[:, 0]).sum()),
        by_length=tuple(by_length),
    )
