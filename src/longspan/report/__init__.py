"""The report of a run and the pictures of a plan: self-contained HTML, SVG, PNG.

Everything is drawn here without torch and, except PNG files, without a plot library, so that `longspan plan` starts at
once. Nothing in this room measures: it reads the folder that a run wrote, or a plan.

>>> from longspan.report import write_report
>>> write_report("runs/first")  # runs/first/report.html  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.report.bars import PlanBars as PlanBars, plan_bars as plan_bars
    from longspan.report.gantt import (
        gantt_svg as gantt_svg,
        plan_document as plan_document,
        plan_page as plan_page,
        write_png as write_png,
    )
    from longspan.report.run_folder import RunFolder as RunFolder
    from longspan.report.run_page import write_report as write_report

__getattr__, __dir__, __all__ = lazy_exports(__name__)
