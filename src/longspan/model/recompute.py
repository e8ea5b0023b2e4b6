"""Which activations of decoder layers are kept for backward, which are recomputed, and which wait on the host.

"full" keeps a layer's input and recomputes the layer, its communication included. "selective" keeps attention's output
and log-sum-exp as well, so that attention and its communication run once. Built on `torch.utils.checkpoint`, for each
layer, without re-entrance; whatever a layer was called with, its shard among it, is bound into the recomputation.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, cast, get_args

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import PreTrainedModel

from longspan.attention.recall import Recording
from longspan.errors import ModelError
from longspan.model.offload import Parking, hooks
from longspan.model.probe import decoder_layers
from longspan.model.stages import layers_of_stages

Recompute = Literal["none", "full", "selective"]


def recompute_choice(asked: bool | str) -> Recompute:
    """The choice that a caller names; True is "full", False "none". Raises ModelError for another word."""
    if isinstance(asked, bool):
        return "full" if asked else "none"
    if asked not in get_args(Recompute):
        raise ModelError(f"activation_checkpointing is {asked!r}; use one of {', '.join(get_args(Recompute))}")
    return cast(Recompute, asked)


def check_recompute(
    model: PreTrainedModel, asked: bool | str, *, offload: bool = False, layers: int = 0, stages: int = 1
) -> None:
    """Raise ModelError for what `recompute_activations` cannot do with a whole model that goes into so many stages.

    The same on every rank, before anything is changed: layers that cannot be recomputed, more of them than the largest
    stage has, and `offload` or `layers` without recomputation.
    """
    kind, found = recompute_choice(asked), decoder_layers(model)
    if kind == "none" and layers:
        raise ModelError(f"recompute_layers is {layers}; it needs activation_checkpointing 'full' or 'selective'")
    if kind == "none" and offload:
        raise ModelError(
            "offload_activations moves what checkpointed layers keep; it needs activation_checkpointing "
            "'full' or 'selective'"
        )
    most = max(len(part) for part in layers_of_stages(len(found), stages))
    if not 0 <= layers <= most:
        where = "are here" if stages == 1 else f"are in the largest of {stages} pipeline stages"
        raise ModelError(f"recompute_layers is {layers}, {most} decoder layers {where}; use 0 (each) to {most}")
    for name, layer in found.items() if kind != "none" else ():
        if not (model.supports_gradient_checkpointing and hasattr(layer, "gradient_checkpointing")):
            raise ModelError(
                f"{type(model).__name__}: {name} ({type(layer).__name__}) does not support activation checkpointing; "
                "switch it off"
            )


def recompute_activations(model: PreTrainedModel, asked: bool | str, *, offload: bool = False, layers: int = 0) -> None:
    """Recompute each decoder layer in backward, as `asked`; with `offload`, what is kept meanwhile waits on the host.

    `layers` recomputes that many of the layers that are here, the first ones, and keeps all of the others; 0: each, as
    where fewer are here. What is asked was checked on the whole model (`check_recompute`).
    """
    kind = recompute_choice(asked)
    if kind == "none":
        return
    parking = Parking() if offload else None
    for index, layer in enumerate([*decoder_layers(model).values()][: layers or None]):
        settings = {"selective": kind == "selective", "parking": parking, "first": index == 0}
        _set(layer, _gradient_checkpointing_func=partial(_checkpointed, **settings), gradient_checkpointing=True)


def _set(layer: nn.Module, **values: Any) -> None:
    """What transformers' own `gradient_checkpointing_enable` sets on a layer, in 5.17 and 5.23."""
    for name, value in values.items():
        setattr(layer, name, value)


def _checkpointed(run: Callable[..., Any], *args: Any, selective: bool, parking: Parking | None, first: bool) -> Any:
    """One call of a layer under a checkpoint of its own."""
    if parking is not None and first:
        parking.begin()
    contexts = Recording(parking).contexts if selective else noop_context_fn
    # Inside, the checkpoint's own hooks are innermost: these see the layer's inputs and nothing else.
    with hooks(parking) if parking is not None else nullcontext():
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)
