"""What `longspan eval` evaluates, weights on disk in the layout that fits these ranks, and its results. No torch here.

What the user gives by flag is never changed: `check_config` refuses it if it does not fit.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from longspan.checkpoint.files import step_of
from longspan.config.keys import AUTO, NOT_GIVEN
from longspan.config.plan_section import ONE_DEGREE, EvalConfig, PlanSection, take_keys
from longspan.config.sections import RunConfig, set_evaluations
from longspan.errors import CheckpointError, ConfigError, plural
from longspan.evaluation.result import Evaluation
from longspan.hub import find_local
from longspan.layout import Layout
from longspan.plan.check import heads_allow
from longspan.plan.micro_batch import level_sizes
from longspan.train.plans import PlanChoice, plan_row_multiple

ROWS = 8192  # of a slot in a micro-batch, if neither a flag nor a run has a number


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


@dataclass(frozen=True)
class Change:
    """A key that has another value than the run had, and why."""

    key: str
    before: Any
    now: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} {_value_text(self.before)} -> {_value_text(self.now)} ({self.why})"


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """One call of `longspan eval`: the `subjects`, one or two that are compared, and the documents.

    `flag_keys` are keys that flags set; `home_changes` those of the first subject that were changed to fit the ranks.
    """

    subjects: tuple[Subject, ...]
    paths: tuple[tuple[str, str], ...] = ()  # name and path of each set of texts; none: what the run holds out
    sets: tuple[str, ...] = ()  # names of evaluation sets of the run
    max_documents: int = 0
    max_document_tokens: int = NOT_GIVEN
    tokenizer: str = ""
    degrees: tuple[int, ...] = ()  # to be compared; none: the configuration's
    metrics: tuple[str, ...] = ()
    seconds: float = 0.0
    flag_keys: frozenset[str] = frozenset()
    home_changes: tuple[Change, ...] = ()


def saved_weights(target: str) -> SavedWeights:
    """Find the weights that a run's folder, a checkpoint or a Hugging Face folder holds. Raises CheckpointError."""
    local = target if Path(target).parent.is_dir() else find_local(target, "the model", weights=True)
    path = Path(local)  # step_of gives −1 for a path that is not named as a checkpoint
    if step_of(path) >= 0 or not path.is_dir() or (path / "config.toml").is_file():
        return SavedWeights(path, *split_target(path))
    if (path / "config.json").is_file():
        return SavedWeights(path)
    from longspan.model.weights.hf_folder import adapter_folder_advice  # which imports torch

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


def named_paths(words: Sequence[str]) -> dict[str, str]:
    """Read the paths of --data by the name of their set: NAME=PATH, or PATH, which is named by its last part.

    >>> named_paths(["wiki=/data/enwiki.jsonl", "notes/code"])
    {'wiki': '/data/enwiki.jsonl', 'code': 'notes/code'}

    Raises ConfigError for a name that is missing or stands twice.
    """
    paths = dict[str, str]()
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or Path(word).exists():  # a path may have "=" in it
            name, path = Path(word).stem or word, word
        if not name or not path:
            raise ConfigError(f"--data is {word!r}; give NAME=PATH, or PATH")
        if name in paths:
            raise ConfigError(f"--data {paths[name]} and {path} are both named {name!r}; give each a name: NAME=PATH")
        paths[name] = path
    return paths


class _FittedSection:
    def __init__(self, section: Any, prefix: str, flag_keys: Collection[str], flag_prefix: str = "") -> None:
        self.section, self.prefix, self.changes = section, prefix, list[Change]()
        self.flag_keys = _strip_prefix(flag_prefix or prefix, flag_keys)

    def change_key(self, key: str, now: Any, why: str) -> None:
        """A key that a flag sets stays."""
        before = getattr(self.section, key)
        if now != before and key not in self.flag_keys:
            self.section = replace(self.section, **{key: now})
            self.changes.append(Change(self.prefix + key, before, now, why))


