"""What a run left in its folder, as values. Tolerant of a run that was interrupted; refuses a folder that is no run.

A run writes `metrics.jsonl` (one object a step, and evaluation rows with `eval_loss`), the resolved `config.toml` or
`config.json`, `run.json` (what is running), `plans/*.json` and, at its end, `summary.json`. Only the metrics are needed
here.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longspan.errors import ConfigError, PlanError, counted
from longspan.evaluation.result import PasskeyGrid
from longspan.plan import Plan
from longspan.report.evaluations.passkey_section import passkey_grids
from longspan.report.evaluations.rows import EvalRow, number
from longspan.report.evaluations.samples_section import samples_of
from longspan.run.records.facts import RunFacts
from longspan.run.records.metrics_log import rows_and_damage

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

    `evaluations` are those of every set, `final` the last ones of the held-out documents, at every degree.
    """

    path: Path
    step: np.ndarray
    train: dict[str, np.ndarray]
    evaluations: tuple[EvalRow, ...] = ()
    final: tuple[EvalRow, ...] = ()
    passkey: tuple[tuple[str, PasskeyGrid], ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    plans: tuple[tuple[str, Plan], ...] = ()
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
        """
        path = Path(path)
        rows, notes = _metric_rows(path)
        train = {int(row["step"]): row for row in rows if "loss" in row}  # a resumed run repeats steps: the last counts
        evaluations = {row.place: row for row in map(EvalRow.from_row, rows) if row}
        plans, plan_notes = _plans(path / "plans")
        summary = _json_object(path / "summary.json", notes)
        config_text, config = _config(path, notes)
        steps = sorted(train)
        return cls(
            path=path,
            step=np.array(steps, np.int64),
            train={name: np.array([number(train[s].get(name)) for s in steps]) for name in _columns(train.values())},
            evaluations=tuple(evaluations[key] for key in sorted(evaluations)),
            final=tuple(_final_rows(summary, steps[-1] if steps else 0)),
            passkey=passkey_grids(rows),
            samples=samples_of(path / "samples.jsonl", notes),
            config_text=config_text,
            config=config,
            plans=plans,
            summary=summary,
            facts=RunFacts.from_json(_json_object(path / "run.json", notes)),
            notes=(*notes, *plan_notes),
        )

    @property
    def held_out(self) -> tuple[EvalRow, ...]:
        """The evaluations of the documents that are held out."""
        return tuple(row for row in self.evaluations if not row.name)

    def vocab_size(self) -> int | None:
        """The number of entries of the vocabulary, where the run recorded it."""
        size = self.summary.get("vocab_size")
        return size if isinstance(size, int) and not isinstance(size, bool) and size > 1 else None


def _metric_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        lack = "no such folder" if not path.is_dir() else "there is no metrics.jsonl in it"
        raise ConfigError(
            f"{path} is not the folder of a run: {lack}; give the folder that `longspan train` wrote (run.dir)"
        )
    rows, damaged = rows_and_damage(metrics)
    if not rows:
        raise ConfigError(
            f"{metrics} holds no step ({counted(damaged, 'unreadable line')}); the run ended before its first step"
        )
    return rows, [f"{counted(damaged, 'line')} of metrics.jsonl could not be read and left out"] if damaged else []


def _json_object(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} could not be read")
    return value if isinstance(value, dict) else {}


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns of all runs, and those of depths of multi-token prediction that the rows have."""
    return [*TRAIN_COLUMNS, *sorted({name for row in rows for name in row if name.startswith(MTP_LOSS)})]


def _final_rows(summary: dict[str, Any], last_step: int) -> Iterator[EvalRow]:
    table = summary.get("eval_at_degrees")
    for row in table if isinstance(table, list) else []:
        evaluation = EvalRow.from_row({"step": last_step} | row) if isinstance(row, dict) else None
        if evaluation:
            yield evaluation


def _config(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    """The configuration as it was written, and as values where it can be read."""
    for name, parse in (("config.toml", tomllib.loads), ("config.json", json.loads)):
        if (path / name).is_file():
            text = (path / name).read_text(encoding="utf-8", errors="replace")
            try:
                values = parse(text)
            except ValueError as error:
                notes.append(f"{name} could not be read: {error}")
                values = None
            return text, values if isinstance(values, dict) else {}
    return "", {}


def _plans(folder: Path) -> tuple[tuple[tuple[str, Plan], ...], list[str]]:
    files = sorted(folder.glob("*.json"), key=lambda file: (not file.stem.startswith("step-"), file.stem))
    if len(files) > MAX_PLANS:
        index = np.unique(np.linspace(0, len(files) - 1, MAX_PLANS).round().astype(int))
        files = [files[i] for i in index.tolist()]
    plans, notes = [], []
    for file in files:
        try:
            plans.append((_plan_name(file.stem), Plan.from_json(file.read_text(encoding="utf-8"))))
        except (PlanError, UnicodeDecodeError) as error:
            notes.append(f"plans/{file.name} is left out: {error}")
    return tuple(plans), notes


def _plan_name(stem: str) -> str:
    """'step-000300' reads 'step 300'; other names stay."""
    kind, _, number = stem.rpartition("-")
    return f"{kind} {int(number):,}" if kind and number.isdecimal() else stem
