"""A table [[eval]] of a configuration: a named evaluation set. What it does not say is as `context.eval_*` has it.

The documents that `data.eval_documents` holds out are the set without a name, which is evaluated as train.eval_every
and context.eval_* say. Imports no torch.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from longspan.config.bounds import NOT_GIVEN, AtLeast, NonNegativeFloat, NonNegativeInt, PositiveInt
from longspan.config.passkey_settings import DEPTHS, PasskeySettings


@dataclass(frozen=True)
class EvalConfig:
    """A named evaluation set: documents that are never trained on, when they are evaluated, and under which plans.

    The file may have any number of these tables, each with a name; flags do not reach them. The keys after max_seconds
    are those of [context] that begin with eval_, without that prefix: what is not given is as they say.
    """

    name: str = ""
    """Letters, digits, - and _ and dots: in lines, in metrics.jsonl, and the folder RUN/evaluation/NAME."""
    path: str = ""
    """A folder or file of .txt .md .py .jsonl, or stdlib, as data.path; tokenized with the run's tokenizer. Or passkey:
    made documents, which hide a number and ask for it (docs/evaluation.md)."""
    passkey_lengths: tuple[int, ...] = ()
    """With path = "passkey": tokens of the documents in which a number is hidden, such as [1024, 4096, 16384]."""
    passkey_depths: tuple[float, ...] = DEPTHS
    """Where in a document it stands, from 0 (its beginning) to 1 (its end)."""
    passkey_samples: PositiveInt = 4
    """Documents of each length and depth."""
    documents: NonNegativeInt = 0
    """At most this many of its documents, chosen by train.seed; 0: all."""
    max_document_tokens: NonNegativeInt = NOT_GIVEN
    """As data.max_document_tokens, of this set. Default: the same."""
    every: NonNegativeInt = NOT_GIVEN
    """Steps between evaluations; 0: only after the last step. Default: train.eval_every."""
    metrics: tuple[str, ...] = ()
    """Metrics of your own, as train.eval_metrics. Default: the same."""
    max_seconds: NonNegativeFloat = NOT_GIVEN
    """As train.eval_seconds, of this set; 0: no limit. Default: the same."""
    planner: Literal["", "fixed", "padded", "dynamic"] = ""
    """As context.eval_planner. Default: the same, or fixed where context_parallel_size is given."""
    context_parallel_size: Annotated[int | str, AtLeast(0)] = NOT_GIVEN
    """As context.eval_context_parallel_size. Default: the same."""
    cp_comm_type: str | tuple[str, ...] = ""
    """As context.eval_cp_comm_type. Default: the same, or auto where context_parallel_size is."""
    partition: Literal["", "auto", "zigzag", "contiguous"] = ""
    """As context.eval_partition. Default: the same."""
    max_tokens_per_slot: Annotated[int | str, AtLeast(0)] = NOT_GIVEN
    """As context.eval_max_tokens_per_slot. Default: the same."""
    hierarchical_context_parallel_sizes: int | tuple[int, ...] = NOT_GIVEN
    """As context.eval_hierarchical_context_parallel_sizes. Default: the same, fitted to the degree."""
    attention_kernel: str = ""
    """As context.eval_attention_kernel. Default: the same."""

    def passkey(self, seed: int) -> PasskeySettings:
        """What its documents are made of, where its path is passkey."""
        return PasskeySettings(self.passkey_lengths, self.passkey_depths, self.passkey_samples, seed)

    @property
    def prefix(self) -> str:
        """How messages begin the names of its keys."""
        return f"eval.{self.name}." if self.name else "context.eval_"

    @property
    def metrics_key(self) -> str:
        """The key of its metrics, for messages."""
        return f"{self.prefix}metrics" if self.name else "train.eval_metrics"


# Keys that a set has in common with [context], where they begin with eval_: what its plans are made of.
PLAN_KEYS = (
    "planner",
    "context_parallel_size",
    "cp_comm_type",
    "partition",
    "max_tokens_per_slot",
    "hierarchical_context_parallel_sizes",
    "attention_kernel",
)
