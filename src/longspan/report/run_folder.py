"""What a run left in its folder, as values. Tolerant of a run that was interrupted; refuses a folder that is no run.

A run writes `metrics.jsonl` (one object a step, and evaluation rows with `eval_loss`), the resolved `config.toml`,
`run.json` (what is running), `plans/*.json` and, at its end, `summary.json`. Only the metrics are needed here.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longspan.checkpoint.best import BestStep, read_best_steps
from longspan.config.text_values import BestFigure
from longspan.errors import ConfigError, PlanError, plural
from longspan.files import json_safe_values, parse_json
from longspan.plan import Plan
from longspan.plan.plan_rows import find_plan
from longspan.run.facts import RunFacts, best_step_text
from longspan.run.metrics import read_json_rows

MOST = 1e30  # a larger number of a record is taken for none
# The report shows at most this many plans: the first and last saved and some between.
MAX_PLANS = 8
# A run may have columns of this name and the number of a depth.
MTP_LOSS = "mtp_loss_"
TRAIN_COLUMNS = (
    "loss",
    "rewards/margins",
    "rewards/accuracies",
    "kl",
    "entropy",
    "tokens",
    "spared_tokens",
    "targets",
    "grad_norm",
    "lr",
    "seconds",
    "tokens_per_second",
    "memory_bytes",
    "efficiency",
    "tflops",
    "mfu",
    "predicted_seconds",
    "bound_share",
    "encoder_share",
    "predicted_encoder_share",
    "router_balance_loss",
    "router_z_loss",
    "save_bytes",
    "save_seconds",
    "save_shown_seconds",
)
_EVALUATION_KEYS = ("step", "cp", "planner", "eval_tokens", "eval_documents", "by_position", "by_length")
_NO_METRIC = {
    "eval_loss",
    "eval_tokens",
    "eval_targets",
    "eval_documents",
    "eval_pairs",
    "eval_answers",
    "eval_perplexity",
    "eval_activation_bytes",
}


# Of positions, or of documents whose lengths are, `first` to `last`: first, last, mean loss, targets, documents.
Bucket = tuple[int, int, float, int, int]


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
    scored: bool = False
    metrics: tuple[tuple[str, float], ...] = ()
    by_position: tuple[Bucket, ...] = ()
    by_length: tuple[Bucket, ...] = ()

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "EvalRow | None":
        """The evaluation of a row of metrics.jsonl; None for a row of training, or a loss that is not finite. Raises
        ConfigError for a row that lacks keys or has no number in their place.
        """
        loss = number_to_draw(row.get("eval_loss"))
        if math.isnan(loss):
            return None
        lack = [key for key in _EVALUATION_KEYS if key not in row]
        counts = [number_to_draw(row.get(key)) for key in ("step", "cp", "eval_tokens", "eval_documents")]
        if lack or any(map(math.isnan, counts)):
            reason = f"it has no {', '.join(lack)}" if lack else "its counts are no numbers"
            raise ConfigError(f"an evaluation of metrics.jsonl is left out: {reason}")
        step, cp, tokens, documents = map(int, counts)
        values = {key: number_to_draw(row[key]) for key in row if key.startswith("eval_") and key not in _NO_METRIC}
        return cls(
            step,
            cp,
            loss,
            tokens,
            documents,
            planner=str(row["planner"]),
            name=str(row.get("eval_name", "")),
            activation_bytes=int(np.nan_to_num(number_to_draw(row.get("eval_activation_bytes", 0)))),
            scored="eval_perplexity" not in row,
            metrics=tuple(
                (key.removeprefix("eval_"), value) for key, value in values.items() if not math.isnan(value)
            ),
            by_position=_read_buckets(row["by_position"]),
            by_length=_read_buckets(row["by_length"]),
        )

    @property
    def degree(self) -> str:
        """The degree as text; of a plan with several degrees, of which `cp` is the largest, the planner's name."""
        # a dotted name is a planner of the user's own, which may give several
        if self.planner == "dynamic" or "." in self.planner:
            return self.planner
        return str(self.cp)

    @property
    def record_key(self) -> tuple[int, str, bool, int]:
        """What tells an evaluation from others: step, set, and degree (0 for several); of records with one key the last
        counts.
        """
        several = self.degree != str(self.cp)
        return self.step, self.name, several, 0 if several else self.cp

    @property
    def perplexity(self) -> str:
        """The perplexity exp(loss) as text; "–" of scores; from a loss of 50 on "over 1e21", as all digits would fill
        the table.
        """
        if self.scored:
            return "–"
        return f"{math.exp(self.loss):,.3f}" if self.loss < 50 else "over 1e21"


