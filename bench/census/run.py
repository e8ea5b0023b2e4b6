"""What the census runs of one model: a small copy beside the stock model, in several ways."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from bench.census.models import class_name, default_config, head_kinds

from longspan.doctor.cases import Case, list_cases
from longspan.doctor.outcomes import Outcome
from longspan.doctor.proof import prove
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.plan.shape.model_shape import read_experts

RANKS = 3  # degrees 2 and 3
ORDER = ("wrong", "crashed", "not built", "refused", "exact")
Row = dict[str, Any]


def row_of(name: str) -> Row:
    began = time.perf_counter()
    row: Row = {"class": class_name(name), "heads": [], "status": "not built", "message": "", "ways": {}}
    try:
        config = default_config(name)
        with suppress(ValueError, TypeError, KeyError):  # of a class with several language models
            row["heads"] = head_kinds(config)
        small = shrink_configuration(config)
    except Exception as error:  # of a configuration class, and of the stock model
        row["message"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return row | {"seconds": round(time.perf_counter() - began, 1)}
    row |= as_such(prove(small, list_cases("basic", RANKS), RANKS))
    if row["status"] == "exact":
        ways = {"tp 2": Case(tp=2), "pp 2": Case(pp=2)}
        if read_experts(small.get_text_config()).of_layer > 1:
            ways |= {"ep 2": Case(ep=2, cp=2), "router losses": Case(cp=2, router_losses=True)}
        outcomes = prove(small, tuple(ways.values()), 2)
        row["ways"] = {way: {"status": o.status, **said(o)} for way, o in zip(ways, outcomes, strict=True)}
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def as_such(outcomes: Sequence[Outcome]) -> Row:
    """The worst of the cases, and what it said."""
    worst = min(outcomes, key=lambda o: (ORDER.index(o.status), -max(o.loss_error or 0.0, o.gradient_error or 0.0)))
    return {"status": worst.status, "cases": len(outcomes), **said(worst)}


def said(outcome: Outcome) -> Row:
    errors = {"loss_error": outcome.loss_error, "gradient_error": outcome.gradient_error}
    return {"message": outcome.message, "case": outcome.case.name, "parameter": outcome.parameter, **errors}
