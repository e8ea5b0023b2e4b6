"""The difference of two models and its standard error, against direct sums over documents."""

import math
from pathlib import Path

import numpy as np
import pytest

from longspan import Layout, Plan, plan_fixed
from longspan.config.file import load_config
from longspan.evaluation.metrics import Mean
from longspan.evaluation.request import SavedWeights
from longspan.evaluation.result import Evaluation
from longspan.evaluation.row_sums import Bucket
from longspan.evaluation.saved_results import SetResult, SubjectResult, differences_by_set

LENGTHS = (100, 40, 300, 7, 129)
DRAW = np.random.default_rng(0)
FIRST, OTHER = (DRAW.uniform(1, 5, len(LENGTHS)) for _ in range(2))  # mean losses of documents
COUNTS = np.array(LENGTHS) - 1


PLANS = (
    plan_fixed(LENGTHS, Layout(ranks=1), cp=1),
    plan_fixed((70, 40, 300, 7, 99, 30), Layout(ranks=1), cp=1, parents=(5, -1, -1, -1, 5, -1)),  # 30 tokens are shared
)


def result(means: np.ndarray, plan: Plan) -> SubjectResult:
    losses = tuple(Mean(float(mean * count), int(count)) for mean, count in zip(means, COUNTS, strict=True))
    buckets = tuple(Bucket(first, last, Mean(0.0, 0), 0) for first, last in ((0, 127), (128, 255), (256, 511)))
    evaluation = Evaluation(
        step=0,
        cp=1,
        loss=float((means * COUNTS).sum() / COUNTS.sum()),
        documents=len(LENGTHS),
        tokens=sum(LENGTHS),
        targets=int(COUNTS.sum()),
        seconds=1.0,
        plan=plan,
        by_length=buckets,
        document_losses=losses,
    )
    sources = tuple(map(str, range(len(LENGTHS))))
    return SubjectResult(SavedWeights(Path("x")), load_config(), (SetResult(evaluation, sources),), ())


@pytest.mark.parametrize("plan", PLANS)
def test_the_difference_is_that_of_the_losses_and_its_error_that_of_documents(plan: Plan) -> None:
    (made,) = differences_by_set(result(FIRST, plan), result(OTHER, plan))
    paired = OTHER - FIRST
    assert made.difference == pytest.approx((paired * COUNTS).sum() / COUNTS.sum(), rel=1e-12)
    residuals = COUNTS * (paired - made.difference) / COUNTS.sum()
    assert made.standard_error == pytest.approx(math.sqrt(5 / 4 * (residuals**2).sum()), rel=1e-12)
    assert (made.unit, made.count, made.lower) == ("document", 5, int((paired < 0).sum()))
    means = [(OTHER * COUNTS)[i].sum() / COUNTS[i].sum() for i in ([0, 1, 3], [4], [2])]
    assert [row[3] for row in made.by_length] == pytest.approx(means, rel=1e-12)
    assert [row[4] for row in made.by_length] == [3, 1, 1]