def fit_home(config: RunConfig, ranks: int, flag_keys: Collection[str]) -> tuple[RunConfig, tuple[Change, ...]]:
    """Fit the configuration to a number of ranks: a degree that is not of `flag_keys` becomes one that fits.

    >>> fit_home(replace(RunConfig(), parallel=ParallelConfig(tp=4, pp=2)), 6, ())[0].parallel.tp
    2

    tp x pp is the largest product of divisors of the run's degrees that divides the ranks, of equal ones that with the
    larger tp. Degrees that do not fit stay, and `check_config` refuses them.
    """
    parallel, on_ranks = config.parallel, plural(ranks, "rank")
    home = _FittedSection(parallel, "parallel.", flag_keys)
    tps, pps = (
        [degree] if key in home.flag_keys else _divisors(degree)
        for key, degree in (("tp", parallel.tp), ("pp", parallel.pp))
    )
    pairs = [(tp, pp) for tp in tps for pp in pps if ranks % (tp * pp) == 0]
    tp, pp = max(pairs, key=lambda pair: (pair[0] * pair[1], pair[0]), default=(parallel.tp, parallel.pp))
    home.change_key("tp", tp, on_ranks)
    home.change_key("pp", pp, on_ranks)
    if home.section.pp == 1:
        home.change_key("vpp", 1, "no pipeline")
        home.change_key("pipeline_schedule", "1f1b", "no pipeline")
    if home.section.tp == 1:
        home.change_key("sequence_parallel", False, "tp 1")
    slots, remainder = divmod(ranks, home.section.tp * home.section.pp)
    if not remainder:
        home.change_key("dp_replicate", _nearest_below(parallel.dp_replicate, _divisors(slots)), plural(slots, "slot"))
        width, remainder = divmod(slots, home.section.dp_replicate)
        ep = parallel.ep if remainder else math.gcd(parallel.ep, width)
        home.change_key("ep", ep, f"{plural(width, 'slot')} of each copy of the weights")
    context = _FittedSection(config.context, "context.", flag_keys)
    if not remainder and any(entry.planner == "dynamic" for entry in config.evaluations):
        least = min(config.context.min_dynamic_context_parallel_size, slots)
        context.change_key("min_dynamic_context_parallel_size", least, plural(slots, "slot"))
    encoder = _FittedSection(config.encoder, "encoder.", flag_keys)
    encoder.change_key("tp", math.gcd(config.encoder.tp, ranks), on_ranks)  # a divisor shares its heads evenly
    config = replace(config, parallel=home.section, context=context.section, encoder=encoder.section)
    return config, (*home.changes, *context.changes, *encoder.changes)


def fit_node_size(
    config: RunConfig, node_size: int, flag_keys: Collection[str]
) -> tuple[RunConfig, tuple[Change, ...]]:
    context = _FittedSection(config.context, "context.", flag_keys)
    if config.context.node_size != AUTO:
        context.change_key("node_size", node_size, f"hosts of {plural(node_size, 'slot')}")
    return replace(config, context=context.section), tuple(context.changes)


