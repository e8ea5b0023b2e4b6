"""What a run left in its folder, as values. Tolerant of a run that was interrupted; refuses a folder that is no run.

A run writes `metrics.jsonl` (one object a step, and evaluation rows with `eval_loss`), the resolved `config.toml`,
`run.json` (what is running), `plans/*.json` and, at its end, `summary.json`. Only the metrics are needed here.
"""

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longspan.errors import ConfigError, PlanError, plural
from longspan.files import json_values, parse_json
from longspan.plan import Plan
from longspan.plan.plan_rows import find_plan
from longspan.run.facts import RunFacts
from longspan.run.loggers.metrics_log import read_json_rows

EVALUATION_KEYS = ("step", "cp", "planner", "eval_tokens", "eval_documents", "by_position", "by_length")
MOST = 1e30  # a larger number of a record is taken for none
_NO_METRIC = {"eval_loss", "eval_tokens", "eval_targets", "eval_documents", "eval_perplexity", "eval_activation_bytes"}


class BucketRow(NamedTuple):
    """The mean loss of `targets` tokens, at positions or in documents of lengths `first` to `last`."""

    first: int
    last: int
    loss: float
    targets: int
    documents: int


@dataclass(frozen=True)
class EvalRow:
    """One evaluation: of the weights after `step`, of the set `name` ("": held-out documents), at one degree.

    `metrics` are all except loss and perplexity, by name; `activation_bytes` is what it added to a GPU's memory.
    """

    step: int
    cp: int
    loss: float
    tokens: int
    documents: int
    planner: str
    name: str = ""
    activation_bytes: int = 0
    metrics: tuple[tuple[str, float], ...] = ()
    by_position: tuple[BucketRow, ...] = ()
    by_length: tuple[BucketRow, ...] = ()

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "EvalRow | None":
        """Return the evaluation of a row of metrics.jsonl; None for a row of training, or a loss that is not finite.

        Numbers whose keys begin with "eval_" are metrics, except the fixed columns (_NO_METRIC).

        Raises ConfigError for a row that lacks keys or has no number in their place.
        """
        loss = number(row.get("eval_loss"))
        if math.isnan(loss):
            return None
        lack = [key for key in EVALUATION_KEYS if key not in row]
        counts = [number(row.get(key)) for key in ("step", "cp", "eval_tokens", "eval_documents")]
        if lack or any(map(math.isnan, counts)):
            reason = (
                f"it has no {', '.join(lack)}: it is of a version before 0.1" if lack else "its counts are no numbers"
            )
            raise ConfigError(f"an evaluation of metrics.jsonl is left out: {reason}")
        step, cp, tokens, documents = map(int, counts)
        values = {key.removeprefix("eval_"): number(row[key]) for key in row if key.startswith("eval_")}
        # value == value: not NaN, which `number` gives for what is no number
        metrics = {name: value for name, value in values.items() if f"eval_{name}" not in _NO_METRIC and value == value}
        return cls(
            step=step,
            cp=cp,
            loss=loss,
            tokens=tokens,
            documents=documents,
            planner=str(row["planner"]),
            name=str(row.get("eval_name", "")),
            activation_bytes=int(np.nan_to_num(number(row.get("eval_activation_bytes", 0)))),
            metrics=tuple(metrics.items()),
            by_position=_read_buckets(row["by_position"]),
            by_length=_read_buckets(row["by_length"]),
        )

    @property
    def degree(self) -> str:
        """The degree as text; of a plan with several degrees, of which `cp` is the largest, the planner's name."""
        return self.planner if self._has_several_degrees else str(self.cp)

    @property
    def record_key(self) -> tuple[int, str, bool, int]:
        """The key of an evaluation: its step, its set, whether its plan may have several degrees, and its degree.

        Of rows with one key the last counts. A plan of several degrees has 0 for its degree, since the largest varies.
        """
        several = self._has_several_degrees
        return self.step, self.name, several, 0 if several else self.cp

    @property
    def _has_several_degrees(self) -> bool:
        return self.planner == "dynamic" or "." in self.planner  # a dotted name is a planner of the user's own

    @property
    def perplexity(self) -> str:
        """The perplexity exp(loss) as text; from a loss of 50 on "over 1e21", as all digits would fill the table."""
        return f"{math.exp(self.loss):,.3f}" if self.loss < 50 else "over 1e21"


