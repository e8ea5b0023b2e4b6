"""An encoder of a multimodal model: a module with its projector under a home of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from longspan.comm import World
from longspan.plan.cost.cost import DEFAULT_COST, Cost


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder with its projector, its world, and how its items are dealt out.

    `module(inputs)` takes a list of what the documents' `read` gives for each item, and returns their rows (n, D) end
    to end, D being the language model's width; where several slots may share an item (`max_cp` above 1), it is called
    with `shard=` too and returns this rank's rows. `world` is of the encoder's own Layout, without pipeline stages,
    over the language model's ranks.

    Items are dealt to the encoder's slots by `plan_dynamic`, priced by `cost`, an item being a document of its rows:
    in waves of at most `max_rows_per_slot` rows a slot. `recompute` encodes each wave again before its backward pass
    instead of keeping what that needs. An encoder of which no parameter requires a gradient is frozen: nothing flows
    back to it, and in training it stays in the mode that it is in.

    With `deep_layers` L its rows are (n, D · (1 + L)): the first D enter at the input embedding, and part k is added to
    what decoder layer k returns, k from 0 (DeepStack, https://arxiv.org/abs/2406.04334).

    `in_spans`: in every layer of the language model the rows of an item see each other in both directions, those of
    items side by side too, as Gemma 3's images do.
    """

    module: nn.Module
    world: World
    max_rows_per_slot: int | None = None
    max_cp: int = 1
    cost: Cost = DEFAULT_COST
    recompute: bool = False
    deep_layers: int = 0
    in_spans: bool = False

    @property
    def frozen(self) -> bool:
        """Whether no parameter requires a gradient."""
        return not any(parameter.requires_grad for parameter in self.module.parameters())


def modalities_in_spans(encoders: Mapping[str, Encoder]) -> tuple[str, ...]:
    """Those of which the rows of an item see each other."""
    return tuple(modality for modality, encoder in encoders.items() if encoder.in_spans)