def number_to_draw(value: object) -> float:
    """Return a number of a record as a float; NaN for what is no number, or too large to be drawn (MOST or more)."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST:
        return float(value)
    return math.nan


def _read_buckets(rows: object) -> tuple[Bucket, ...]:
    buckets = list[Bucket]()
    for row in rows if isinstance(rows, list) else []:
        if (
            isinstance(row, list)
            and len(row) == 5
            and not any(math.isnan(value) for value in map(number_to_draw, row))
        ):
            first, last, loss, targets, documents = row
            buckets.append((int(first), int(last), float(loss), int(targets), int(documents)))
    return tuple(buckets)


@dataclass(frozen=True)
class RunFolder:
    """A run's record: `train` holds a column per metric, one value a step, NaN where a step lacks it.

    `evaluations` are those of every set, `final` the last ones of the held-out documents, at every degree. `median` is
    the name of the step whose time is the median of all, "" where none was measured. A run that is `live` may not have
    begun, and its newest plan is the only one.
    """

    path: Path
    step: np.ndarray
    train: dict[str, np.ndarray]
    evaluations: tuple[EvalRow, ...] = ()
    final: tuple[EvalRow, ...] = ()
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    plans: tuple[tuple[str, Plan], ...] = ()
    median: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    facts: RunFacts | None = None
    notes: tuple[str, ...] = ()
    live: bool = False

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @classmethod
    def read(cls, path: str | Path, *, live: bool = False) -> "RunFolder":
        """Read a run's folder. Raises ConfigError where there is no `metrics.jsonl` with at least one row.

        Of a step or an evaluation that a resumed run repeated the last record counts; what cannot be read is noted.
        """
        path = Path(path)
        rows, notes = _read_metric_rows(path / "metrics.jsonl", live=live)
        train = {int(row["step"]): row for row in rows if "loss" in row}
        evaluations = {row.record_key: row for row in _evaluation_rows(rows, notes)}
        summary = _read_object(path / "summary.json", notes)
        if not live:
            notes += _missing_records(path)
        config_text, config = _read_config(path / "config.toml", notes)
        facts = RunFacts.from_json(_read_object(path / "run.json", notes))
        steps = sorted(train)
        depth_columns = {name for row in train.values() for name in row if name.startswith(MTP_LOSS)}
        times = sorted(
            (seconds, step) for step in steps if (seconds := number_to_draw(train[step].get("seconds"))) > 0
        )
        shown_step = 0  # the last one of a run that trains, else the one of median seconds
        if live:
            shown_step = max(steps, default=0)
        elif times:
            shown_step = times[(len(times) - 1) // 2][1]
        return cls(
            path=path,
            step=np.array(steps, np.int64),
            train={
                column: np.array([number_to_draw(train[step].get(column)) for step in steps], float)
                for column in (*TRAIN_COLUMNS, *sorted(depth_columns))
            },
            evaluations=tuple(evaluations[key] for key in sorted(evaluations)),
            final=tuple(_evaluation_rows(summary.get("eval_at_degrees", ()), notes)),
            config_text=config_text,
            config=config,
            plans=tuple(_read_shown_plans(path, shown_step, notes, live=live).items()),
            median=_step_name(shown_step) if shown_step and not live else "",
            summary=summary,
            facts=facts,
            notes=tuple(notes),
            live=live,
        )

    @property
    def held_out(self) -> tuple[EvalRow, ...]:
        return tuple(row for row in self.evaluations if not row.name)

    @property
    def newest_by_degree(self) -> tuple[EvalRow, ...]:
        """The evaluations of the weights in model/, or else of the newest ones, on the held-out documents, at every
        degree.
        """
        last = max((row.step for row in self.held_out), default=0)
        # the best weights, which model/ has, may be older; else it is of an earlier session
        if self.final and (self.final[0].step >= last or self.final[0].step == self.summary.get("model_step")):
            return self.final
        return tuple(row for row in self.held_out if row.step == last)

    def configured_value(self, section: str, name: str) -> Any:
        """Return the value of a key of config.toml as it stands there; None where it does not."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, dict) else None

    def vocab_size(self) -> int | None:
        """Return the size of the vocabulary by summary.json; None while a run trains, and for a model that scores."""
        size = self.summary.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
            return size
        return None

    def best_text(self) -> str:
        """Say which step is the best and whose weights model/ has, by summary.json, or by best.json while there is no
        summary; "" where neither says it.
        """
        if not self.summary:
            # A run that compares no figures raises ConfigError here.
            with suppress(ConfigError):
                figure = BestFigure.from_text(str(self.configured_value("checkpoint", "keep_best")))
                bests = read_best_steps(self.path, figure, lambda _: None)
                return best_step_text(figure.name, bests[-1], 0) if bests else ""
        best = self.summary.get("best")
        if not isinstance(best, dict):
            return ""
        step, value, model_step = map(
            number_to_draw, (best.get("step"), best.get("value"), self.summary.get("model_step"))
        )
        if math.isnan(step + value + model_step):
            return ""
        return best_step_text(str(best.get("figure")), BestStep(int(step), value), int(model_step))

    def value_of_planned_step(self, plan_name: str, column: str) -> float | None:
        """Return a positive value of the step of a plan; None for an evaluation, and for a step without a record."""
        values = [
            self.train[column][i] for i, step in enumerate(self.step.tolist()) if _step_name(step) == plan_name
        ]
        return float(values[0]) if values and values[0] > 0 else None


