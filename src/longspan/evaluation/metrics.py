"""What an evaluation measures: sums and counts over rows that have a target, which add up over slots and micro-batches.

A metric is a function of such rows to (sum, count). A mean over ranks' or micro-batches' means would depend on how
documents are dealt out; sums and counts do not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.errors import ConfigError, EvaluationError, import_object, plural
from longspan.plain_text import short_text
from longspan.train.log_probs import distribution_values
from longspan.train.rows.read_rows import WEIGHTS

if TYPE_CHECKING:
    from longspan.train.terms.distillation import Distillation
    from longspan.train.terms.document_loss import DocumentLoss


class TargetTokens(NamedTuple):
    """Some rows of one micro-batch that have a target, n of them, on the model's device.

    `documents` (n,) are numbered as in the plan; a row at `positions` (n,) predicts the token after it, whose id is in
    `targets` (n,). `losses` (n,) are in float64, of the natural logarithm; `logits` (n, V) as the model made them.
    `values` (n,) are what came with the documents, by name, of the tokens that are predicted; "weights" are 1 where
    none came.
    """

    documents: Tensor
    positions: Tensor
    targets: Tensor
    losses: Tensor
    logits: Tensor
    values: Mapping[str, Tensor] = {}


BUILT_IN = ("loss", "perplexity", "token_accuracy", "accuracy", "bits_per_byte", "kl", "agreement", "name")
BUILT_IN += ("tokens", "targets", "documents")
Metric = Callable[[TargetTokens], tuple[Any, Any]]
# values (n,) and counts (n,), which may be true or false
DocumentMetric = Callable[[TargetTokens], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Mean:
    """A sum and the count that it is divided by."""

    sum: float
    count: float

    @property
    def value(self) -> float | None:
        """The mean; None where nothing was counted."""
        return self.sum / self.count if self.count else None


def check_sum_and_count(name: str, answer: Any) -> tuple[Any, Any]:
    """Return the answer of the metric `name`, a pair (sum, count). Raises EvaluationError for any other answer."""
    if isinstance(answer, tuple) and len(answer) == 2 and all(map(_is_number, answer)):
        return answer
    if isinstance(answer, Tensor):
        text = f"a tensor of shape {tuple(answer.shape)}"
    else:
        text = f"{type(answer).__name__} {short_text(answer)}"
    raise EvaluationError(
        f"the metric {name!r} gave {text}; return (sum, count) over the rows, two numbers or tensors without "
        "dimensions: a value without its count cannot be added up over micro-batches and ranks"
    )


def check_metric_names(names: Iterable[str]) -> None:
    """Raise EvaluationError for a name of a metric that every evaluation has (BUILT_IN)."""
    for name in names:
        if name in BUILT_IN:
            raise EvaluationError(f"a metric is called {name!r}, which every evaluation has; give it another name")


def check_columns(name: str, answer: Any, rows: int) -> Tensor:
    """Return the answer (values, counts) of the metric of documents `name` for n rows as one float64 tensor (2, n).

    Values are 0 where the count is 0. Raises EvaluationError for any other answer.
    """
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    if is_pair and all(isinstance(x, Tensor) and x.shape == (rows,) for x in answer):
        values, counts = (column.double() for column in answer)
        return torch.stack([values.where(counts != 0, 0.0), counts])
    raise EvaluationError(
        f"the metric of documents {name!r} gave {short_text(answer)} for {plural(rows, 'row')}; return "
        f"(values, counts), two tensors of shape ({rows},); a row that does not count has the count 0"
    )


def _is_number(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex()) or isinstance(value, Real)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of `evaluate`; the same on every rank except `stopped` and `progress`.

    Raises EvaluationError for a metric of a name that every evaluation has.
    """

    step: int = 0
    """Optimizer steps that the weights have taken: for results and errors."""
    name: str = ""
    """Name of the evaluation set."""
    loss_chunk_rows: int = 0
    """Rows whose logits are formed at a time; 0: by a budget of bytes."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics besides the built-in ones, by name: functions of TargetTokens to (sum, count)."""
    document_metrics: Mapping[str, DocumentMetric] = field(default_factory=dict)
    """Metrics of each document, by name: functions of TargetTokens to the values and the counts of rows, two tensors
    (n,), which are added up for every document; a row that does not count has the count 0."""
    loss: "DocumentLoss | None" = None
    """A loss of sets of documents in place of the cross entropy of tokens, or of what a model of one score has: a set's
    first document is right then where its score is the highest. `figures` of the loss are metrics."""
    distillation: "Distillation | None" = None
    """A teacher, which runs over the same documents: the divergence of the model's distributions from the teacher's
    (`kl`), by position and length too, and how often their likeliest tokens are the same (`agreement`)."""
    token_bytes: npt.NDArray[np.int64] | None = None
    """(V,) UTF-8 bytes of each token id's text: with them, bits per byte."""
    share_prefixes: bool = True
    """Compute prefixes that documents share once (docs/shared-prefixes.md), where that is exact and faster."""
    stopped: Callable[[], str] | None = None
    """Asked on every rank before each portion of micro-batches: why to stop, in words; "" to go on."""
    progress: Callable[[int, int], None] | None = None
    """Called after each portion with the number of micro-batches that are done, and of all."""

    def __post_init__(self) -> None:
        check_metric_names((*self.metrics, *self.document_metrics))


def load_metrics(names: Sequence[str], key: str) -> dict[str, Metric]:
    """Load the metrics of these dotted names; return them by the last part of their names.

    `key` is the key or flag that names them, for errors. Raises ConfigError for a name of no function, and for two
    functions of one name.
    """
    metrics = dict[str, Metric]()
    for dotted in names:
        module, _, name = dotted.rpartition(".")
        if not module:
            raise ConfigError(
                f"{key} has {dotted!r}; give a function with its module, as in package.module.function"
            )
        function = import_object(dotted, f"{key} has {dotted!r}")
        if not callable(function):
            raise ConfigError(
                f"{key} has {dotted!r}, and {module} has no function {name}; give one of TargetTokens to (sum, count)"
            )
        if name in metrics:
            raise ConfigError(
                f"{key} has two functions of the name {name!r} ({', '.join(names)}); rows of metrics.jsonl "
                "would have two values for one key: give one of them another name"
            )
        metrics[name] = cast(Metric, function)
    return metrics


# A number follows, and names what a loss of sets reads of a language model's documents.
_SUM_OF_SETS = "sums of sets/"


def with_sums_of_sets(options: EvaluationOptions) -> EvaluationOptions:
    """Return options that also sum, for each document, what their loss of sets reads of a language model."""
    loss = options.loss
    assert loss is not None

    def sum_column(name: str, rows: TargetTokens) -> tuple[Tensor, Tensor]:
        """Return what each row adds to the sum of this name, with a count of 1.

        A name of the loss's `also` is that of a number of the distribution, which gets the first weights. Any other
        name is that of weights, by which the log-probability is multiplied.
        """
        ones = torch.ones_like(rows.losses)
        if name in loss.also:
            numbers = distribution_values(rows.logits, rows.targets, (name,))[0]
            return numbers * rows.values[loss.columns[0]], ones
        # The losses of `rows` are weighted by WEIGHTS already.
        return -rows.losses * (ones if name == WEIGHTS else rows.values[name]), ones

    names = (*loss.columns, *loss.also)
    sums = {f"{_SUM_OF_SETS}{i}": partial(sum_column, name) for i, name in enumerate(names)}
    return replace(options, document_metrics={**sums, **options.document_metrics})
