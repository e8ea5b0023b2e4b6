"""Options of an evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longspan.evaluation.metrics import DocumentMetric, Metric


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of `evaluate`; the same on every rank but for `stopped` and `progress`."""

    step: int = 0
    """Optimizer steps that the weights have taken: for results and errors."""
    name: str = ""
    """Name of the evaluation set."""
    loss_chunk_rows: int = 0
    """Rows whose logits are formed at a time; 0: by a budget of bytes."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics beside the built-in ones, by name: functions of TargetRows to (sum, count). A copy of each is tried on
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