def _read_metric_rows(metrics: Path, *, live: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """A pipe of that name is not waited for."""
    folder = metrics.parent
    is_there = metrics.is_file()
    rows, damaged = read_json_rows(metrics) if is_there else ([], 0)
    if not is_there and not live:
        lack = "no such folder" if not folder.is_dir() else "there is no metrics.jsonl in it"
        raise ConfigError(
            f"{folder} is not the folder of a run: {lack}; give the folder that `longspan train` wrote (run.dir)"
        )
    if not rows and not live:
        raise ConfigError(
            f"{metrics} holds no step ({plural(damaged, 'unreadable line')}); the run ended before its first step"
        )
    return rows, [f"{plural(damaged, 'line')} of metrics.jsonl could not be read and left out"] if damaged else []


def _missing_records(folder: Path) -> Iterator[str]:
    if not (folder / "run.json").is_file():
        yield "run.json is missing: what ran, and on what, is not shown"
    if not (folder / "summary.json").is_file():
        yield "summary.json is missing, which a run writes at its end: how it ended is not shown"


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """{} where the file is not there, and, with a note, if it is damaged."""
    try:
        words = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "{}"
        value = json_safe_values(parse_json(words))
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} could not be read")
    return {}


def _evaluation_rows(rows: object, notes: list[str]) -> Iterator[EvalRow]:
    """Why rows are left out is added to `notes`, once each."""
    for row in rows if isinstance(rows, list) else []:
        try:
            evaluation = EvalRow.from_row(row) if isinstance(row, dict) else None
        except ConfigError as error:
            notes[:] = dict.fromkeys([*notes, str(error)])
        else:
            if evaluation is not None:
                yield evaluation


def _read_config(file: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    if not file.is_file():
        return "", {}
    words = file.read_text(encoding="utf-8", errors="replace")
    try:
        return words, tomllib.loads(words)
    except (ValueError, RecursionError) as error:
        notes.append(f"{file.name} could not be read: {error}")
        return words, {}


def _read_shown_plans(path: Path, step: int, notes: list[str], *, live: bool) -> dict[str, Plan]:
    """`step` 0 stands for no plan of plans.jsonl. At most MAX_PLANS files are read, at even distances, and none of a
    `live` run."""
    plans = dict[str, Plan]()
    folder = path / "plans"
    plan_rows = path / "plans.jsonl"
    try:
        if step and plan_rows.is_file() and (plan := find_plan(plan_rows, step)) is not None:
            plans[_step_name(step)] = plan
    except (PlanError, OSError, RecursionError, MemoryError) as error:
        notes.append(f"a plan of plans.jsonl is left out: {error}")
    # plans of steps before those of evaluations
    files = sorted(folder.glob("*.json"), key=lambda file: (not file.stem.startswith("step-"), file.stem))
    index = np.unique(np.linspace(0, len(files) - 1, min(len(files), MAX_PLANS)).round().astype(int)).tolist()
    for file in [files[i] for i in index] if not live else []:
        kind, _, count = file.stem.rpartition("-")
        name = f"{kind} {int(count):,}" if kind and count.isdecimal() else file.stem
        try:
            plan = Plan.from_json(file.read_text(encoding="utf-8"))
            plans.setdefault(name, plan)
        except (PlanError, UnicodeDecodeError, OSError) as error:
            notes.append(f"plans/{file.name} is left out: {error}")
    return plans


def _step_name(step: int) -> str:
    return f"step {step:,}"