def fit_set(
    config: RunConfig, entry: EvalConfig, home: Layout, heads: int | None, longest: int, flag_keys: Collection[str]
) -> tuple[EvalConfig, tuple[Change, ...]]:
    """Fit the plan of a set to this home: nearest degree, sizes of its levels, a cap that holds `longest` tokens.

    The degree is the largest that divides the slots, that a2a can deal the heads to, and that is no larger than the
    run's. An "auto" degree is chosen later. A max_tokens_per_slot "auto" becomes ROWS, or what the document needs.
    """
    fit = _FittedSection(entry, entry.prefix, flag_keys, "context.eval_")
    choice, slots = PlanChoice.evaluation(config, entry), plural(home.slots, "slot")
    types, degree = choice.comm_types, choice.widest_degree(home)
    degrees = [divisor for divisor in _divisors(home.slots) if heads_allow(divisor, heads, types, home.tp)]
    if isinstance(entry.context_parallel_size, str):  # "auto"
        degree = degrees[-1]
    elif entry.planner in ONE_DEGREE:
        before, sizes = entry.context_parallel_size, entry.hierarchical_context_parallel_sizes
        # A degree that divides the slots is lowered for the heads only.
        reason = "" if home.slots % before else f", {heads} query heads under a2a"
        degree = before if "context_parallel_size" in fit.flag_keys else _nearest_below(before, degrees)
        fit.change_key("context_parallel_size", degree, f"{slots}{reason}")
        if "a2a+p2p" in types and not isinstance(sizes, int) and math.prod(sizes) != degree:
            fit.change_key("hierarchical_context_parallel_sizes", level_sizes(sizes, degree), f"cp {degree}")
    multiple = plan_row_multiple(config.parallel)
    rows, cap = -(-longest // degree // multiple) * multiple, entry.max_tokens_per_slot
    if cap == AUTO:
        return replace(fit.section, max_tokens_per_slot=max(rows, ROWS)), tuple(fit.changes)
    if not isinstance(cap, str) and 0 < cap < rows:
        fit.change_key("max_tokens_per_slot", rows, f"the longest document has {longest:,} tokens, at cp {degree}")
    return fit.section, tuple(fit.changes)


def find_set(config: RunConfig, name: str, flag_keys: Collection[str]) -> EvalConfig:
    """Find the plan of a set before it is fitted: a set [[eval]] by its name, "" for the held-out documents.

    Keys `context.eval_*` that flags set count for every set. Raises ConfigError for a name that the run does not have.
    """
    entry = next((entry for entry in config.evaluations if entry.name == name), None)
    if entry is None:
        names = ", ".join(entry.name for entry in config.eval) or "none"
        raise ConfigError(f"--set is {name!r}, and the run's evaluation sets [[eval]] are: {names}")
    keys = _strip_prefix("context.eval_", flag_keys)
    flags = {key: value for key, value in config.context.evaluation.plan_keys.items() if key in keys}
    if flags.get("context_parallel_size") == 0:
        flags["context_parallel_size"] = config.context.context_parallel_size
    filled_keys = take_keys(PlanSection(**flags), entry).plan_keys
    return replace(entry, **filled_keys | flags)  # a flag that sets "" has been filled, and is put back


def fit_evaluations(config: RunConfig, names: Collection[str], home: Layout, flag_keys: Collection[str]) -> RunConfig:
    """Fit the configuration of these sets to this home, for `check_config`, before heads and documents are read."""
    sets = (find_set(config, name, flag_keys) for name in ("", *names))
    fitted = (fit_set(config, entry, home, None, 1, flag_keys)[0] for entry in sets)
    config = set_evaluations(config, (replace(entry, max_document_tokens=0) for entry in fitted))
    return replace(config, data=replace(config.data, max_document_tokens=0))


def changes_line(changes: Sequence[Change], ranks: int) -> str:
    """Write the changes to the run's layout in one line; empty if there are none."""
    return f"on {plural(ranks, 'rank')}: {'; '.join(map(str, changes))}" if changes else ""


def _strip_prefix(prefix: str, keys: Collection[str]) -> set[str]:
    return {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


def _divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def _nearest_below(degree: int, fitting: Iterable[int]) -> int:
    return max((candidate for candidate in fitting if candidate <= degree), default=1)  # 1 always fits


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return f"{value:,}" if isinstance(value, int) else str(value)


Unit = Literal["loss", "bits_per_byte"]
HOME = ("tp", "pp", "ep", "dp_replicate")  # the keys of [parallel] that are recorded


@dataclass(frozen=True)
class SetResult:
    """The evaluation of one set at one degree, and where its documents came from.

    `text_bytes` are the UTF-8 bytes of each document's predicted tokens.
    """

    evaluation: Evaluation
    sources: tuple[str, ...]
    text_bytes: tuple[int, ...]

    @property
    def comm_types(self) -> list[str]:
        """The types by which groups of more than one slot shared documents; a group may have one for each layer."""
        groups = [group for batch in self.evaluation.plan.micro_batches for group in batch.groups if group.degree > 1]
        types = [group.cp_comm_type for group in groups]
        return sorted({name for names in types for name in ((names,) if isinstance(names, str) else names)})


@dataclass(frozen=True)
class SubjectResult:
    """The evaluations of one subject's weights, set by set and within a set degree by degree."""

    weights: SavedWeights
    config: RunConfig  # under which they were evaluated
    tokenizer: str  # digest of it, and of what it puts around texts
    sets: tuple[SetResult, ...]
    changes: tuple[Change, ...]

    def record(self) -> dict[str, Any]:
        return {
            "target": self.weights.title,
            "kind": self.weights.kind,
            "parallel": {key: getattr(self.config.parallel, key) for key in HOME},
            "changes": [asdict(change) for change in self.changes],
            "evaluations": [entry.evaluation.row() | {"cp_comm_type": entry.comm_types} for entry in self.sets],
        }


def results_record(results: Sequence[SubjectResult], ranks: int) -> dict[str, Any]:
    """Return all of the first subject, its only evaluation at the top too; under "compare" the second one."""
    first, *others = results
    record = first.record() | {"world": ranks}
    if len(first.sets) == 1:
        record = first.sets[0].evaluation.row() | record
    for other in others:
        record["compare"] = other.record() | {"differences": [asdict(row) for row in set_differences(first, other)]}
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
    """The other model's mean minus the first's, over the same documents; errors are None for fewer than two.

    `difference` is over all tokens (bytes), `document_difference` the mean of documents' own; `lower` documents fell.
    """

    name: str
    unit: Unit
    first: float
    other: float
    difference: float
    standard_error: float | None
    document_difference: float
    document_standard_error: float | None
    documents: int
    lower: int
    by_length: tuple[tuple[int, int, float, float, int], ...] = ()  # tokens from, to, first, other, documents


def set_differences(first: SubjectResult, other: SubjectResult) -> list[Difference]:
    """Return the difference on every set, of losses, or of bits per byte where the tokenizers differ.

    The error of the ratio Σ sums / Σ counts follows from the documents' residuals sum − mean · count.
    """
    unit: Unit = "loss" if first.tokenizer == other.tokenizer else "bits_per_byte"
    return [_set_difference(*pair, unit) for pair in zip(first.sets, other.sets, strict=True)]


def _set_difference(first: SetResult, other: SetResult, unit: Unit) -> Difference:
    first_sums, first_counts = _document_sums(first, unit)
    other_sums, other_counts = _document_sums(other, unit)
    sums, counts = np.array([first_sums, other_sums]).T, np.array([first_counts, other_counts]).T  # (D, 2) each
    has_counts = (counts > 0).all(axis=1)
    sums, counts, lengths = sums[has_counts], counts[has_counts], np.array(first.evaluation.plan.lengths)[has_counts]
    means, document_means = sums.sum(0) / counts.sum(0), sums / counts
    residuals = (sums - means * counts) / counts.sum(0)
    differences = document_means[:, 1] - document_means[:, 0]
    by_length = list[tuple[int, int, float, float, int]]()
    for bucket in first.evaluation.by_length:
        inside = (bucket.first <= lengths) & (lengths <= bucket.last)
        if inside.any():
            in_bucket = sums[inside].sum(0) / counts[inside].sum(0)
            by_length.append((bucket.first, bucket.last, float(in_bucket[0]), float(in_bucket[1]), int(inside.sum())))
    return Difference(
        name=first.evaluation.name,
        unit=unit,
        first=float(means[0]),
        other=float(means[1]),
        difference=float(means[1] - means[0]),
        standard_error=_standard_error(residuals[:, 1] - residuals[:, 0], scale=len(lengths)),
        document_difference=float(differences.mean()),
        document_standard_error=_standard_error(differences - differences.mean(), scale=1),
        documents=len(lengths),
        lower=int((differences < 0).sum()),
        by_length=tuple(by_length),
    )


def _document_sums(result: SetResult, unit: Unit) -> tuple[list[float], list[float]]:
    losses = result.evaluation.document_losses
    if unit == "loss":
        return [loss.sum for loss in losses], [loss.count for loss in losses]
    if not result.text_bytes:
        raise ConfigError(
            "the two tokenizers differ, so that losses per token cannot be compared, and a tokenizer does not say how "
            "many bytes of text its tokens stand for, so that bits per byte cannot be either"
        )
    return [loss.sum / math.log(2) for loss in losses], list(result.text_bytes)


def _standard_error(residuals: np.ndarray, *, scale: float) -> float | None:
    """Return the standard error of a mean (scale 1) or sum (scale n) of n values with these residuals."""
    n = len(residuals)
    return None if n < 2 else float(scale * math.sqrt((residuals**2).sum() / (n - 1) / n))
