"""Pages that open anywhere: one file, no network, light and dark, readable without a script and on paper."""

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from longspan.plan import Cost, Plan
from longspan.report.gantt import HATCH, gantt_svg
from longspan.report.run_folder import RunFolder
from longspan.report.run_page import run_sections
from longspan.report.series import write_number, write_seconds

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run's folder and return its path. Raises ConfigError for a folder that is no run.

    >>> write_report("runs/first")
    """
    run = RunFolder.read(run_dir)
    body = [*run_sections(run)]
    if run.plans:
        body.insert(-1 if run.config_text else len(body), plan_section(run.plans))
    path = run.path / "report.html"
    path.write_text(_page(f"{run.name} · longspan", body), encoding="utf-8")
    return path


def plan_page(plan: Plan, cost: Cost | None = None, *, title: str = "plan") -> str:
    """A page with the picture of one plan.

    >>> Path("plan.html").write_text(plan_page(plan))
    """
    head = f'<header><p class="brand">longspan</p><h1>{escape(title)}</h1></header>'
    return _page(f"{title} · longspan", [head, plan_section([(title, plan)], cost)])


def plan_section(plans: Sequence[tuple[str, Plan]], cost: Cost | None = None) -> str:
    """Pictures of plans with a selector between them, in time and in rows."""
    options = "".join(f'<option value="{i}">{escape(name)}</option>' for i, (name, _) in enumerate(plans))
    choice = f'<label>plan <select id="plan-choice">{options}</select></label>' if len(plans) > 1 else ""
    units = (
        '<span class="switch" role="group" aria-label="unit">'
        '<button type="button" data-unit="seconds" aria-pressed="true">time</button>'
        '<button type="button" data-unit="rows" aria-pressed="false">rows</button></span>'
    )
    cards = "".join(_plan_card(i, plan, cost) for i, (_, plan) in enumerate(plans))
    return (
        f'<section id="plans"><h2>Plan of a step</h2><div class="controls">{choice}{units}</div>{cards}'
        f"{_legend()}</section>"
    )


def _legend() -> str:
    keys = (
        (
            '<rect class="b k0" width="22" height="12"/>',
            "a document: one colour wherever it is, one block over the slots that share it",
        ),
        ('<rect class="many" width="22" height="12"/>', "documents too short to draw apart"),
        ('<rect class="launch" width="22" height="12"/>', "fixed time of a micro-batch"),
        (
            '<rect class="panel" width="22" height="12"/><rect fill="url(#idle)" width="22" height="12"/>',
            "nothing to do",
        ),
    )
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 22 12" aria-hidden="true">{shape}</svg>{text}</li>' for shape, text in keys
    )
    note = "Within a micro-batch the documents of the widest groups are drawn first, whatever the order in which a slot takes them."
    return f'<ul class="legend">{items}</ul><p class="note">{note}</p>'


def _plan_card(index: int, plan: Plan, cost: Cost | None) -> str:
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _plan_facts(plan))
    pictures = {unit: gantt_svg(plan, cost, unit=unit) for unit in ("seconds", "rows")}
    # Only the picture that shows is part of the document; the others wait in templates.
    shown = pictures["seconds"] if index == 0 else ""
    templates = "".join(
        f'<template data-unit="{unit}">{svg}</template>' for unit, svg in pictures.items() if index or unit != "seconds"
    )
    hidden = " hidden" if index else ""
    return f'<div class="plan" data-plan-index="{index}"{hidden}><dl class="facts">{facts}</dl><div class="picture scroll">{shown}</div>{templates}</div>'


def _plan_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    degrees = sorted({group.degree for m in plan.micro_batches for group in m.groups})
    yield "planner", f"{plan.planner}, {plan.mode}"
    yield "documents", f"{len(plan.lengths):,}, longest {max(plan.lengths, default=0):,}"
    yield "tokens", f"{plan.tokens:,}"
    yield "micro-batches", f"{len(plan.micro_batches)} on {plan.slots} slots"
    if degrees:
        yield "degrees", ", ".join(map(str, degrees)) if len(degrees) <= 6 else f"{degrees[0]} to {degrees[-1]}"
    yield "packing efficiency", f"{100 * plan.efficiency:.1f}%"
    yield "predicted", write_seconds(plan.predicted_seconds)
    if plan.lower_bound_seconds:
        yield "over the lower bound", f"× {write_number(plan.ratio, 4)}"


def _page(title: str, body: Sequence[str]) -> str:
    room = files("longspan.report")
    style, script = (room.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>\n<style>\n{style}</style></head>\n'
        f'<body>{HATCH}<main>\n{"".join(part + chr(10) for part in body)}</main><div id="tip" role="status" aria-live="polite" hidden></div>\n'
        f"<script>\n{script}</script></body></html>\n"
    )
