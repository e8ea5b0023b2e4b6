"""What an evaluation measures: sums and counts over rows that have a target, which add up over slots and micro-batches.

A metric is a function of such rows to (sum, count). A mean over ranks' or micro-batches' means would depend on how
documents are dealt out; sums and counts do not.
"""

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from numbers import Real
from types import CellType, CodeType, FunctionType, ModuleType
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from longspan.errors import ConfigError, EvaluationError, import_object, plural


class TargetRows(NamedTuple):
    """Some rows of one micro-batch that have a target, n of them, on the model's device.

    `documents` (n,) are numbered as in the plan; a row at `positions` (n,) predicts the token after it, whose id is in
    `targets` (n,). `losses` (n,) are in float64, of the natural logarithm; `logits` (n, V) as the model made them.
    """

    documents: Tensor
    positions: Tensor
    targets: Tensor
    losses: Tensor
    logits: Tensor


BUILT_IN = ("loss", "perplexity", "token_accuracy", "bits_per_byte", "tokens", "targets", "documents", "name")
Metric = Callable[[TargetRows], tuple[Any, Any]]
DocumentMetric = Callable[
    [TargetRows], tuple[Tensor, Tensor]
]  # (n,) values and (n,) counts, which may be true or false


@dataclass(frozen=True)
class Mean:
    """A sum and the count that it is divided by."""

    sum: float
    count: float

    @property
    def value(self) -> float | None:
        """The mean; None where nothing was counted."""
        return self.sum / self.count if self.count else None


class Bucket(NamedTuple):
    """The loss of rows at positions `first` to `last`, or of documents of `first` to `last` tokens."""

    first: int
    last: int
    loss: Mean
    documents: int


def check_sum_and_count(name: str, result: Any) -> tuple[Any, Any]:
    """Return the result of a metric, a pair (sum, count). Raises EvaluationError for any other result."""
    if isinstance(result, tuple) and len(result) == 2 and all(map(_is_number, result)):
        return result
    if isinstance(result, Tensor):
        text = f"a tensor of shape {tuple(result.shape)}"
    else:
        text = f"{type(result).__name__} {result!r}"
    raise EvaluationError(
        f"the metric {name!r} gave {text[:200]}; return (sum, count) over the rows, two numbers or tensors without "
        "dimensions: a value without its count cannot be added up over micro-batches and ranks"
    )


def check_metrics(
    metrics: Mapping[str, Metric],
    document_metrics: Mapping[str, DocumentMetric],
    vocabulary: int | None,
    device: torch.device,
) -> None:
    """Try a copy of each metric on two example rows; a metric that cannot be copied is not tried.

    The rows' logits are as long as the vocabulary (None: not known, 8 then). Raises EvaluationError for a metric that
    fails, that gives something other than sums and counts, or whose name is one of BUILT_IN.
    """
    for name, metric in {**metrics, **document_metrics}.items():
        if name in BUILT_IN:
            raise EvaluationError(f"a metric is called {name!r}, which every evaluation has; give it another name")
        try:
            copy = copy_metric(metric)
        except Exception:  # a metric may hold what pickle cannot copy
            continue
        try:
            example = copy(_example_rows(vocabulary or 8, device))
        except Exception as error:
            raise EvaluationError(
                f"the metric {name!r} failed on two made rows (logits of shape (2, {vocabulary or 8})): "
                f"{type(error).__name__}: {error}"
            ) from error
        _ = check_columns(name, example, 2) if name in document_metrics else check_sum_and_count(name, example)


