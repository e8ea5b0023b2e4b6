"""Evaluation: live in a run or a loop, and of saved weights. Names are imported on first use (PEP 562).

>>> from longspan.evaluation import EvaluationOptions, TargetTokens, evaluate

`docs/evaluation.md` shows them in use.
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.evaluation.live import evaluate as evaluate
    from longspan.evaluation.metrics import EvaluationOptions as EvaluationOptions, TargetTokens as TargetTokens
    from longspan.evaluation.result import Evaluation as Evaluation

__getattr__, __dir__, __all__ = lazy_exports(__name__)
