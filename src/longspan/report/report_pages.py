"""The page of a run's folder, and the page of a plan."""

import re
from pathlib import Path

import numpy as np

from longspan.errors import ConfigError, RunFolderError
from longspan.files import name_file_in_errors, os_error_text
from longspan.plan import Cost, Plan
from longspan.report.markup import page, tag, text
from longspan.report.plan_section import plan_section
from longspan.report.run_folder import RunFolder
from longspan.report.run_page import run_sections


def step_seconds(run: RunFolder, name: str) -> float | None:
    """Return the seconds of a saved plan's step; None for an evaluation, and for a step without a record."""
    number = re.fullmatch(r"step ([\d,]+)", name)
    seconds = run.train["seconds"][run.step == int(number.group(1).replace(",", ""))] if number else np.zeros(0)
    return float(seconds[0]) if len(seconds) and seconds[0] > 0 else None


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run's folder and return its path.

    Raises ConfigError for a folder that is no run, RunFolderError for what the disk refuses.

    >>> write_report("runs/first")
    """
    run = RunFolder.read(run_dir)
    body = _run_body(run)
    path = run.path / "report.html"
    try:
        with name_file_in_errors(path):
            path.write_text(page(f"{run.name} · longspan", body), encoding="utf-8")
    except OSError as error:
        raise RunFolderError(os_error_text(error)) from error
    return path


def _run_body(run: RunFolder) -> list[str]:
    """Return the parts of the page of a run. Raises ConfigError if its records hold values that no run writes."""
    try:
        with np.errstate(all="ignore"):
            body = [*run_sections(run)]
            if run.plans:
                seconds = {name: step_seconds(run, name) for name, _ in run.plans}
                plans = plan_section(run.plans, measured_seconds=seconds, median=run.median)
                body.insert(-1 if run.config_text else len(body), plans)  # the configuration stays last
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the records in {run.path} make no report ({type(error).__name__}: {error}): metrics.jsonl, run.json, "
            "summary.json, samples.jsonl or plans/ hold values that no run writes; restore them"
        ) from error
    return body


def plan_page(plan: Plan, cost: Cost | None = None, *, title: str = "plan") -> str:
    """Return a page with the picture of one plan.

    >>> Path("plan.html").write_text(plan_page(plan))
    """
    head = tag("header", tag("p", "longspan", class_="brand"), tag("h1", text(title)))
    return page(f"{title} · longspan", [head, plan_section([(title, plan)], cost)])
