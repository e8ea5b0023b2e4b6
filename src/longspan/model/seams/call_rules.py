"""What a prepared model asks of its calls: its kernel, conditions on rows, and what is not exact for shared prefixes.

`prepare` sets them as the model's `call_rules`, by which a prepared model is known.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import SequenceShard
from longspan.errors import ModelError, plural
from longspan.model.seams.position_tables import PositionTable
from longspan.plan import MicroBatch
from longspan.plan.shape.positions import LengthLimit, length_class


@dataclass(frozen=True)
class CallRules:
    """The kernel of a model's layers, and conditions on its rows.

    Without a kernel each call takes the first that can. Draws are in words, outside attention. Rows see each other in
    items of modalities `in_spans`, or in a `prefix` of at most `prefix_window` rows; the shard must say where. What is
    `separate`, or so in training, is exact for separate documents alone, not for those that share prefixes. Rotary
    frequencies of a document's rows depend on its length by `length_limits`.
    """

    architecture: str
    attention_kernel: str | None = None
    position_table: PositionTable | None = None
    random_draws: tuple[str, ...] = ()
    draws_in_evaluation: tuple[str, ...] = ()
    row_multiple: int = 1
    in_spans: tuple[str, ...] = ()
    prefix: bool = False
    prefix_window: int | None = None
    separate: tuple[str, ...] = ()
    separate_in_training: tuple[str, ...] = ()
    length_limits: tuple[LengthLimit, ...] = ()

    def add_kernel_argument(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Put the model's kernel into the keyword arguments of a call, unless the caller chose one."""
        kernel = {} if self.attention_kernel is None else {"attention_kernel": self.attention_kernel}
        return {**kernel, **arguments}

    def check_rows(self, shard: SequenceShard) -> None:
        """Raise ModelError for a number of rows that sequence parallelism cannot split evenly."""
        if shard.local_rows % self.row_multiple:
            raise ModelError(
                f"the shard holds {shard.local_rows} rows, which sequence parallelism cannot split over tp "
                f"{self.row_multiple}; use shard.with_padding(multiple={self.row_multiple}), and plans with "
                f"row_multiple={self.row_multiple}"
            )

    def separate_features(self, *, training: bool) -> tuple[str, ...]:
        """Return what the model computes that is not exact where documents share prefixes.

        Documents that do must have the same frequencies by `length_limits`.
        """
        spans = ["a bidirectional prefix"] if self.prefix else [f"spans of {name}" for name in self.in_spans]
        return (*self.separate, *spans, *(self.separate_in_training if training else ()))

    def check_shared_prefixes(self, micro_batches: Iterable[MicroBatch], *, training: bool) -> None:
        """Raise ModelError if the model computes something that is not exact where documents share prefixes."""
        if features := self.separate_features(training=training):
            raise ModelError(
                f"{self.architecture} has {', '.join(features)}, exact for separate documents alone, and documents of "
                "the plan share prefixes; plan the documents before share_prefixes"
            )
        for group in (group for batch in micro_batches for group in batch.groups):
            for index, parent in enumerate(group.parents or ()):
                rows = [group.longest_paths[i] for i in (index, max(parent, 0))]
                if parent >= 0 and len({length_class(self.length_limits, n) for n in rows}) > 1:
                    raise ModelError(
                        f"document {group.documents[index]} of {plural(rows[0], 'row')} continues one that others of "
                        f"up to {rows[1]} continue, and {self.architecture} has other rotary frequencies for these; "
                        "call share_prefixes(documents, length_limits=model.call_rules.length_limits), or plan the "
                        "documents before it"
                    )

    def check_spans(self, shard: SequenceShard) -> None:
        """Raise ModelError for a shard without spans, if rows of this model may see each other."""
        documents = len(shard.micro_batch.documents)
        span_names = ["a prefix"] if self.prefix else self.in_spans
        if span_names and shard.spans is None and documents:
            raise ModelError(
                f"{self.architecture}: rows of {' and '.join(span_names)} see each other, and the shard of "
                f"{documents} documents says nothing of them; use shard.with_spans(...), with {{}} for text alone"
            )


def is_prepared(model: nn.Module) -> bool:
    """Return whether `prepare` has brought this model under a home."""
    return hasattr(model, "call_rules")


def refuse_unprepared_model(model: nn.Module) -> None:
    """Raise ModelError for a transformers model whose attention would take the local rows for the whole sequence."""
    if isinstance(model, PreTrainedModel) and not is_prepared(model):
        raise ModelError(
            f"{type(model).__name__} was not prepared; call model = longspan.prepare(model, world) before it runs"
        )


def call_rules(model: nn.Module) -> CallRules:
    """Return the rules of a prepared model; for a model that is not prepared, rules that refuse nothing."""
    return getattr(model, "call_rules", None) or CallRules(type(model).__name__)
