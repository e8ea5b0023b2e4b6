"""The page of one plan, without a run: what `longspan plan` writes as .html."""

from longspan.plan import Plan
from longspan.report.gantt import plan_part
from longspan.report.page import page, page_head, section
from longspan.run.facts import time_and_command

PICTURE_NOTE = (
    "Times of a picture are those of the plan's cost model, not measured. Within a micro-batch the documents of the "
    "widest groups come first here, whatever a slot's own order."
)


def plan_page(plan: Plan, *, title: str = "plan") -> str:
    """Return a page with the picture of one plan."""
    part = plan_part(plan, title, None, measured=bool(plan.cost.source))
    plans = section("Plan of a step", {"plans": {"plans": [part], "first": 0}}, {"note": PICTURE_NOTE})
    return page(
        f"{title} · longspan", {"head": page_head(title, " · ".join(time_and_command())), "sections": [plans]}
    )