def last_evaluations(rows: Sequence[EvalRow]) -> tuple[EvalRow, ...]:
    """Return the evaluations of the newest weights: those after the last step that has an evaluation."""
    last = max((row.step for row in rows), default=0)
    return tuple(row for row in rows if row.step == last)


def number(value: object) -> float:
    """Return a number of a record as a float; NaN for what is no number, or too large to be drawn (MOST or more)."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST:
        return float(value)
    return math.nan


def _read_buckets(rows: object) -> tuple[BucketRow, ...]:
    buckets = list[BucketRow]()
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) == 5 and not any(math.isnan(value) for value in map(number, row)):
            first, last, loss, targets, documents = row
            buckets.append(BucketRow(int(first), int(last), float(loss), int(targets), int(documents)))
    return tuple(buckets)


SAMPLE_KEYS = ("name", "text", "answer", "predicted", "images")
TRAIN_COLUMNS = (
    "loss",
    "tokens",
    "targets",
    "grad_norm",
    "lr",
    "seconds",
    "tokens_per_second",
    "memory_bytes",
    "micro_batches",
    "efficiency",
    "tflops",
    "mfu",
    "predicted_seconds",
    "bound_share",
    "encoder_share",
    "encoder_balance",
    "predicted_encoder_share",
    "predicted_encoder_balance",
    "router_balance_loss",
    "router_z_loss",
)
MTP_LOSS = "mtp_loss_"  # and the number of a depth: columns that a run may have
MAX_PLANS = 8  # in the report; the first and last saved and some between


@dataclass(frozen=True)
class RunFolder:
    """A run's record: `train` holds a column per metric, one value a step, NaN where a step lacks it.

    `evaluations` are those of every set, `final` the last ones of the held-out documents, at every degree. `median` is
    the name of the step whose time is the median of all, "" where none was measured.
    """

    path: Path
    step: np.ndarray
    train: dict[str, np.ndarray]
    evaluations: tuple[EvalRow, ...] = ()
    final: tuple[EvalRow, ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    plans: tuple[tuple[str, Plan], ...] = ()
    median: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    facts: RunFacts | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @classmethod
    def read(cls, path: str | Path) -> "RunFolder":
        """Read a run's folder. Raises ConfigError where there is no `metrics.jsonl` with at least one row.

        >>> RunFolder.read("runs/first").train["loss"][-1]

        Of a step or an evaluation that a resumed run repeated the last record counts; what cannot be read is noted.
        """
        path = Path(path)
        rows, notes = _metric_rows(path)
        train = {int(row["step"]): row for row in rows if "loss" in row}  # a resumed run repeats steps: the last counts
        evaluations = {row.record_key: row for row in _evaluation_rows(rows, notes)}
        median_step = _median_step(train)
        plans, plan_notes = _read_plans(path / "plans", median_step)
        summary = read_json_object(path / "summary.json", notes)
        config_text, config = read_config(path, notes)
        steps = sorted(train)
        return cls(
            path=path,
            step=np.array(steps, np.int64),
            train={name: np.array([number(train[s].get(name)) for s in steps]) for name in _columns(train.values())},
            evaluations=tuple(evaluations[key] for key in sorted(evaluations)),
            final=tuple(_evaluation_rows(summary.get("eval_at_degrees", ()), notes)),
            samples=_read_samples(path / "samples.jsonl", notes),
            config_text=config_text,
            config=config,
            plans=plans,
            median=_step_name(median_step) if median_step else "",
            summary=summary,
            facts=RunFacts.from_json(read_json_object(path / "run.json", notes)),
            notes=(*notes, *plan_notes),
        )

    @property
    def held_out(self) -> tuple[EvalRow, ...]:
        """The evaluations of the documents that are held out."""
        return tuple(row for row in self.evaluations if not row.name)

    def vocab_size(self) -> int | None:
        """Return the number of entries of the vocabulary, where the run recorded it."""
        size = self.summary.get("vocab_size")
        return size if isinstance(size, int) and not isinstance(size, bool) and size > 1 else None


def _metric_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        lack = "no such folder" if not path.is_dir() else "there is no metrics.jsonl in it"
        raise ConfigError(
            f"{path} is not the folder of a run: {lack}; give the folder that `longspan train` wrote (run.dir)"
        )
    rows, damaged = read_json_rows(metrics)
    if not rows:
        raise ConfigError(
            f"{metrics} holds no step ({plural(damaged, 'unreadable line')}); the run ended before its first step"
        )
    return rows, [f"{plural(damaged, 'line')} of metrics.jsonl could not be read and left out"] if damaged else []


def _read_samples(file: Path, notes: list[str]) -> tuple[dict[str, Any], ...]:
    rows, damaged = read_json_rows(file) if file.is_file() else ([], 0)
    if damaged:
        notes.append(f"{plural(damaged, 'line')} of {file.name} could not be read and left out")
    return tuple(row for row in rows if all(key in row for key in SAMPLE_KEYS) and isinstance(row["images"], list))


def read_json_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the object in a file; empty if the file is missing or, with a note, damaged."""
    if not path.is_file():
        return {}
    try:
        value = json_values(parse_json(path.read_text(encoding="utf-8", errors="replace")))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} could not be read")
    return value if isinstance(value, dict) else {}


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [*TRAIN_COLUMNS, *sorted({name for row in rows for name in row if name.startswith(MTP_LOSS)})]