def check_columns(name: str, result: Any, rows: int) -> Tensor:
    """Return the result of a metric of documents, its values and counts of n rows, as one tensor (2, n) in float64.

    The value of a row that does not count, which may be NaN, becomes 0. Raises EvaluationError for any other result.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    if is_pair and all(isinstance(x, Tensor) and x.shape == (rows,) for x in result):
        values, counts = (column.double() for column in result)
        return torch.stack([values.where(counts != 0, 0.0), counts])
    raise EvaluationError(
        f"the metric of documents {name!r} gave {str(result)[:200]} for {plural(rows, 'row')}; return "
        f"(values, counts), two tensors of shape ({rows},); a row that does not count has the count 0"
    )


class _Copier(pickle.Pickler):
    """Copies an object with all that it refers to, and a function with the variables of its closure.

    Classes, modules, functions without a closure and parameters of models are not copied but shared with the original.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.shared: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        is_plain_function = isinstance(obj, FunctionType) and not obj.__closure__
        if not is_plain_function and not isinstance(obj, type | ModuleType | CodeType | nn.Parameter):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1

    def reducer_override(self, obj: Any) -> Any:
        """Describe to pickle how a function is made again with the values of its closure."""
        if not isinstance(obj, FunctionType):
            return NotImplemented  # pickle's own way
        closure_values = [cell.cell_contents for cell in obj.__closure__ or ()]
        settings = {name: getattr(obj, name) for name in ("__defaults__", "__kwdefaults__")}
        # pickle's protocol: what makes the function, its arguments, and then what is set on it: __dict__, attributes
        return _make_function, (obj.__code__, obj.__module__, closure_values), (vars(obj), settings)


def _make_function(code: CodeType, module: str, closure_values: Sequence[Any]) -> FunctionType:
    return FunctionType(code, vars(sys.modules[module]), None, None, tuple(map(CellType, closure_values)))


def copy_metric(metric: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a metric, so that a trial on made rows changes nothing that the metric itself keeps.

    Raises the error with which copying fails.
    """
    file = BytesIO()
    copier = _Copier(file)
    copier.dump(metric)
    reader = pickle.Unpickler(BytesIO(file.getvalue()))
    reader.persistent_load = copier.shared.__getitem__
    return reader.load()


def _example_rows(vocabulary: int, device: torch.device) -> TargetRows:
    index = torch.arange(2, device=device)
    logits = torch.linspace(-1, 1, 2 * vocabulary, device=device).view(2, vocabulary)
    return TargetRows(torch.zeros_like(index), index, index % vocabulary, index.double() + 1, logits)


def _is_number(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex()) or isinstance(value, Real)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of `evaluate`; the same on every rank except `stopped` and `progress`."""

    step: int = 0
    """Optimizer steps that the weights have taken: for results and errors."""
    name: str = ""
    """Name of the evaluation set."""
    loss_chunk_rows: int = 0
    """Rows whose logits are formed at a time; 0: by a budget of bytes."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics besides the built-in ones, by name: functions of TargetRows to (sum, count). A copy of each is tried on
    two made rows first; what it keeps in variables of its module is not copied."""
    document_metrics: Mapping[str, DocumentMetric] = field(default_factory=dict)
    """Metrics of each document, by name: functions of TargetRows to the values and the counts of rows, two tensors
    (n,), which are added up for every document; a row that does not count has the count 0."""
    token_bytes: npt.NDArray[np.int64] | None = None
    """(V,) UTF-8 bytes of each token id's text: with them, bits per byte."""
    attention_kernel: str | None = None
    """Attention kernel; None: as the model was prepared."""
    seconds: float | None = None
    """The evaluation is stopped at the end of the portion in which so many seconds are over; None: no limit."""
    stopped: Callable[[], str] | None = None
    """Asked on every rank before each portion of micro-batches: why to stop, in words; "" to go on."""
    progress: Callable[[int, int], None] | None = None
    """Called after each portion with the number of micro-batches that are done, and of all."""


def load_metrics(names: Sequence[str], key: str) -> dict[str, Metric]:
    """Load the metrics that a key of the configuration names, by the last part of their names.

    >>> list(load_metrics(("my_package.my_metrics.top_five",), "train.eval_metrics"))  # doctest: +SKIP
    ['top_five']

    Raises ConfigError for a module that cannot be imported, for one without such a function, and for two of one name.
    """
    metrics = dict[str, Metric]()
    for dotted in names:
        module, _, name = dotted.rpartition(".")
        if not module:
            raise ConfigError(f"{key} has {dotted!r}; give a function with its module, as in package.module.function")
        function = import_object(dotted, f"{key} has {dotted!r}")
        if not callable(function):
            raise ConfigError(
                f"{key} has {dotted!r}, and {module} has no function {name}; give one of TargetRows to (sum, count)"
            )
        if name in metrics:
            raise ConfigError(
                f"{key} has two functions of the name {name!r} ({', '.join(names)}); rows of metrics.jsonl "
                "would have two values for one key: give one of them another name"
            )
        metrics[name] = cast(Metric, function)
    return metrics
