"""What the calls and steps of a prepared model are checked against: a value that `prepare` leaves on the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from longspan.comm import SequenceShard
from longspan.errors import ModelError
from longspan.model.seams.positions import PositionTable


@dataclass(frozen=True)
class CallRules:
    """Of a model of this `architecture`: the kernel of its layers, and what its rows must be.

    `attention_kernel` None: each call of attention takes the first kernel that can. A slot's rows must be a multiple of
    `row_multiple`, which is tp under sequence parallelism; `random_draws` are what training would draw at random.
    """

    architecture: str
    attention_kernel: str | None = None
    position_table: PositionTable | None = None
    random_draws: tuple[str, ...] = ()
    row_multiple: int = 1

    def with_kernel(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call, and with them the kernel where one was named; a caller's own one wins."""
        kernel = {} if self.attention_kernel is None else {"attention_kernel": self.attention_kernel}
        return {**kernel, **arguments}

    def check_rows(self, shard: SequenceShard) -> None:
        """Raise ModelError for rows that sequence parallelism cannot split."""
        if shard.local_rows % self.row_multiple:
            raise ModelError(
                f"the shard holds {shard.local_rows} rows, which sequence parallelism cannot split over tp "
                f"{self.row_multiple}; use shard.with_padding(multiple={self.row_multiple}), and plans with "
                f"row_multiple={self.row_multiple}"
            )


def call_rules(model: nn.Module) -> CallRules:
    """The rules of a prepared model; those of another one refuse nothing."""
    return getattr(model, "call_rules", None) or CallRules(type(model).__name__)
