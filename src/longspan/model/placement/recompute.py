"""Which activations of decoder layers are kept for backward, which are recomputed, and which wait on the host.

"full" keeps a layer's input and recomputes the layer, its communication included. "selective" keeps attention's output
and log-sum-exp as well, so that attention and its communication run once. Built on `torch.utils.checkpoint`, for each
layer, without re-entrance; whatever a layer was called with, its shard among it, is bound into the recomputation.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import PreTrainedModel

from longspan.attention.saved_outputs import Recording
from longspan.errors import ModelError
from longspan.model.layers import decoder_layers, layers_of_stages
from longspan.model.mtp.depths import mtp_blocks
from longspan.model.placement.offload import HostOffload, saved_on_host
from longspan.model.seams.layer_arguments import within_layer

Recompute = Literal["none", "full", "selective"]


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """Which decoder layers are recomputed in backward, and where what they start from waits meanwhile.

    `layers` is how many of a stage's layers, the first ones (0: each); with `offload`, what is kept waits on the host.
    """

    kind: Recompute = "none"
    layers: int = 0
    offload: bool = False

    @classmethod
    def of(cls, checkpointing: bool | str, *, layers: int = 0, offload: bool = False) -> "Recomputation":
        """From `activation_checkpointing`: True is "full", False "none". Raises ModelError for another word."""
        kind = ("full" if checkpointing else "none") if isinstance(checkpointing, bool) else checkpointing
        if kind not in get_args(Recompute):
            raise ModelError(f"activation_checkpointing is {kind!r}; use one of {', '.join(get_args(Recompute))}")
        if kind == "none" and layers:
            raise ModelError(f"recompute_layers is {layers}; it needs activation_checkpointing 'full' or 'selective'")
        if kind == "none" and offload:
            raise ModelError(
                "offload_activations moves what checkpointed layers keep; it needs activation_checkpointing "
                "'full' or 'selective'"
            )
        return cls(kind=cast(Recompute, kind), layers=layers, offload=offload)

    def check(self, model: PreTrainedModel, stages: int) -> None:
        """Raise ModelError where a whole model that goes into so many stages cannot be recomputed so.

        The same on every rank, before anything is changed: more layers than the largest stage has, or layers that
        cannot be recomputed.
        """
        layers = decoder_layers(model)
        most = max(len(part) for part in layers_of_stages(len(layers), stages))
        if not 0 <= self.layers <= most:
            where = "are here" if stages == 1 else f"are in the largest of {stages} pipeline stages"
            raise ModelError(
                f"recompute_layers is {self.layers}, {most} decoder layers {where}; use 0 (each) to {most}"
            )
        for name, layer in layers.items() if self.kind != "none" else ():
            if not (model.supports_gradient_checkpointing and hasattr(layer, "gradient_checkpointing")):
                raise ModelError(
                    f"{type(model).__name__}: {name} ({type(layer).__name__}) does not support activation "
                    "checkpointing; switch it off"
                )

    def apply(self, model: PreTrainedModel) -> None:
        """Recompute the layers that are here, a whole model's or a stage's, which may be fewer than `layers`.

        Those of multi-token prediction come after the others.
        """
        if self.kind == "none":
            return
        offload = HostOffload() if self.offload else None
        layers = [*decoder_layers(model).values(), *mtp_blocks(model).values()]
        for index, layer in enumerate(layers[: self.layers or None]):
            module: Any = layer  # the attributes that transformers' gradient_checkpointing_enable sets, in 5.17 to 5.23
            module._gradient_checkpointing_func = partial(
                checkpointed, selective=self.kind == "selective", offload=offload, first=index == 0
            )
            module.gradient_checkpointing = True


def checkpointed(run: Callable[..., Any], *args: Any, selective: bool, offload: HostOffload | None, first: bool) -> Any:
    """One call of a layer under a checkpoint of its own."""
    if offload is not None and first:
        offload.begin()
    contexts = Recording(offload).contexts if selective else noop_context_fn
    # Inside, the checkpoint's own hooks are innermost: those of the offload see the layer's inputs and nothing else.
    with saved_on_host(offload) if offload is not None else nullcontext():
        return checkpoint(within_layer(run), *args, use_reentrant=False, context_fn=contexts)
