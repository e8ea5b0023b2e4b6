"""What plans take from [parallel] and from a model: the home, the multiple of a slot's rows, the heads."""

from typing import Any

from longspan.config.sections import ParallelConfig
from longspan.layout import Layout


def row_multiple_of(parallel: ParallelConfig) -> int:
    """What the rows of a slot are a multiple of: under sequence parallelism its tp ranks take equal parts of them."""
    return parallel.tp if parallel.sequence_parallel else 1


def home_of(parallel: ParallelConfig, ranks: int) -> Layout:
    """The home of a run on so many ranks. Raises LayoutError where the degrees do not divide them."""
    return Layout(ranks, pp=parallel.pp, tp=parallel.tp, ep=parallel.ep, dp_replicate=parallel.dp_replicate)


def query_heads(model_config: Any) -> int | None:
    """The number of query heads of a transformers configuration, of each layer that attends; None where none does."""
    return getattr(model_config.get_text_config(), "num_attention_heads", None)
