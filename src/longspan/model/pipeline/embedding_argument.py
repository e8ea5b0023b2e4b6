"""The embedding that layers read beside hidden states, as Zamba 2's do: it travels through a pipeline with these.

A base model's forward hands its layers what it got as embeddings. On a later stage these are hidden states, so that a
hook on every layer puts the embedding in their place; on the first stage it takes the embedding from there.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from longspan.model.parts import PartCall

KEYWORD = "longspan_embedding"  # what layers are called with: rows of the embedding, or where they are put


class Taken:
    """Where the first stage's layers put the embedding that they were given, (1, T, D)."""

    rows: Tensor | None = None


def embedding_argument(calls: Sequence[PartCall], layers: str) -> int | str | None:
    """The argument, by position or name, in which layers get the embedding as it is; None where there is none.

    Also where another part gets it, or layers get other earlier hidden states, or no keyword arguments of the model's.
    """
    more = [call for call in calls if call.reads_more]
    of_layers = all(call.part.startswith(f"{layers}.") and "shard" in call.keywords for call in more)
    arguments = {call.first_again for call in more}
    return arguments.pop() if of_layers and len(arguments) == 1 else None


def take_or_give_embedding(layer: nn.Module, argument: int | str) -> None:
    """From here on, a layer that is called with `KEYWORD` puts this argument there, or gets it from there."""
    layer.register_forward_pre_hook(partial(_take_or_give, argument), with_kwargs=True)


def _take_or_give(argument: int | str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = dict(kwargs)
    embedding = kwargs.pop(KEYWORD)
    arguments: Any = kwargs if isinstance(argument, str) else [*args]
    if isinstance(embedding, Taken):
        embedding.rows = arguments[argument]
    else:
        arguments[argument] = embedding
    return (args, kwargs) if isinstance(argument, str) else (tuple(arguments), kwargs)
