"""Loggers of one's own, which a run takes by their dotted names: trackio and MLflow.

    pip install trackio        # or mlflow
    PYTHONPATH=examples longspan train examples/first.toml --run.loggers loggers.TrackioLogger
    trackio show --project longspan

A logger is a class that takes the start of a session, and has `log` and `close`. The first rank alone makes it. An
exception ends the logger, and not the run, whose rows are in metrics.jsonl too.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by their names in charts: those of a training step, or of an evaluation at a degree."""
    values = {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
    del values["step"]
    if "eval_loss" not in row:
        return {f"train/{key}": value for key, value in values.items()}
    chart, degree = row.get("eval_name", "held_out"), int(values.pop("cp"))
    return {f"eval/{chart}/{key.removeprefix('eval_')}_cp{degree}": value for key, value in values.items()}


class TrackioLogger:
    """A run of trackio, named after the run's folder; a resumed run goes on in it, and repeats the steps that it does.

    TRACKIO_PROJECT names the project, and TRACKIO_SPACE_ID a Space of the hub that shows it.
    """

    def __init__(self, start: Any) -> None:
        """Begin or go on; `start` has the run's `dir`, its `config` and `facts`, and how many steps are `done`."""
        import trackio

        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "longspan"),
            name=start.dir.resolve().name,
            config={**start.config, "facts": dict(start.facts)},
            resume="allow" if start.done else "never",
        )

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Send a row of metrics.jsonl."""
        self.run.log(numbers(row), step=step)

    def close(self) -> None:
        """End the session, however the run ended."""
        self.run.finish()


class MlflowLogger:
    """A run of MLflow, named after the run's folder, where MLFLOW_TRACKING_URI says; a resumed run goes on in it.

    The configuration and the facts of each session are files of the run: MLflow lets no parameter change.
    """

    def __init__(self, start: Any) -> None:
        """Begin a run, or go on with that of mlflow.txt in the run's folder."""
        import mlflow

        self.mlflow, file = mlflow, Path(start.dir, "mlflow.txt")
        known = file.read_text() if start.done and file.exists() else None
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "longspan"))
        self.run_id = mlflow.start_run(run_id=known, run_name=start.dir.resolve().name).info.run_id
        file.write_text(self.run_id)
        facts = {"config": dict(start.config), "facts": dict(start.facts)}
        mlflow.log_dict(facts, f"from-step-{start.done}.json")

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Send a row of metrics.jsonl."""
        self.mlflow.log_metrics(numbers(row), step=step, run_id=self.run_id)

    def close(self) -> None:
        """End the session, however the run ended."""
        self.mlflow.end_run()
