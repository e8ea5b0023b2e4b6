"""The page of a run's folder, and the page of a plan."""

from pathlib import Path

from longspan.errors import RunFolderError
from longspan.files import naming_file, os_error_text
from longspan.plan import Cost, Plan
from longspan.report.markup import tag, text
from longspan.report.page import page
from longspan.report.plan_pictures.section import plan_section
from longspan.report.priced import measured_seconds, priced_plans
from longspan.report.run_folder import RunFolder
from longspan.report.run_page import run_sections


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run's folder and return its path.

    Raises ConfigError for a folder that is no run, RunFolderError for what the disk refuses.

    >>> write_report("runs/first")
    """
    run = RunFolder.read(run_dir)
    body = [*run_sections(run)]
    if run.plans:
        took = {name: measured_seconds(run, name) for name, _ in run.plans}
        body.insert(-1 if run.config_text else len(body), plan_section(priced_plans(run), took=took))
    path = run.path / "report.html"
    try:
        with naming_file(path):
            path.write_text(page(f"{run.name} · longspan", body), encoding="utf-8")
    except OSError as error:
        raise RunFolderError(os_error_text(error)) from error
    return path


def plan_page(plan: Plan, cost: Cost | None = None, *, title: str = "plan") -> str:
    """A page with the picture of one plan.

    >>> Path("plan.html").write_text(plan_page(plan))
    """
    head = tag("header", tag("p", "longspan", class_="brand"), tag("h1", text(title)))
    return page(f"{title} · longspan", [head, plan_section([(title, plan)], cost)])