def _evaluation_rows(rows: object, notes: list[str]) -> Iterator[EvalRow]:
    for row in rows if isinstance(rows, list) else []:
        try:
            evaluation = EvalRow.from_row(row) if isinstance(row, dict) else None
        except ConfigError as error:
            notes[:] = dict.fromkeys([*notes, str(error)])
        else:
            if evaluation is not None:
                yield evaluation


def read_config(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the text of config.toml and its values; no text without the file, no values, with a note, if damaged."""
    file = path / "config.toml"
    if not file.is_file():
        return "", {}
    words = file.read_text(encoding="utf-8", errors="replace")
    try:
        return words, tomllib.loads(words)
    except (ValueError, RecursionError) as error:
        notes.append(f"{file.name} could not be read: {error}")
        return words, {}


def _median_step(rows: Mapping[int, Mapping[str, Any]]) -> int:
    times = sorted((seconds, step) for step, row in rows.items() if (seconds := number(row.get("seconds"))) > 0)
    return times[(len(times) - 1) // 2][1] if times else 0


def _read_plans(folder: Path, median_step: int) -> tuple[tuple[tuple[str, Plan], ...], list[str]]:
    """Plans of steps come before those of evaluations. At most MAX_PLANS files are read, at even distances. The plan of
    step `median_step` (0: none) is put first if plans.jsonl has it, whether or not a file of its own was read.
    """
    files = sorted(folder.glob("*.json"), key=lambda file: (not file.stem.startswith("step-"), file.stem))
    if len(files) > MAX_PLANS:
        index = np.unique(np.linspace(0, len(files) - 1, MAX_PLANS).round().astype(int))
        files = [files[i] for i in index.tolist()]
    plans, notes, plan_rows = dict[str, Plan](), list[str](), folder.parent / "plans.jsonl"
    for file in files:
        try:
            plans[_plan_name(file.stem)] = Plan.from_json(file.read_text(encoding="utf-8"))
        except (PlanError, UnicodeDecodeError, OSError) as error:
            notes.append(f"plans/{file.name} is left out: {error}")
    try:
        if median_step and plan_rows.is_file() and (plan := find_plan(plan_rows, median_step)) is not None:
            plans = {_step_name(median_step): plan} | plans
    except (PlanError, OSError) as error:
        notes.append(f"a plan of plans.jsonl is left out: {error}")
    return tuple(plans.items()), notes


def _plan_name(stem: str) -> str:
    kind, _, number = stem.rpartition("-")
    return f"{kind} {int(number):,}" if kind and number.isdecimal() else stem


def _step_name(step: int) -> str:
    return f"step {step:,}"
